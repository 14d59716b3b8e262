"""Rows of an encoder of pictures between its products: cuda/encoder.cu, attention_all.cu."""

from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, round_up
from orinllm.gpu.kernels.rows import element_grid, row_constants
from orinllm.gpu.launch import ROW_THREADS, Constants, Given, Launch, make_launch, make_rows_launch

# Elements of a tensor core's operand, of which a head is whole ones.
_STEP = 16
#: Rows of a block of attention_all().
BLOCK_ROWS = 64


@dataclass(frozen=True)
class PaddedColumns:
    """Columns of rows: groups of `group`, of which the first `of` are there, the others zero."""

    of: int
    group: int
    groups: int = 1

    @property
    def total_columns(self) -> int:
        """Columns of a row."""
        return self.group * self.groups


@dataclass(frozen=True)
class PaddedHeads:
    """An encoder's heads: each of `head` elements; `part`: from queries to keys, and to values.

    stride: of a row of them all, and of a row of what attention makes.
    """

    heads: int
    head: int
    part: int
    stride: int
    out_stride: int

    @property
    def padded_head_dim(self) -> int:
        """Elements of a head that is filled up."""
        return round_up(self.head, _STEP)


def interpolate_rows_launch(
    x: Buffer, table: Buffer, taps: tuple[Buffer, Buffer], shape: tuple[int, int]
) -> Launch:
    """Return x (rows, columns) = four rows of a table, each times a weight."""
    rows, cols = shape
    given: Given = {"float* x": x, "const float* table": table}
    given |= {"const int* of": taps[0], "const float* by": taps[1]}
    constants, grid = row_constants(cols), element_grid(cols, rows)
    return make_rows_launch("encoder.cu place_rows", cols, constants, given, (), grid)


def encoder_norm_launch(
    out: Buffer,
    x: Buffer,
    weights: tuple[Buffer, Buffer | None],
    eps: float,
    shape: tuple[int, PaddedColumns],
) -> Launch:
    """Return out = the norm of rows in halves: a LayerNorm where there are biases, else RMS."""
    (weight, bias), (rows, columns), cols = weights, shape, shape[1].total_columns
    given: Given = {"u16* out": out, "const float* x": x, "const float* weight": weight}
    given |= {"const float* bias": bias}
    centered = bias is not None
    constants = row_constants(cols, group=columns.group, of=columns.of, centered=centered)
    launch = make_rows_launch("encoder.cu norm_biased", cols, constants, given, (eps,), (rows, 1))
    return replace(launch, name=f"{'layer' if centered else 'rms'}_norm_{cols}")


def split_heads_launch(
    halves: tuple[Buffer, Buffer, Buffer],
    qkv: Buffer,
    turns: Buffer | None,
    heads: PaddedHeads,
    rows: int,
) -> Launch:
    """Return queries (scaled), keys and values in halves; turned where `turns` says by what."""
    given: Given = dict(zip(("u16* q", "u16* k", "u16* v"), halves, strict=True))
    launch = make_rows_launch(
        "encoder.cu split_heads",
        f"{heads.heads}x{heads.head}",
        Constants(
            heads=heads.heads,
            head=heads.head,
            head_dim=heads.padded_head_dim,
            part=heads.part,
            stride=heads.stride,
            turned=turns is not None,
            threads=ROW_THREADS,
        ),
        given | {"const float* qkv": qkv, "const float* turns": turns},
        (heads.head**-0.5,),
        (rows, 3),
    )
    return replace(launch, writes=("q", "k", "v"))


def range_attention_launch(
    out: Buffer,
    halves: tuple[Buffer, Buffer, Buffer],
    ranges: Buffer,
    heads: PaddedHeads,
    blocks: int,
) -> Launch:
    """Return attention of each row to all of its range: out in halves."""
    names = ("const u16* q", "const u16* k", "const u16* v")
    given: Given = {"u16* out": out} | dict(zip(names, halves, strict=True))
    launch = make_launch(
        "attention_all.cu attention_all",
        f"{heads.heads}x{heads.head}",
        Constants(
            head=heads.head,
            head_dim=heads.padded_head_dim,
            kv_heads=heads.heads,
            stride=heads.out_stride,
            group=1,
            heads_per_block=1,
            page=PAGE,
            window=0,
            softcap=0.0,
            ahead=False,
        ),
        given | {"const int* ranges": ranges},
        "Encoded<P0>{out, q, k, v, ranges}",
        (blocks, heads.heads),
    )
    return replace(launch, block=128, per_sm=3 if heads.padded_head_dim <= 128 else 2)


def pool_rows_launch(out: Buffer, inp: Buffer, shape: tuple[int, int], each: int) -> Launch:
    """Return out (rows, columns) = the mean of every `each` rows of halves."""
    rows, cols = shape
    constants, grid = row_constants(cols, rows=each), element_grid(cols, rows)
    given: Given = {"float* out": out, "const u16* in": inp}
    return make_rows_launch("encoder.cu pool_rows", cols, constants, given, (), grid)
