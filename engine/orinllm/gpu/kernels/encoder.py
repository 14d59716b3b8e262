"""Rows of an encoder of pictures between its products: cuda/encoder.cu, attention_all.cu."""

from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, ceil_div, round_up
from orinllm.gpu.kernels.rows import RowConstants
from orinllm.gpu.launch import ROW_THREADS, Constants, Launch, launch_of_rows, name_of

# Elements of a tensor core's operand, of which a head is whole ones.
_STEP = 16
#: Rows of a block of attention_all(), and the ints that say which.
BLOCK_ROWS, RANGE = 64, 4


@dataclass(frozen=True)
class Columns:
    """Columns of rows: groups of `group`, of which the first `of` are there, the others zero."""

    of: int
    group: int
    groups: int = 1

    @property
    def all(self) -> int:
        """Columns of a row."""
        return self.group * self.groups


@dataclass(frozen=True)
class PoolConstants(RowConstants):
    """P of pool_rows()."""

    rows: int


@dataclass(frozen=True)
class NormConstants(RowConstants):
    """P of norm_biased()."""

    group: int
    of: int
    centered: bool


@dataclass(frozen=True)
class Heads:
    """An encoder's heads: each of `head` elements; `part`: from queries to keys, and to values.

    stride: of a row of them all, and of a row of what attention makes.
    """

    heads: int
    head: int
    part: int
    stride: int
    out_stride: int

    @property
    def head_dim(self) -> int:
        """Elements of a head that is filled up."""
        return round_up(self.head, _STEP)


@dataclass(frozen=True)
class SplitConstants(Constants):
    """P of split_heads()."""

    heads: int
    head: int
    head_dim: int
    part: int
    stride: int
    turned: bool
    threads: int


@dataclass(frozen=True)
class AllConstants(Constants):
    """P of attention_all()."""

    head: int
    head_dim: int
    kv_heads: int
    stride: int
    group: int = 1
    heads_per_block: int = 1
    page: int = PAGE
    window: int = 0
    softcap: float = 0.0
    ahead: bool = False


def place_rows(
    x: Buffer, table: Buffer, taps: tuple[Buffer, Buffer], shape: tuple[int, int]
) -> Launch:
    """Return x (rows, columns) = four rows of a table, each times a weight."""
    rows, cols = shape
    given = {"float* x": x, "const float* table": table}
    given |= {"const int* of": taps[0], "const float* by": taps[1]}
    constants, grid = RowConstants(cols, ROW_THREADS), (ceil_div(cols, ROW_THREADS), rows)
    call = "place_rows<P0>(x, table, of, by)"
    return launch_of_rows("encoder.cu", f"place_rows_{cols}", constants, given, call, grid)


def norm_biased(
    out: Buffer,
    x: Buffer,
    weights: tuple[Buffer, Buffer | None],
    eps: float,
    shape: tuple[int, Columns],
) -> Launch:
    """Return out = the norm of rows in halves: a LayerNorm where there are biases, else RMS."""
    (weight, bias), (rows, columns) = weights, shape
    kind = "rms" if bias is None else "layer"
    return launch_of_rows(
        "encoder.cu",
        f"{kind}_norm_{columns.all}",
        NormConstants(columns.all, ROW_THREADS, columns.group, columns.of, bias is not None),
        {"u16* out": out, "const float* x": x, "const float* weight": weight}
        | {"const float* bias": bias},
        f"norm_biased<P0>(out, x, weight, {name_of('bias', bias)}, {eps!r}f)",
        (rows, 1),
    )


def split_heads(
    halves: tuple[Buffer, Buffer, Buffer],
    qkv: Buffer,
    turns: Buffer | None,
    heads: Heads,
    rows: int,
) -> Launch:
    """Return queries (scaled), keys and values in halves; turned where `turns` says by what."""
    constants = SplitConstants(
        *(heads.heads, heads.head, heads.head_dim, heads.part, heads.stride),
        *(turns is not None, ROW_THREADS),
    )
    given = dict(zip(("u16* q", "u16* k", "u16* v"), halves, strict=True))
    launch = launch_of_rows(
        "encoder.cu",
        f"split_heads_{heads.heads}x{heads.head}",
        constants,
        {**given, "const float* qkv": qkv, "const float* turns": turns},
        f"split_heads<P0>(q, k, v, qkv, {name_of('turns', turns)}, {heads.head**-0.5!r}f)",
        (rows, 3),
    )
    return replace(launch, writes=("q", "k", "v"))


def attend_all(
    out: Buffer, halves: tuple[Buffer, Buffer, Buffer], ranges: Buffer, heads: Heads, blocks: int
) -> Launch:
    """Return attention of each row to all of its range: out in halves."""
    given = zip(("const u16* q", "const u16* k", "const u16* v"), halves, strict=True)
    launch = launch_of_rows(
        "attention_all.cu",
        f"attention_all_{heads.heads}x{heads.head}",
        AllConstants(heads.head, heads.head_dim, heads.heads, heads.out_stride),
        {"u16* out": out, **dict(given), "const int* ranges": ranges},
        "attention_all<P0>(Encoded<P0>{out, q, k, v, ranges})",
        (blocks, heads.heads),
    )
    per_sm = 3 if heads.head_dim <= 128 else 2
    return replace(launch, block=128, per_sm=per_sm)


def pool_rows(out: Buffer, inp: Buffer, shape: tuple[int, int], each: int) -> Launch:
    """Return out (rows, columns) = the mean of every `each` rows of halves."""
    rows, cols = shape
    constants, grid = PoolConstants(cols, ROW_THREADS, each), (ceil_div(cols, ROW_THREADS), rows)
    given = {"float* out": out, "const u16* in": inp}
    call = "pool_rows<P0>(out, in)"
    return launch_of_rows("encoder.cu", f"pool_rows_{cols}", constants, given, call, grid)
