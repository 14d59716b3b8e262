"""An encoder of pictures as a list of operations, which cpu/encoder.py and gpu/encoder.py compute.

They are those of a layer (layer.py) where these fit: Linear with biases, Norm (RMS), Gate, Add. A
value is (rows, width); X begins as the patches of a tile, with their positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orinllm.network.layer import Add, Gate, Linear, Norm, X


@dataclass(frozen=True)
class LayerNorm:
    """out = a value less its mean, over its deviation, times a vector, plus another."""

    out: str
    of: str
    weight: str


@dataclass(frozen=True)
class Gelu:
    """out = gelu of a value, in the tanh form; `quick`: x * sigmoid(1.702 x); `exact`: by erf."""

    out: str
    of: str
    quick: bool = False
    exact: bool = False


@dataclass(frozen=True)
class AttendAll:
    """out = attention of every row to every row; `of` has queries, keys, values side by side.

    windowed: to those of its window alone (AnySize.window).
    """

    out: str
    of: str
    heads: int
    windowed: bool = False


@dataclass(frozen=True)
class Pool:
    """out = the mean of every `side` x `side` neighbours of a square of rows."""

    out: str
    of: str
    side: int


@dataclass(frozen=True)
class Shuffle:
    """out = every `side` x `side` neighbours of a square of rows as one row, line by line."""

    out: str
    of: str
    side: int


@dataclass(frozen=True)
class Join:
    """out = every `rows` rows one after the other as one row."""

    out: str
    of: str
    rows: int


@dataclass(frozen=True)
class Beside:
    """out = several values side by side."""

    out: str
    of: tuple[str, ...]


Operation = (
    LayerNorm | Norm | Linear | Gelu | Gate | AttendAll | Pool | Shuffle | Join | Beside | Add
)


@dataclass(frozen=True)
class AnySize:
    """Pictures of any size, in whole blocks of `merge` x `merge` patches.

    Their patches come block by block, and line by line in a block. A pair of a head's dimensions
    turns by a patch's row, or by its column, times base^(-4 i / head). window: patches of a side of
    a window; 0: there are none. learned: side of the square of v.position_embd, between whose rows
    a patch's is interpolated; 0: there is none.
    """

    merge: int
    window: int = 0
    learned: int = 0
    base: float = 10000.0


@dataclass(frozen=True)
class Encoder:
    """The making of rows of a tile.

    size, patch: pixels of a side. mean, std: of each channel, from 0 to 1. positions: rows of
    v.position_embd by patch. across: matrices that the file has as (in_features, out_features).
    free: pictures are of any size; `size` and `positions` say nothing then.
    """

    size: int
    patch: int
    width: int
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    positions: tuple[int, ...]
    operations: tuple[Operation, ...]
    result: str
    out_width: int
    across: frozenset[str] = field(default_factory=frozenset)
    free: AnySize | None = None

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.size // self.patch

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return next(self.width // op.heads for op in self.operations if isinstance(op, AttendAll))


@dataclass(frozen=True)
class Projector:
    """A file of llama.cpp's `--mmproj`: what its pictures become.

    way, sizes: how a picture is prepared (prepare.py). n_rows: of a tile; 0: as many as it has
    blocks (AnySize). marker: what chat templates write for a picture; text: what stands for one of
    a grid then, in which each `slot` is followed by the rows of the next tile, or stands for them
    where it is not `kept`. bare: what stands for one in a template that knows no pictures, if that
    is more. whole: the rows of a tile see each other, not only those before.
    """

    kind: str
    encoder: Encoder
    way: str
    sizes: Mapping[str, int]
    n_rows: int
    marker: str
    slot: str
    kept: bool
    text: Callable[[tuple[int, int]], str]
    bare: str | None = None
    whole: bool = False

    def blocks(self, height: int, width: int) -> tuple[int, int] | None:
        """Return rows and columns of blocks of a tile of pixels; None: tiles have one size."""
        free = self.encoder.free
        if free is None:
            return None
        side = self.encoder.patch * free.merge
        return height // side, width // side

    def most_rows(self, context: int) -> int:
        """Return the rows of the largest tile that a context has room for."""
        free = self.encoder.free
        if free is None:
            return self.n_rows
        return max(1, min(self.sizes["most"] // (self.encoder.patch * free.merge) ** 2, context))

    def rows_of(self, height: int, width: int) -> int:
        """Return the rows of a tile of pixels."""
        blocks = self.blocks(height, width)
        return self.n_rows if blocks is None else blocks[0] * blocks[1]


@dataclass(frozen=True)
class Shape:
    """A plain vision transformer; sizes in pixels, heads and layers are numbers.

    quick: its activation is x * sigmoid(1.702 x). up, down: names of a layer's two matrices.
    """

    size: int
    patch: int
    width: int
    hidden: int
    heads: int
    n_layers: int
    quick: bool
    up: str = "ffn_up"
    down: str = "ffn_down"

    @property
    def side(self) -> int:
        """Patches of a side."""
        return self.size // self.patch


def vit_layers(shape: Shape) -> list[Operation]:
    """Return the operations of a plain vision transformer, up to its last norm."""
    found: list[Operation] = []
    width = shape.width
    for index in range(shape.n_layers):
        at = f"v.blk.{index}."
        qkv = tuple((f"{at}attn_{name}", width) for name in "qkv")
        found += [
            LayerNorm("normed", X, f"{at}ln1"),
            Linear("qkv", "normed", qkv, biased=True),
            AttendAll("attended", "qkv", shape.heads),
            Linear("out", "attended", ((f"{at}attn_out", width),), biased=True),
            Add("out"),
            LayerNorm("normed", X, f"{at}ln2"),
            Linear("up", "normed", ((f"{at}{shape.up}", shape.hidden),), biased=True),
            Gelu("hidden", "up", shape.quick),
            Linear("out", "hidden", ((f"{at}{shape.down}", width),), biased=True),
            Add("out"),
        ]
    return [*found, LayerNorm("seen", X, "v.post_ln")]
