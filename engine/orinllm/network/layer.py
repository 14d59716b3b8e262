"""A layer: a list of operations on named values, which gpu/steps and cpu lower to what they run.

Example, a llama's attention:

    Norm("normed", X, "attn_norm")
    Linear("qkv", "normed", (("attn_q", 256), ("attn_k", 128), ("attn_v", 128)))
    Attend("attended", "qkv", Attention(...))
    Linear("out", "attended", (("attn_output", 256),))
    AddToResidual("out")

Weights are named without their layer: attn_q is blk.0.attn_q.weight in the first one. The residual
stream, X, is there when a layer begins and when it ends.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar, TypeVar

#: The value that goes from layer to layer.
X = "x"


class Activation(Enum):
    """The function between a feed-forward layer's matrices: g is gate's output, u is up's."""

    SILU = "silu"  # g * sigmoid(g) * u
    GELU = "gelu"  # gelu(g) * u, in the tanh form with 0.044715
    GPT_OSS = "gpt_oss"  # g' = min(g, 7), u' = clamp(u, -7, 7): g' * sigmoid(1.702 g') * (u' + 1)
    RELU_SQUARED = "relu_squared"  # of u alone: max(u, 0)^2


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
    `axes`: positions have three parts, and pair i turns by part axes[i]; (): they have one.
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class QueryTemperature:
    """A factor of far queries: 1 + scale * ln(1 + position // length)."""

    scale: float
    length: int  # tokens


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
    softcap: float = 0.0  # c: scores become c * tanh(scores / c); 0: they stay
    temperature: QueryTemperature | None = None
    gated: bool = False  # a head's query is followed by a gate: what it attends times its sigmoid
    v_norm: bool = False  # RMS norm of each v head, without a weight
    reads: int | None = None  # the layer whose keys and values are read; None: it has its own

    @property
    def q_and_gate_width(self) -> int:
        """Elements of a token's queries, and of their gates."""
        return (1 + self.gated) * self.q_width

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that are kept of each token: its keys and values, if they are the layer's."""
        return 2 * self.kv_width if self.reads is None else 0

    @property
    def q_width(self) -> int:
        """Elements of what attention makes of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim


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
    choice_bias: bool = False  # exp_probs_b is added to what experts are chosen by
    gated: bool = True  # experts have a gate
    # The router reads X: its RMS norm times ffn_gate_inp.scale / sqrt(width).
    reads_x: bool = False
    scaled: bool = False  # the weight of each expert is times its own of ffn_down_exps.scale


@dataclass(frozen=True)
class Norm:
    """out = RMS norm of a value, times a vector."""

    out: str
    of: str
    weight: str


@dataclass(frozen=True)
class Linear:
    """out = W of, with the rows of one or more matrices one after the other.

    The file may have biases where it is `biased`.
    """

    out: str
    of: str
    matrices: tuple[tuple[str, int], ...]  # name and rows of each
    biased: bool = False


@dataclass(frozen=True)
class Attend:
    """out = attention of `of`, which has queries, keys and values one after the other.

    Keys and values are kept for later tokens. Vectors: attn_q_norm, attn_k_norm, attn_sinks.
    """

    out: str
    of: str
    attention: Attention


@dataclass(frozen=True)
class Gate:
    """out = the activation of the first half of a value times its second half."""

    out: str
    of: str
    activation: Activation


@dataclass(frozen=True)
class MixExperts:
    """out = a mixture of experts of a value.

    Matrices: the router ffn_gate_inp, and all experts' in ffn_{gate,up,down}_exps.
    """

    out: str
    of: str
    experts: Experts
    activation: Activation


@dataclass(frozen=True)
class AddToResidual:
    """X += scale times a value, and times the sigmoid of another one, `by`, of one element."""

    of: str
    scale: float = 1.0
    by: str | None = None


@dataclass(frozen=True)
class Activate:
    """out = an activation of each element of a value.

    by, first: the activation's u, which is elements of another value from `first` on; without it
    the value is u, and the activation takes no g.
    """

    out: str
    of: str
    activation: Activation
    by: str | None = None
    first: int = 0


@dataclass(frozen=True)
class ScaleResidual:
    """X *= a number of the file, weight.weight."""

    weight: str
    out: ClassVar[str] = X


@dataclass(frozen=True)
class AddMergedNorms:
    """X += RMS norm of the sum of two values' own RMS norms, each times a vector."""

    values: tuple[str, str]
    norms: tuple[str, str]  # of the values
    norm: str  # of their sum
    out: ClassVar[str] = X


@dataclass(frozen=True)
class AddDeepstackRows:
    """X += what rows of pictures have beside their embeddings, its part `part`; text has none."""

    part: int
    out: ClassVar[str] = X


@dataclass(frozen=True)
class Convolve:
    """out = a causal convolution of each channel: its last `taps` inputs times weight.weight.

    A plain one takes `channels` elements of a value from `first` on, may have a bias, and what it
    makes passes SiLU. A gated one takes a value that is [b | c | x]: inputs are b * x, and what it
    makes is times c. State: a channel's last `taps` - 1 inputs.
    """

    out: str
    of: str
    weight: str
    channels: int
    taps: int
    first: int = 0
    gated: bool = False


@dataclass(frozen=True)
class GatedDeltaNet:
    """out = a gated delta net of a value that is [q | k | v], by head.

    q and k are divided by their lengths. Value head h reads q and k of head h mod `key_heads`. Its
    state M, `size` x `size`, is M' = e^g M, then M = M' + k (b (v - M'^T k))^T; what it makes is
    M^T q / sqrt(size), normed by ssm_norm, times silu(z). g = ssm_a softplus(a + ssm_dt.bias) and
    b = sigmoid of its own. z is the value `beside` from `first` on; `gates` is [a | b].
    """

    out: str
    of: str
    beside: str
    first: int
    gates: str
    heads: int
    key_heads: int
    size: int

    @property
    def output_width(self) -> int:
        """Elements of what it makes of a token."""
        return self.heads * self.size


@dataclass(frozen=True)
class SelectiveScan:
    """out = a Mamba-2 of a value that is [x | B | C]: x by head, B and C by group of heads.

    A head's state H, `head_dim` x `state`, is H = e^(d ssm_a) H + (d x) B^T with
    d = softplus(dt + ssm_dt.bias); what it makes is (H C + ssm_d x) silu(z), and each group's is
    normed by its part of ssm_norm. `beside` has z from its beginning on, dt in its last elements.
    """

    out: str
    of: str
    beside: str
    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def output_width(self) -> int:
        """Elements of what it makes of a token."""
        return self.heads * self.head_dim

    @property
    def input_width(self) -> int:
        """Elements of x, B and C."""
        return self.output_width + 2 * self.groups * self.state


# What keeps a state of each sequence, which does not go back.
Recurrence = Convolve | GatedDeltaNet | SelectiveScan
# What a kernel is made for; the others are computed on its way in or out.
Root = (
    Linear
    | Attend
    | MixExperts
    | Activate
    | ScaleResidual
    | AddMergedNorms
    | AddDeepstackRows
    | Recurrence
)
Operation = Root | Norm | Gate | AddToResidual


def state_inputs(operation: Recurrence) -> tuple[str, ...]:
    """Return the values of which an operation makes states, and what it makes of these."""
    match operation:
        case Convolve():
            return (operation.of,)
        case GatedDeltaNet():
            return operation.of, operation.beside, operation.gates
    return operation.of, operation.beside


def n_state_floats(operation: Operation) -> int:
    """Return the floats that an operation keeps of a sequence."""
    match operation:
        case Convolve():
            return operation.channels * (operation.taps - 1)
        case GatedDeltaNet():
            return operation.output_width * operation.size
        case SelectiveScan():
            return operation.output_width * operation.state
    return 0


Reader = TypeVar("Reader", Norm, Gate, AddToResidual)


@dataclass(frozen=True)
class Step:
    """An operation with what is computed on its way in and out.

    The result is: that of `operation` of `source`, after `norm` if there is one; gated if there is
    `gate`; added to X if there is `add`, through the norm `post` if there is one.
    """

    operation: Root
    source: str
    norm: Norm | None = None
    gate: Gate | None = None
    post: Norm | None = None
    add: AddToResidual | None = None

    @property
    def out_name(self) -> str:
        """The value that it makes."""
        return X if self.add else self.gate.out if self.gate else self.operation.out


@dataclass(frozen=True)
class Layer:
    """One layer."""

    operations: tuple[Operation, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The layer as what a kernel each can compute."""
        return tuple(_group_into_steps(self.operations))

    @property
    def attention(self) -> Attention | None:
        """The layer's attention, if it has one."""
        return next((op.attention for op in self.operations if isinstance(op, Attend)), None)

    @property
    def n_state_floats(self) -> int:
        """The floats that the layer keeps of a sequence, beside keys and values."""
        return sum(map(n_state_floats, self.operations))

    @property
    def experts_operation(self) -> MixExperts | None:
        """The layer's mixture of experts, if it has one."""
        return next((op for op in self.operations if isinstance(op, MixExperts)), None)

    def value_widths(self, dim: int) -> dict[str, int]:
        """Return the elements of each value of a token; X has `dim` of them."""
        found = {X: dim}
        for operation in self.operations:
            match operation:
                case Norm():
                    found[operation.out] = found[operation.of]
                case Linear():
                    found[operation.out] = sum(rows for _, rows in operation.matrices)
                case Attend():
                    found[operation.out] = operation.attention.q_width
                case Gate():
                    found[operation.out] = found[operation.of] // 2
                case MixExperts():
                    found[operation.out] = dim
                case Activate():
                    found[operation.out] = found[operation.of]
                case Convolve():
                    found[operation.out] = operation.channels
                case GatedDeltaNet() | SelectiveScan():
                    found[operation.out] = operation.output_width
        return found


def _group_into_steps(operations: Sequence[Operation]) -> Iterator[Step]:
    """Yield steps in order: norms wait for their readers, gates and sums go with their writers.

    Raises ValueError for a list that no lowering could compute so.
    """
    norms: dict[str, Norm] = {}
    rest = deque(operations)
    while rest:
        operation = rest.popleft()
        if isinstance(operation, Norm):
            norms[operation.out] = operation
            continue
        if isinstance(operation, Gate | AddToResidual):
            raise ValueError(f"{operation} does not follow what it reads")
        if isinstance(operation, ScaleResidual | AddMergedNorms | AddDeepstackRows):
            yield Step(operation, X)
            norms = {name: norm for name, norm in norms.items() if norm.of != X}
            continue
        norm, post, add = norms.get(operation.of), None, None
        gate = _take_next_if_reading(rest, Gate, operation.out)
        if gate is None:
            post = _take_next_if_reading(rest, Norm, operation.out)
            add = _take_next_if_reading(rest, AddToResidual, post.out if post else operation.out)
        if post is not None and add is None:
            raise ValueError(f"{post} is followed by no sum")
        yield Step(operation, norm.of if norm else operation.of, norm, gate, post, add)
        if add is not None:  # X is another one from here on
            norms = {name: norm for name, norm in norms.items() if norm.of != X}


def _take_next_if_reading(rest: deque[Operation], kind: type[Reader], of: str) -> Reader | None:
    """Take the next operation, if it is of a kind and reads a value."""
    if rest and isinstance(first := rest[0], kind) and first.of == of:
        rest.popleft()
        return first
    return None
