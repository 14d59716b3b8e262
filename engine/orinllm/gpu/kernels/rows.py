"""Embeddings, norms and gates: cuda/embed.cu, norm_rope.cu, gate.cu."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PackedMatrix, ceil_div, chunk_capacity
from orinllm.gpu.launch import (
    ROW_THREADS,
    Constants,
    Given,
    Launch,
    make_arguments,
    make_rows_launch,
    out_argument,
)

#: Rows of norms are whole vectors of four floats, and GEMV takes eight at once.
COLUMNS = 8


def count_most_and_arguments(rows: int | Buffer) -> tuple[str, int, Given]:
    """Return the expression, the most and the arguments of a number of rows, or of a chunk's."""
    if isinstance(rows, int):
        return str(rows), rows, {}
    return "chunk[1]", chunk_capacity(rows), {"const int* chunk": rows}


@dataclass(frozen=True)
class NormWeights:
    """An RMS norm: its weights (cols) and epsilon."""

    weight: Buffer
    eps: float


def row_constants(cols: int, **more: int | str) -> Constants:
    """Return P of kernels with a thread for each of a row's elements, or all threads for a row."""
    return Constants(cols=cols, threads=ROW_THREADS, **more)


def element_grid(cols: int, rows: int) -> tuple[int, int]:
    """Return the grid of a thread an element."""
    return ceil_div(cols, ROW_THREADS), rows


def embed_tokens_launch(
    table: PackedMatrix, x: Buffer, state: Buffer, sequences: int, scale: float
) -> Launch:
    """Return the embedding of a token of each sequence: x (sequences, cols)."""
    name, cols = table.type.name, table.cols
    given = {"float* x": x, "const u8* table": table.buffer, "const int* state": state}
    constants, label = row_constants(cols, type=name), f"{name.lower()}_{cols}"
    grid = element_grid(cols, sequences)
    launch = make_rows_launch("embed.cu embed", label, constants, given, (), grid)
    return replace(
        launch,
        body=f"  embed<P0>(x + blockIdx.y * {cols}, table, state + blockIdx.y, {scale!r}f);",
        operations=cols * sequences,
        n_bytes=table.n_bytes // table.rows * sequences,
    )


def embed_chunk_launch(table: PackedMatrix, x: Buffer, chunk: Buffer, scale: float) -> Launch:
    """Return the embedding of a chunk: x (tokens, cols)."""
    given = {"float* x": x, "const u8* table": table.buffer, "const int* chunk": chunk}
    label, grid = (
        f"{table.type.name.lower()}_{table.cols}",
        element_grid(table.cols, chunk_capacity(chunk)),
    )
    constants = row_constants(table.cols, type=table.type.name)
    return make_rows_launch("embed.cu embed_rows", label, constants, given, (scale,), grid)


def layer_embeddings_launch(
    table: PackedMatrix,
    x: Buffer,
    norm: NormWeights,
    tokens: Buffer,
    scale: float,
    rows: int | Buffer,
) -> Launch:
    """Return the embeddings of each layer, of what a matrix made: x (rows, layers, cols).

    tokens: the state (attention.cu), or a chunk.
    """
    cols, (count, most, more) = norm.weight.size, count_most_and_arguments(rows)
    layers, of = table.cols // cols, "chunk + 2" if more else "state"
    given = {"float* x": x, "const u8* table": table.buffer, "const float* norm": norm.weight}
    launch = make_rows_launch(
        "embed.cu embed_layers",
        f"{table.type.name.lower()}_{cols}",
        Constants(type=table.type.name, cols=cols, layers=layers),
        given,
        (of, norm.eps, scale, count),
        (layers, most),
    )
    arguments = (*launch.arguments, *make_arguments(more or {"const int* state": tokens}))
    return replace(launch, arguments=arguments, block=32)


def _chunk_rows_launch(kernel: str, x: Buffer, rows: Buffer, chunk: Buffer, n: int) -> Launch:
    cols = x.size // n
    given = {"float* x": x, "const float* rows": rows, "const int* chunk": chunk}
    return make_rows_launch(kernel, cols, row_constants(cols), given, (), element_grid(cols, n))


def add_deepstack_rows_launch(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return x += rows, both (tokens, cols), where a chunk's tokens are rows of pictures."""
    return _chunk_rows_launch("embed.cu add_pictures", x, rows, chunk, chunk_capacity(chunk))


def copy_last_row_launch(x: Buffer, rows: Buffer, chunk: Buffer) -> Launch:
    """Return the copy of a chunk's last row: x (cols)."""
    return _chunk_rows_launch("embed.cu last_row", x, rows, chunk, 1)


def norm_rows_launch(norm: NormWeights, out: Buffer, x: Buffer, rows: int | Buffer) -> Launch:
    """Return the norm of `rows` rows, or of the chunk's: out in halves (rows, cols)."""
    given = {"u16* out": out, "const float* x": x, "const float* norm": norm.weight}
    return _block_per_row_launch("norm_rows", norm, given, (norm.eps,), rows)


def add_normed_launch(
    norm: NormWeights, x: Buffer, y: Buffer, factor: float, rows: int | Buffer
) -> Launch:
    """Return x += factor * norm(y), for `rows` rows or as many as the chunk has."""
    given = {"float* x": x, "const float* y": y, "const float* norm": norm.weight}
    return _block_per_row_launch("add_norm", norm, given, (norm.eps, factor), rows)


def _block_per_row_launch(
    kernel: str, norm: NormWeights, given: Given, more: tuple[float, ...], rows: int | Buffer
) -> Launch:
    """Return a launch of a block a row."""
    cols, (count, most, chunk) = norm.weight.size, count_most_and_arguments(rows)
    constants, values = row_constants(cols), list[float | str]([*more, count])
    name = f"norm_rope.cu {kernel}"
    return make_rows_launch(name, cols, constants, given | chunk, values, (most, 1))


def add_merged_norms_launch(
    norms: Sequence[NormWeights], x: Buffer, values: tuple[Buffer, Buffer], rows: int | Buffer
) -> Launch:
    """Return x += norms[2](norms[0](values[0]) + norms[1](values[1]))."""
    given: Given = {"float* x": x}
    given |= {f"const float* in{i}": value for i, value in enumerate(values)}
    given |= {f"const float* norm{i}": norm.weight for i, norm in enumerate(norms)}
    merged = "Merged{x, {in0, in1}, {norm0, norm1, norm2}}"
    launch = _block_per_row_launch("merge", norms[2], given, (), rows)
    body = f"  merge<P0>({merged}, {norms[2].eps!r}f, {count_most_and_arguments(rows)[0]});"
    return replace(launch, body=body)


def gate_launch(out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer) -> Launch:
    """Return out = gate(inp), floats or halves as `out` is, of `rows` rows or of the chunk's."""
    constants = row_constants(cols, activation=activation)
    launch = _thread_per_element_launch(
        "gate_rows", cols, constants, {**out_argument(out), "const float* in": inp}, rows
    )
    halves = out.dtype == dtypes.uint16
    body = launch.body if halves else "  gate<P0>(out, in);"
    return replace(launch, name=f"gate_{cols}", body=body)


def activation_launch(
    out: Buffer, inp: Buffer, cols: int, activation: str, rows: int | Buffer
) -> Launch:
    """Return out = the activation of each element, floats or halves as `out` is, of rows.

    Halves are times HIDDEN_SCALE, as those of `gate_launch` are.
    """
    constants, label = row_constants(cols, activation=activation), f"{activation.lower()}_{cols}"
    given = {**out_argument(out), "const float* in": inp}
    return _thread_per_element_launch("activate", label, constants, given, rows)


def gated_activation_launch(
    out: Buffer,
    inp: Buffer,
    by: tuple[Buffer, int],
    shape: tuple[int, int | Buffer],
    activation: str,
) -> Launch:
    """Return out = activation(inp, by), floats or halves as `out` is, of (columns, rows).

    by: elements, those of a row so many behind those of the one before.
    """
    constants = row_constants(shape[0], activation=activation, stride=by[1])
    given = {**out_argument(out), "const float* in": inp, "const float* by": by[0]}
    label = f"{activation.lower()}_{shape[0]}"
    return _thread_per_element_launch("activate_by", label, constants, given, shape[1])


def _thread_per_element_launch(
    kernel: str,
    label: object,
    constants: Constants,
    given: Given,
    rows: int | Buffer,
    values: tuple[float, ...] = (),
) -> Launch:
    """Return a launch of a thread an element."""
    count, most, more = count_most_and_arguments(rows)
    grid = element_grid(int(constants["cols"]), most)
    return make_rows_launch(
        f"gate.cu {kernel}", label, constants, {**given, **more}, (*values, count), grid
    )


def to_float16_launch(out: Buffer, inp: Buffer, cols: int, rows: int | Buffer) -> Launch:
    """Return out = inp in halves, times HIDDEN_SCALE, of rows."""
    given = {"u16* out": out, "const float* in": inp}
    return _thread_per_element_launch("halve", cols, row_constants(cols), given, rows)


def scale_launch(x: Buffer, by: Buffer, rows: int | Buffer) -> Launch:
    """Return x *= the number in `by`."""
    cols = x.size // count_most_and_arguments(rows)[1]
    given = {"float* x": x, "const float* by": by}
    return _thread_per_element_launch("scale", cols, row_constants(cols), given, rows)


def add_gated_launch(x: Buffer, y: Buffer, by: Buffer, factor: float, rows: int | Buffer) -> Launch:
    """Return x += factor * sigmoid(by) * y, with one element of `by` for each row."""
    cols = x.size // count_most_and_arguments(rows)[1]
    given = {"float* x": x, "const float* y": y, "const float* by": by}
    return _thread_per_element_launch(
        "add_gated", cols, row_constants(cols), given, rows, (factor,)
    )
