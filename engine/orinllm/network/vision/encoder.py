"""An encoder of pictures as a list of operations, which cpu/ and gpu/picture_encoder.py compute.

A value is (rows, width); X begins as the patches of a tile, with their positions. Norm is the RMS
norm of a language model's layer (layer.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from orinllm.network.layer import Norm, X


@dataclass(frozen=True)
class LayerNorm:
    """out = a value less its mean, over its deviation, times a vector, plus another."""

    out: str
    of: str
    weight: str


class ProductActivation(Enum):
    """The end of a product: its values bent, or the first half's SiLU times the second."""

    GELU = "GELU"  # in the tanh form
    QUICK_GELU = "QUICK_GELU"  # x * sigmoid(1.702 x)
    EXACT_GELU = "EXACT_GELU"  # by erf
    GATED = "SILU"


@dataclass(frozen=True)
class MatrixProduct:
    """out = W of, with the rows of matrices one after the other, plus biases that the file has.

    Then `bend`; what is X is added to it.
    """

    out: str
    of: str
    matrices: tuple[tuple[str, int], ...]
    bend: ProductActivation | None = None

    @property
    def output_width(self) -> int:
        """Elements of a row of `out`."""
        return sum(n for _, n in self.matrices) // (
            2 if self.bend is ProductActivation.GATED else 1
        )


@dataclass(frozen=True)
class AttendAll:
    """out = attention of every row to every row; `of` has queries, keys, values side by side.

    windowed: to those of its window alone (AnyPictureSize.window).
    """

    out: str
    of: str
    heads: int
    windowed: bool = False


@dataclass(frozen=True)
class JoinRows:
    """out = every `rows` rows one after the other as one row; `mean`: their mean.

    Neighbours of a square of patches are such rows (patches.py: PatchArrangement).
    """

    out: str
    of: str
    rows: int
    mean: bool = False


Operation = LayerNorm | Norm | MatrixProduct | AttendAll | JoinRows


@dataclass(frozen=True)
class EncoderShape:
    """A vision transformer; sizes in pixels, heads and layers are numbers.

    fused: queries, keys and values are of one matrix. quick: its activation is x * sigmoid(1.702
    x). up, down: names of a layer's two matrices.
    """

    size: int
    patch: int
    width: int
    hidden: int
    heads: int
    n_layers: int
    fused: bool
    quick: bool
    up: str = "ffn_up"
    down: str = "ffn_down"

    @property
    def patches_per_side(self) -> int:
        """Patches of a side."""
        return self.size // self.patch

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class AnyPictureSize:
    """Pictures of any size, in whole blocks of patches, which come line by line in a block.

    A pair of a head's dimensions turns by a patch's row, or by its column, times base^(-4 i /
    head). window: patches of a side of a window; 0: there are none. learned: side of the square of
    v.position_embd, between whose rows a patch's is interpolated; 0: there is none.
    """

    window: int = 0
    learned: int = 0
    base: float = 10000.0


@dataclass(frozen=True)
class Encoder:
    """The making of rows of a tile.

    merge: patches of a side of a block, which becomes a row. mean, std: of each channel, from 0 to
    1. positions: rows of v.position_embd by patch. rows: the values that are its rows, side by side
    (`out_width`). across: matrices that the file has as (in_features, out_features). free: pictures
    are of any size; `shape.size` and `positions` say nothing then.
    """

    shape: EncoderShape
    merge: int
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    positions: tuple[int, ...]
    operations: tuple[Operation, ...]
    rows: tuple[str, ...]
    across: frozenset[str] = frozenset()
    free: AnyPictureSize | None = None
    out_width: int = 0

    @property
    def block_side_pixels(self) -> int:
        """Pixels of a side of a block."""
        return self.shape.patch * self.merge


@dataclass(frozen=True)
class MmprojConfig:
    """A file of llama.cpp's `--mmproj`: what its pictures become.

    way, sizes: how a picture is prepared (prepare.py). n_rows: of a tile; 0: as many as it has
    blocks (AnyPictureSize). slot: what chat templates write for a picture; text: what
    stands for one of a grid then, in which each `slot` is followed by the rows of the next tile, or
    stands for them where it is not `kept`. bare: what stands for one in a template that knows no
    pictures, if that is more. whole: the rows of a tile see each other, not only those before.
    """

    kind: str
    encoder: Encoder
    way: str
    sizes: Mapping[str, int]
    n_rows: int
    slot: str
    kept: bool
    text: Callable[[tuple[int, int]], str]
    bare: str | None = None
    whole: bool = False

    def block_grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return rows and columns of blocks of a tile of pixels; None: tiles have one size."""
        if self.encoder.free is None:
            return None
        return height // self.encoder.block_side_pixels, width // self.encoder.block_side_pixels

    def most_embeddings_of_tile(self, context: int) -> int:
        """Return the rows of the largest tile that a context has room for."""
        if self.encoder.free is None:
            return self.n_rows
        return max(1, min(self.sizes["most"] // self.encoder.block_side_pixels**2, context))

    def tile_row_count(self, height: int, width: int) -> int:
        """Return the rows of a tile of pixels."""
        blocks = self.block_grid(height, width)
        return self.n_rows if blocks is None else blocks[0] * blocks[1]


def layers_operations(
    shape: EncoderShape,
    every: int = 0,
    behind: Callable[[int], Iterable[Operation]] = lambda at: (),
) -> list[Operation]:
    """Return the operations of all layers, up to the last norm.

    every: each of so many layers has no windows, and all have RMS norms and SwiGLU; 0: none has.
    behind: what comes behind a layer.
    """
    found: list[Operation] = []
    width, norm = shape.width, Norm if every else LayerNorm
    for index in range(shape.n_layers):
        at = f"v.blk.{index}."
        qkv = [("attn_qkv", 3 * width)] if shape.fused else [(f"attn_{n}", width) for n in "qkv"]
        up: tuple[tuple[str, int], ...] = ((f"{at}{shape.up}", shape.hidden),)
        bend = ProductActivation.QUICK_GELU if shape.quick else ProductActivation.GELU
        if every:
            up, bend = ((f"{at}ffn_gate", shape.hidden), *up), ProductActivation.GATED
        found += [
            norm("normed", X, f"{at}ln1"),
            MatrixProduct("qkv", "normed", tuple((f"{at}{n}", rows) for n, rows in qkv)),
            AttendAll("attended", "qkv", shape.heads, every > 0 and (index + 1) % every != 0),
            MatrixProduct(X, "attended", ((f"{at}attn_out", width),)),
            norm("normed", X, f"{at}ln2"),
            MatrixProduct("hidden", "normed", up, bend),
            MatrixProduct(X, "hidden", ((f"{at}{shape.down}", width),)),
            *behind(index),
        ]
    return [*found, norm("seen", X, "v.post_ln")]
