"""Embeddings and norms: cuda/embed.cu, norm_rope.cu."""

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import Weight, ceil_div, most_tokens
from orinllm.gpu.launch import Argument, Constants, Launch

_THREADS = 256
#: Rows of norms are whole vectors of four floats, and GEMV takes eight at once.
COLUMNS = 8


def count_of(rows: int | Buffer) -> tuple[str, int, tuple[Argument, ...]]:
    """Return the expression, the most and the arguments of a number of rows, or of a chunk's."""
    if isinstance(rows, int):
        return str(rows), rows, ()
    return "chunk[1]", most_tokens(rows), (Argument("const int* chunk", rows),)


@dataclass(frozen=True)
class Norm:
    """An RMS norm: its weights (cols) and epsilon."""

    weight: Buffer
    eps: float


@dataclass(frozen=True)
class EmbedConstants(Constants):
    """P of embed() and embed_rows()."""

    type: str
    cols: int
    threads: int


@dataclass(frozen=True)
class RowConstants(Constants):
    """P of norm_rows(), add_norm(), add_gated(), add_pictures(), last_row() and place_rows()."""

    cols: int
    threads: int


def embed_tokens(table: Weight, x: Buffer, state: Buffer, sequences: int, scale: float) -> Launch:
    """Return the embedding of a token of each sequence: x (sequences, cols)."""
    row_bytes = table.n_bytes // table.rows
    return Launch(
        name=f"embed_{table.type.name.lower()}_{table.cols}",
        file="embed.cu",
        constants=(EmbedConstants(table.type.name, table.cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const u8* table", table.buffer),
            Argument("const int* state", state),
        ),
        body=(
            f"  embed<P0>(x + blockIdx.y * {table.cols}, table, state + blockIdx.y, {scale!r}f);"
        ),
        grid=(ceil_div(table.cols, _THREADS), sequences, 1),
        block=_THREADS,
        writes=("x",),
        operations=table.cols * sequences,
        n_bytes=row_bytes * sequences,
    )


def embed_chunk(table: Weight, x: Buffer, chunk: Buffer, scale: float) -> Launch:
    """Return the embedding of a chunk: x (tokens, cols)."""
    return Launch(
        name=f"embed_rows_{table.type.name.lower()}_{table.cols}",
        file="embed.cu",
        constants=(EmbedConstants(table.type.name, table.cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const u8* table", table.buffer),
            Argument("const int* chunk", chunk),
        ),
        body=f"  embed_rows<P0>(x, table, chunk, {scale!r}f);",
        grid=(ceil_div(table.cols, _THREADS), most_tokens(chunk), 1),
        block=_THREADS,
        writes=("x",),
    )


@dataclass(frozen=True)
class LayersConstants(Constants):
    """P of embed_layers()."""

    type: str
    cols: int
    layers: int


def embed_layers(
    table: Weight, x: Buffer, norm: Norm, tokens: Buffer, scale: float, rows: int | Buffer
) -> Launch:
    """Return the embeddings of each layer, of what a matrix made: x (rows, layers, cols).

    tokens: the state (attention.cu), or a chunk.
    """
    cols, (count, most, more) = norm.weight.size, count_of(rows)
    layers, of = table.cols // cols, "chunk + 2" if more else "state"
    more = more or (Argument("const int* state", tokens),)
    return Launch(
        name=f"embed_layers_{table.type.name.lower()}_{cols}",
        file="embed.cu",
        constants=(LayersConstants(table.type.name, cols, layers),),
        arguments=(
            Argument("float* x", x),
            Argument("const u8* table", table.buffer),
            Argument("const float* norm", norm.weight),
            *more,
        ),
        body=f"  embed_layers<P0>(x, table, norm, {of}, {norm.eps!r}f, {scale!r}f, {count});",
        grid=(layers, most, 1),
        block=32,
        writes=("x",),
    )


def add_pictures(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return x += rows, both (tokens, cols), where a chunk's tokens are rows of pictures."""
    cols = x.size // most_tokens(chunk)
    return Launch(
        name=f"add_pictures_{cols}",
        file="embed.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const float* rows", rows),
            Argument("const int* chunk", chunk),
        ),
        body="  add_pictures<P0>(x, rows, chunk);",
        grid=(ceil_div(cols, _THREADS), most_tokens(chunk), 1),
        block=_THREADS,
        writes=("x",),
    )


def last_row(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return the copy of a chunk's last row: x (cols)."""
    return Launch(
        name=f"last_row_{x.size}",
        file="embed.cu",
        constants=(RowConstants(x.size, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const float* rows", rows),
            Argument("const int* chunk", chunk),
        ),
        body="  last_row<P0>(x, rows, chunk);",
        grid=(ceil_div(x.size, _THREADS), 1, 1),
        block=_THREADS,
        writes=("x",),
    )


def norm_rows(norm: Norm, out: Buffer, x: Buffer, rows: int | Buffer) -> Launch:
    """Return the norm of `rows` rows, or of the chunk's: out in halves (rows, cols)."""
    cols, (count, most, more) = norm.weight.size, count_of(rows)
    return Launch(
        name=f"norm_rows_{cols}",
        file="norm_rope.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("u16* out", out),
            Argument("const float* x", x),
            Argument("const float* norm", norm.weight),
            *more,
        ),
        body=f"  norm_rows<P0>(out, x, norm, {norm.eps!r}f, {count});",
        grid=(most, 1, 1),
        block=_THREADS,
        writes=("out",),
    )


def add_norm(norm: Norm, x: Buffer, y: Buffer, factor: float, rows: int | Buffer) -> Launch:
    """Return x += factor * norm(y), for `rows` rows or as many as the chunk has."""
    cols, (count, most, more) = norm.weight.size, count_of(rows)
    return Launch(
        name=f"add_norm_{cols}",
        file="norm_rope.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const float* y", y),
            Argument("const float* norm", norm.weight),
            *more,
        ),
        body=f"  add_norm<P0>(x, y, norm, {norm.eps!r}f, {factor!r}f, {count});",
        grid=(most, 1, 1),
        block=_THREADS,
        writes=("x",),
    )


def add_merged_norms(
    norms: Sequence[Norm], x: Buffer, values: tuple[Buffer, Buffer], rows: int | Buffer
) -> Launch:
    """Return x += norms[2](norms[0](values[0]) + norms[1](values[1])), of rows as in `add_norm`."""
    cols, (count, most, more) = norms[2].weight.size, count_of(rows)
    return Launch(
        name=f"merge_{cols}",
        file="norm_rope.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            *(Argument(f"const float* in{i}", value) for i, value in enumerate(values)),
            *(Argument(f"const float* norm{i}", norm.weight) for i, norm in enumerate(norms)),
            *more,
        ),
        body=f"  merge<P0>(Merged{{x, {{in0, in1}}, {{norm0, norm1, norm2}}}}, {norms[2].eps!r}f, "
        f"{count});",
        grid=(most, 1, 1),
        block=_THREADS,
        writes=("x",),
    )


@dataclass(frozen=True)
class GateConstants(Constants):
    """P of gate(), gate_rows() and activate()."""

    cols: int
    threads: int
    activation: str


def gate(out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer) -> Launch:
    """Return out = gate(inp), floats or halves as `out` is, of `rows` rows or of the chunk's."""
    halves, (count, most, more) = out.dtype == dtypes.uint16, count_of(rows)
    return Launch(
        name=f"gate_{cols}",
        file="gate.cu",
        constants=(GateConstants(cols, _THREADS, activation),),
        arguments=(
            Argument("u16* out" if halves else "float* out", out),
            Argument("const float* in", inp),
            *more,
        ),
        body=f"  gate_rows<P0>(out, in, {count});" if halves else "  gate<P0>(out, in);",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("out",),
    )


def activate(out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer) -> Launch:
    """Return out = the activation of each element, floats or halves as `out` is, of rows.

    Halves are times HIDDEN_SCALE, as those of `gate` are.
    """
    halves, (count, most, more) = out.dtype == dtypes.uint16, count_of(rows)
    return Launch(
        name=f"activate_{activation.lower()}_{cols}",
        file="gate.cu",
        constants=(GateConstants(cols, _THREADS, activation),),
        arguments=(
            Argument("u16* out" if halves else "float* out", out),
            Argument("const float* in", inp),
            *more,
        ),
        body=f"  activate<P0>(out, in, {count});",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("out",),
    )


@dataclass(frozen=True)
class ByConstants(GateConstants):
    """P of activate_by()."""

    stride: int


def activate_by(
    out: Buffer,
    inp: Buffer,
    by: tuple[Buffer, int],
    shape: tuple[int, int | Buffer],
    activation: str,
) -> Launch:
    """Return out = activation(inp, by), floats or halves as `out` is, of (columns, rows).

    by: elements, those of a row so many behind those of the one before. Halves are as `activate`'s.
    """
    cols, rows = shape
    halves, (count, most, more) = out.dtype == dtypes.uint16, count_of(rows)
    return Launch(
        name=f"activate_by_{activation.lower()}_{cols}",
        file="gate.cu",
        constants=(ByConstants(cols, _THREADS, activation, by[1]),),
        arguments=(
            Argument("u16* out" if halves else "float* out", out),
            Argument("const float* in", inp),
            Argument("const float* by", by[0]),
            *more,
        ),
        body=f"  activate_by<P0>(out, in, by, {count});",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("out",),
    )


def to_halves(out: Buffer, inp: Buffer, cols: int, rows: int | Buffer) -> Launch:
    """Return out = inp in halves, times HIDDEN_SCALE, of rows."""
    count, most, more = count_of(rows)
    return Launch(
        name=f"halve_{cols}",
        file="gate.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(Argument("u16* out", out), Argument("const float* in", inp), *more),
        body=f"  halve<P0>(out, in, {count});",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("out",),
    )


def scale(x: Buffer, by: Buffer, rows: int | Buffer) -> Launch:
    """Return x *= the number in `by`."""
    count, most, more = count_of(rows)
    cols = x.size // most
    return Launch(
        name=f"scale_{cols}",
        file="gate.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(Argument("float* x", x), Argument("const float* by", by), *more),
        body=f"  scale<P0>(x, by, {count});",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("x",),
    )


def add_gated(x: Buffer, y: Buffer, by: Buffer, factor: float, rows: int | Buffer) -> Launch:
    """Return x += factor * sigmoid(by) * y, with one element of `by` for each row."""
    count, most, more = count_of(rows)
    cols = x.size // most
    return Launch(
        name=f"add_gated_{cols}",
        file="gate.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const float* y", y),
            Argument("const float* by", by),
            *more,
        ),
        body=f"  add_gated<P0>(x, y, by, {factor!r}f, {count});",
        grid=(ceil_div(cols, _THREADS), most, 1),
        block=_THREADS,
        writes=("x",),
    )
