"""Embeddings, norms and gates: cuda/embed.cu, norm_rope.cu, gate.cu."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import Weight, ceil_div, most_tokens
from orinllm.gpu.launch import ROW_THREADS, Constants, Launch, launch_of_rows

#: Rows of norms are whole vectors of four floats, and GEMV takes eight at once.
COLUMNS = 8


def count_of(rows: int | Buffer) -> tuple[str, int, dict[str, Buffer]]:
    """Return the expression, the most and the arguments of a number of rows, or of a chunk's."""
    if isinstance(rows, int):
        return str(rows), rows, {}
    return "chunk[1]", most_tokens(rows), {"const int* chunk": rows}


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


def _grid(cols: int, rows: int) -> tuple[int, int]:
    """Return the grid of a thread an element."""
    return ceil_div(cols, ROW_THREADS), rows


def _out(out: Buffer) -> dict[str, Buffer]:
    """Return the argument of what is written in halves or floats."""
    return {"u16* out" if out.dtype == dtypes.uint16 else "float* out": out}


def embed_tokens(table: Weight, x: Buffer, state: Buffer, sequences: int, scale: float) -> Launch:
    """Return the embedding of a token of each sequence: x (sequences, cols)."""
    name, cols = table.type.name, table.cols
    launch = launch_of_rows(
        "embed.cu",
        f"embed_{name.lower()}_{cols}",
        EmbedConstants(name, cols, ROW_THREADS),
        {"float* x": x, "const u8* table": table.buffer, "const int* state": state},
        f"embed<P0>(x + blockIdx.y * {cols}, table, state + blockIdx.y, {scale!r}f)",
        _grid(cols, sequences),
    )
    n_bytes = table.n_bytes // table.rows * sequences
    return replace(launch, operations=cols * sequences, n_bytes=n_bytes)


def embed_chunk(table: Weight, x: Buffer, chunk: Buffer, scale: float) -> Launch:
    """Return the embedding of a chunk: x (tokens, cols)."""
    name, cols = table.type.name, table.cols
    return launch_of_rows(
        "embed.cu",
        f"embed_rows_{name.lower()}_{cols}",
        EmbedConstants(name, cols, ROW_THREADS),
        {"float* x": x, "const u8* table": table.buffer, "const int* chunk": chunk},
        f"embed_rows<P0>(x, table, chunk, {scale!r}f)",
        _grid(cols, most_tokens(chunk)),
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
    given = {"float* x": x, "const u8* table": table.buffer, "const float* norm": norm.weight}
    launch = launch_of_rows(
        "embed.cu",
        f"embed_layers_{table.type.name.lower()}_{cols}",
        LayersConstants(table.type.name, cols, layers),
        given | (more or {"const int* state": tokens}),
        f"embed_layers<P0>(x, table, norm, {of}, {norm.eps!r}f, {scale!r}f, {count})",
        (layers, most),
    )
    return replace(launch, block=32)


def add_pictures(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return x += rows, both (tokens, cols), where a chunk's tokens are rows of pictures."""
    cols = x.size // most_tokens(chunk)
    return launch_of_rows(
        "embed.cu",
        f"add_pictures_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"float* x": x, "const float* rows": rows, "const int* chunk": chunk},
        "add_pictures<P0>(x, rows, chunk)",
        _grid(cols, most_tokens(chunk)),
    )


def last_row(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return the copy of a chunk's last row: x (cols)."""
    return launch_of_rows(
        "embed.cu",
        f"last_row_{x.size}",
        RowConstants(x.size, ROW_THREADS),
        {"float* x": x, "const float* rows": rows, "const int* chunk": chunk},
        "last_row<P0>(x, rows, chunk)",
        _grid(x.size, 1),
    )


def norm_rows(norm: Norm, out: Buffer, x: Buffer, rows: int | Buffer) -> Launch:
    """Return the norm of `rows` rows, or of the chunk's: out in halves (rows, cols)."""
    cols, (count, most, more) = norm.weight.size, count_of(rows)
    return launch_of_rows(
        "norm_rope.cu",
        f"norm_rows_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"u16* out": out, "const float* x": x, "const float* norm": norm.weight, **more},
        f"norm_rows<P0>(out, x, norm, {norm.eps!r}f, {count})",
        (most, 1),
    )


def add_norm(norm: Norm, x: Buffer, y: Buffer, factor: float, rows: int | Buffer) -> Launch:
    """Return x += factor * norm(y), for `rows` rows or as many as the chunk has."""
    cols, (count, most, more) = norm.weight.size, count_of(rows)
    return launch_of_rows(
        "norm_rope.cu",
        f"add_norm_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"float* x": x, "const float* y": y, "const float* norm": norm.weight, **more},
        f"add_norm<P0>(x, y, norm, {norm.eps!r}f, {factor!r}f, {count})",
        (most, 1),
    )


def add_merged_norms(
    norms: Sequence[Norm], x: Buffer, values: tuple[Buffer, Buffer], rows: int | Buffer
) -> Launch:
    """Return x += norms[2](norms[0](values[0]) + norms[1](values[1])), of rows as in `add_norm`."""
    cols, (count, most, more) = norms[2].weight.size, count_of(rows)
    given = {"float* x": x}
    given |= {f"const float* in{i}": value for i, value in enumerate(values)}
    given |= {f"const float* norm{i}": norm.weight for i, norm in enumerate(norms)}
    merged = "Merged{x, {in0, in1}, {norm0, norm1, norm2}}"
    return launch_of_rows(
        "norm_rope.cu",
        f"merge_{cols}",
        RowConstants(cols, ROW_THREADS),
        given | more,
        f"merge<P0>({merged}, {norms[2].eps!r}f, {count})",
        (most, 1),
    )


@dataclass(frozen=True)
class GateConstants(Constants):
    """P of gate(), gate_rows() and activate()."""

    cols: int
    threads: int
    activation: str


def gate(out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer) -> Launch:
    """Return out = gate(inp), floats or halves as `out` is, of `rows` rows or of the chunk's."""
    count, most, more = count_of(rows)
    halves = out.dtype == dtypes.uint16
    return launch_of_rows(
        "gate.cu",
        f"gate_{cols}",
        GateConstants(cols, ROW_THREADS, activation),
        {**_out(out), "const float* in": inp, **more},
        f"gate_rows<P0>(out, in, {count})" if halves else "gate<P0>(out, in)",
        _grid(cols, most),
    )


def activate(out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer) -> Launch:
    """Return out = the activation of each element, floats or halves as `out` is, of rows.

    Halves are times HIDDEN_SCALE, as those of `gate` are.
    """
    count, most, more = count_of(rows)
    return launch_of_rows(
        "gate.cu",
        f"activate_{activation.lower()}_{cols}",
        GateConstants(cols, ROW_THREADS, activation),
        {**_out(out), "const float* in": inp, **more},
        f"activate<P0>(out, in, {count})",
        _grid(cols, most),
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
    cols, (count, most, more) = shape[0], count_of(shape[1])
    return launch_of_rows(
        "gate.cu",
        f"activate_by_{activation.lower()}_{cols}",
        ByConstants(cols, ROW_THREADS, activation, by[1]),
        {**_out(out), "const float* in": inp, "const float* by": by[0], **more},
        f"activate_by<P0>(out, in, by, {count})",
        _grid(cols, most),
    )


def to_halves(out: Buffer, inp: Buffer, cols: int, rows: int | Buffer) -> Launch:
    """Return out = inp in halves, times HIDDEN_SCALE, of rows."""
    count, most, more = count_of(rows)
    return launch_of_rows(
        "gate.cu",
        f"halve_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"u16* out": out, "const float* in": inp, **more},
        f"halve<P0>(out, in, {count})",
        _grid(cols, most),
    )


def scale(x: Buffer, by: Buffer, rows: int | Buffer) -> Launch:
    """Return x *= the number in `by`."""
    count, most, more = count_of(rows)
    cols = x.size // most
    return launch_of_rows(
        "gate.cu",
        f"scale_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"float* x": x, "const float* by": by, **more},
        f"scale<P0>(x, by, {count})",
        _grid(cols, most),
    )


def add_gated(x: Buffer, y: Buffer, by: Buffer, factor: float, rows: int | Buffer) -> Launch:
    """Return x += factor * sigmoid(by) * y, with one element of `by` for each row."""
    count, most, more = count_of(rows)
    cols = x.size // most
    return launch_of_rows(
        "gate.cu",
        f"add_gated_{cols}",
        RowConstants(cols, ROW_THREADS),
        {"float* x": x, "const float* y": y, "const float* by": by, **more},
        f"add_gated<P0>(x, y, by, {factor!r}f, {count})",
        _grid(cols, most),
    )
