"""A model's shape as the executors need it: what each layer computes, free of file formats.

An architecture (`arch/`) makes one from a file's metadata. Every scaling of rotary positions ends
as plain frequencies and one magnitude, so that executors know nothing of YaRN or its peers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from orinllm.errors import BadInput


class Activation(Enum):
    """The function between a feed-forward layer's matrices: g is gate's output, u is up's."""

    SILU = "silu"  # g * sigmoid(g) * u
    GELU = "gelu"  # gelu(g) * u, in the tanh form with 0.044715
    GPT_OSS = "gpt_oss"  # g' = min(g, 7), u' = clamp(u, -7, 7): g' * sigmoid(1.702 g') * (u' + 1)


class Gating(Enum):
    """Weights of the chosen experts, from the router's logits."""

    SOFTMAX = "softmax"  # over all experts; the largest are chosen
    SIGMOID = "sigmoid"  # of each expert; the largest, after an optional bias, are chosen
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"  # the largest logits are chosen, softmax over these


@dataclass(frozen=True)
class Rope:
    """Rotary positions. Dimension pair i of a head turns by position * frequencies[i] radians.

    Dimensions from 2 * len(frequencies) on are not turned. cos and sin are times `magnitude`.
    `interleaved`: pair i is (2i, 2i + 1); else (i, i + len(frequencies)).
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Attention of one layer. Query head h reads key-value head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores, before softmax
    rope: Rope | None  # None: no positions in this layer
    window: int = 0  # a query sees the keys less than `window` before it; 0: all before it
    qk_norm: bool = False  # RMS norm of each q and k head before the rotation
    sinks: bool = False  # exp(sink of the head) is added to softmax's denominator


@dataclass(frozen=True)
class Experts:
    """A mixture: `used` of `count` experts for each token, each `hidden` wide."""

    count: int
    used: int
    hidden: int
    gating: Gating
    normalized: bool  # the chosen weights are divided by their sum
    scale: float = 1.0  # and times this
    biased: bool = False  # the router and all matrices of the experts have biases


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward part of one layer: dense with `hidden`, or `experts`."""

    activation: Activation
    hidden: int = 0
    experts: Experts | None = None


@dataclass(frozen=True)
class Layer:
    """One layer: norm, attention, add, norm, feed-forward, add."""

    attention: Attention
    feed_forward: FeedForward
    post_norms: bool = False  # RMS norms of both parts' outputs before they are added (gemma3)


@dataclass(frozen=True)
class Matrix:
    """Rows of one tensor of the file: `rows` rows from `first_row`, None for all of them.

    Of stacked experts (3-D tensors) rows are those of each expert.
    """

    tensor: str
    first_row: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer."""

    architecture: str  # general.architecture of the file
    dim: int
    vocab_size: int  # rows of the head; the tokenizer may know fewer
    trained_context: int  # tokens
    norm_eps: float
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0  # times the token's embedding
    residual_scale: float = 1.0  # times each part's output before it is added
    logit_scale: float = 1.0  # times the logits
    logit_softcap: float = 0.0  # c: logits become c * tanh(logits / c); 0: they stay
    # Fused tensors of the file by logical name, such as blk.0.attn_q:
    # Matrix("blk.0.attn_qkv.weight", 0, 3072). A logical name without an entry is the tensor
    # NAME.weight itself.
    matrices: dict[str, Matrix] = field(default_factory=dict)
    # The norm before the feed-forward part, where a file calls it other than ffn_norm.
    ffn_norm: str = "ffn_norm"
    # Why the fused kernels cannot run it, or None; the general path may.
    general_only: str | None = None

    def matrix(self, name: str) -> Matrix:
        """Return where the matrix of a logical name, such as blk.0.attn_q, is in the file."""
        return self.matrices.get(name, Matrix(f"{name}.weight"))


def check_room(tokens: Sequence[int], start: int, context: int) -> None:
    """Raise BadInput where tokens from position `start` on do not fit a context."""
    if not tokens or start + len(tokens) > context:
        raise BadInput(
            f"{len(tokens)} tokens from position {start} on do not fit a context of "
            f"{context} tokens"
        )
