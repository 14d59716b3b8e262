"""Rows of an encoder of pictures between its products: cuda/encoder.cu, attention_all.cu."""

from dataclasses import dataclass

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, ceil_div, round_up
from orinllm.gpu.kernels.rows import RowConstants
from orinllm.gpu.launch import Argument, Constants, Launch

_THREADS = 256
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
    return Launch(
        name=f"place_rows_{cols}",
        file="encoder.cu",
        constants=(RowConstants(cols, _THREADS),),
        arguments=(
            Argument("float* x", x),
            Argument("const float* table", table),
            Argument("const int* of", taps[0]),
            Argument("const float* by", taps[1]),
        ),
        body="  place_rows<P0>(x, table, of, by);",
        grid=(ceil_div(cols, _THREADS), rows, 1),
        block=_THREADS,
        writes=("x",),
    )


def norm_biased(
    out: Buffer,
    x: Buffer,
    weights: tuple[Buffer, Buffer | None],
    eps: float,
    shape: tuple[int, Columns],
) -> Launch:
    """Return out = the norm of rows in halves: a LayerNorm where there are biases, else RMS."""
    (weight, bias), (rows, columns) = weights, shape
    more = () if bias is None else (Argument("const float* bias", bias),)
    kind = "rms" if bias is None else "layer"
    return Launch(
        name=f"{kind}_norm_{columns.all}",
        file="encoder.cu",
        constants=(
            NormConstants(columns.all, _THREADS, columns.group, columns.of, bias is not None),
        ),
        arguments=(
            Argument("u16* out", out),
            Argument("const float* x", x),
            Argument("const float* weight", weight),
            *more,
        ),
        body=f"  norm_biased<P0>(out, x, weight, {'bias' if more else '0'}, {eps!r}f);",
        grid=(rows, 1, 1),
        block=_THREADS,
        writes=("out",),
    )


def split_heads(
    halves: tuple[Buffer, Buffer, Buffer],
    qkv: Buffer,
    turns: Buffer | None,
    heads: Heads,
    rows: int,
) -> Launch:
    """Return queries (scaled), keys and values in halves; turned where `turns` says by what."""
    more = () if turns is None else (Argument("const float* turns", turns),)
    constants = SplitConstants(
        *(heads.heads, heads.head, heads.head_dim, heads.part, heads.stride),
        *(turns is not None, _THREADS),
    )
    names = ("q", "k", "v")
    return Launch(
        name=f"split_heads_{heads.heads}x{heads.head}",
        file="encoder.cu",
        constants=(constants,),
        arguments=(
            *(Argument(f"u16* {name}", buffer) for name, buffer in zip(names, halves, strict=True)),
            Argument("const float* qkv", qkv),
            *more,
        ),
        body=f"  split_heads<P0>(q, k, v, qkv, {'turns' if more else '0'}, {heads.head**-0.5!r}f);",
        grid=(rows, 3, 1),
        block=_THREADS,
        writes=names,
    )


def attend_all(
    out: Buffer, halves: tuple[Buffer, Buffer, Buffer], ranges: Buffer, heads: Heads, blocks: int
) -> Launch:
    """Return attention of each row to all of its range: out in halves."""
    names = ("q", "k", "v")
    return Launch(
        name=f"attention_all_{heads.heads}x{heads.head}",
        file="attention_all.cu",
        constants=(AllConstants(heads.head, heads.head_dim, heads.heads, heads.out_stride),),
        arguments=(
            Argument("u16* out", out),
            *(
                Argument(f"const u16* {name}", buffer)
                for name, buffer in zip(names, halves, strict=True)
            ),
            Argument("const int* ranges", ranges),
        ),
        body="  attention_all<P0>(Encoded<P0>{out, q, k, v, ranges});",
        grid=(blocks, heads.heads, 1),
        block=128,
        writes=("out",),
        per_sm=3 if heads.head_dim <= 128 else 2,
    )


def pool_rows(out: Buffer, inp: Buffer, shape: tuple[int, int], each: int) -> Launch:
    """Return out (rows, columns) = the mean of every `each` rows of halves."""
    rows, cols = shape
    return Launch(
        name=f"pool_rows_{cols}",
        file="encoder.cu",
        constants=(PoolConstants(cols, _THREADS, each),),
        arguments=(Argument("float* out", out), Argument("const u16* in", inp)),
        body="  pool_rows<P0>(out, in);",
        grid=(ceil_div(cols, _THREADS), rows, 1),
        block=_THREADS,
        writes=("out",),
    )
