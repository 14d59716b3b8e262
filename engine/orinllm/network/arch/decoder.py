"""Common parts of the families: layers' operations, read from the common keys."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orinllm.errors import BadInput
from orinllm.network.arch.header import Header
from orinllm.network.config import Config, TensorRows
from orinllm.network.layer import (
    Activate,
    Activation,
    AddToResidual,
    Attend,
    Attention,
    Experts,
    Gate,
    Gating,
    Layer,
    Linear,
    MixExperts,
    Norm,
    Operation,
    Rope,
    X,
)


@dataclass(frozen=True)
class HeadCounts:
    """The attention heads of the layers; counts are by layer, 0 where a layer has none."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int

    @property
    def score_scale(self) -> float:
        """The usual scale of the scores."""
        return float(self.head_dim**-0.5)


def read_head_counts(header: Header, least: int = 1) -> HeadCounts:
    """Read the heads; raises BadInput where they do not divide or values are of another length.

    `least` 0: layers may have none.
    """
    heads = header.whole_numbers_by_layer("attention.head_count", least=least)
    kv_heads = header.whole_numbers_by_layer("attention.head_count_kv", heads, least)
    for n_heads, n_kv_heads in zip(heads, kv_heads, strict=True):
        if n_kv_heads and n_heads % n_kv_heads:
            raise BadInput(
                f"{header.architecture}.attention.head_count is {n_heads}, no multiple of "
                f"attention.head_count_kv, {n_kv_heads}"
            )
    widest = max(*heads, 1)
    head_dim = header.whole_number(
        "attention.key_length", header.whole_number("embedding_length") // widest
    )
    if (value_length := header.whole_number("attention.value_length", head_dim)) != head_dim:
        raise BadInput(
            f"{header.architecture}.attention.value_length is {value_length} and key_length "
            f"{head_dim}: values of another length than keys are not supported"
        )
    return HeadCounts(heads, kv_heads, head_dim)


# What may stand beside experts.
SHARED = ("expert_shared_count", "expert_shared_feed_forward_length")
_BESIDE = {
    **dict.fromkeys(SHARED, "a shared expert"),
    "leading_dense_block_count": "dense layers before the experts",
    "moe_latent_size": "experts of another width than the model's",
}


def read_experts(
    header: Header,
    hidden: int,
    gating: Gating,
    normalized: bool,
    biased: bool = False,
    reads: tuple[str, ...] = (),
) -> Experts:
    """Read a mixture of experts that are `hidden` wide each.

    `reads`: keys of what stands beside the experts that the family knows.
    """
    count, used = header.whole_number("expert_count"), header.whole_number("expert_used_count")
    if used > count:
        raise BadInput(
            f"{header.architecture}.expert_used_count is {used} of {count} experts; "
            f"at most {count} was expected"
        )
    header.refuse_keys({key: what for key, what in _BESIDE.items() if key not in reads})
    if header.has_key("expert_group_count") and header.whole_number("expert_group_count") > 1:
        raise BadInput(f"{header.architecture}.expert_group_count: groups are not supported")
    # llama.cpp takes a scale of 0 for 1.
    scale = header.number("expert_weights_scale", 1.0) or 1.0
    return Experts(count, used, hidden, gating, normalized, scale, biased)


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward part: dense with `hidden`, or `experts`.

    shared: width of an expert that takes part for every token; 0: there is none. shared_gate: it is
    times a sigmoid of the token's own.
    """

    activation: Activation
    hidden: int = 0
    experts: Experts | None = None
    shared: int = 0
    shared_gate: bool = False

    def operations(self, of: str, dim: int, added: "Added") -> tuple[Operation, ...]:
        """Return what computes it of a value, with `added` what adds to X."""
        if self.experts is None:
            return (*self._dense_operations(of, "", self.hidden, dim), *added("down", None))
        mix = MixExperts("down", of, self.experts, self.activation)
        if not self.shared:
            return (mix, *added("down", None))
        *before, down = self._dense_operations(of, "_shexp", self.shared, dim)
        gate = Linear("shared_gate", of, (("ffn_gate_inp_shexp", 1),))
        gates = (gate,) if self.shared_gate else ()
        by = gate.out if gates else None
        return (*before, *gates, mix, *added("down", None), down, *added("down_shexp", by))

    def _dense_operations(self, of: str, name: str, hidden: int, dim: int) -> tuple[Operation, ...]:
        matrices = ((f"ffn_gate{name}", hidden), (f"ffn_up{name}", hidden))
        down = Linear(f"down{name}", f"hidden{name}", ((f"ffn_down{name}", dim),))
        if self.activation == Activation.RELU_SQUARED:
            up = Linear(f"up{name}", of, matrices[1:])
            return (up, Activate(f"hidden{name}", up.out, self.activation), down)
        both = Linear(f"gate_up{name}", of, matrices)
        return (both, Gate(f"hidden{name}", both.out, self.activation), down)


#: Makes what adds a value to X, by what its last argument names (Add.by).
Added = Callable[[str, str | None], tuple[Operation, ...]]


@dataclass(frozen=True)
class LayerMaker:
    """Makes a family's layers: norm, attention, add, norm, feed-forward, add; each has its own.

    mixers: what layers have in place of attention, from the value "normed" to "out"; None:
    attention. (): all have it.
    """

    attentions: Sequence[Attention]
    feed_forwards: Sequence[FeedForward]
    ffn_norm: str = "ffn_norm"  # the norm before the feed-forward part
    post_norms: bool = False  # RMS norms of both parts' outputs before they are added
    residual_scale: float = 1.0  # times both parts' outputs before they are added
    mixers: Sequence[tuple[Operation, ...] | None] = ()

    def make_layer(self, index: int, dim: int) -> Layer:
        """Return layer `index` of a model that is `dim` wide."""
        mixer = self.mixers[index] if self.mixers else None
        if mixer is None:
            mixer = attention_operations("normed", self.attentions[index], dim)

        def added(of: str, by: str | None) -> tuple[Operation, ...]:
            return self._addition_ops(of, "post_ffw_norm", by)

        return Layer(
            (
                Norm("normed", X, "attn_norm"),
                *mixer,
                *self._addition_ops("out", "post_attention_norm"),
                Norm("normed", X, self.ffn_norm),
                *self.feed_forwards[index].operations("normed", dim, added),
            )
        )

    def _addition_ops(self, of: str, norm: str, by: str | None = None) -> tuple[Operation, ...]:
        if self.post_norms:
            return (
                Norm(f"{of}_normed", of, norm),
                AddToResidual(f"{of}_normed", self.residual_scale, by),
            )
        return (AddToResidual(of, self.residual_scale, by),)


def attention_operations(of: str, attention: Attention, dim: int) -> tuple[Operation, ...]:
    """Return attention of a value, from its projections to the value `out`."""
    q, kv = attention.q_and_gate_width, attention.kv_width
    return (
        Linear("qkv", of, (("attn_q", q), ("attn_k", kv), ("attn_v", kv)), biased=True),
        Attend("attended", "qkv", attention),
        Linear("out", "attended", (("attn_output", dim),), biased=True),
    )


def decoder_config(header: Header, maker: LayerMaker) -> Config:
    """Return the Config of a family without multipliers, fused tensors and other specials."""
    dim = header.whole_number("embedding_length")
    return config_of_layers(header, tuple(maker.make_layer(i, dim) for i in range(header.n_layers)))


def mtp_config_of_block(header: Header, layer: Layer, index: int) -> Config:
    """Return the Config of block `index`, which proposes later tokens.

    It has a norm, and may have an embedding and a head, of its own; else it takes the model's.
    """
    prefix, tensors = f"blk.{index}.nextn.", header.tensors

    def own(name: str, *others: str) -> str:
        names = (f"{prefix}{name}", *others)
        return next((name for name in names if f"{name}.weight" in tensors), names[-1])

    config = config_of_layers(header, (layer,), index)
    embedding, head = own("embed_tokens", "token_embd"), ("shared_head_head", "output")
    matrices = {"token_embd": embedding, "output": own(*head, "token_embd")}
    return replace(
        config,
        matrices=config.matrices | {of: TensorRows(f"{n}.weight") for of, n in matrices.items()},
        final_norm=own("shared_head_norm", "output_norm"),
        first=index,
        joined=f"{prefix}eh_proj",
    )


def config_of_layers(header: Header, layers: tuple[Layer, ...], first: int = 0) -> Config:
    """Return the Config of these layers, the first of which is number `first` of the file.

    Raises BadInput where the file has no embedding.
    """
    head = header.tensors.get("output.weight") or header.tensors.get("token_embd.weight")
    if head is None or len(head.shape) != 2:
        raise BadInput("the file is no language model: it has no matrix token_embd.weight")
    return Config(
        matrices=_rows_of_fused_tensors(header, layers, first),
        architecture=header.architecture,
        dim=header.whole_number("embedding_length"),
        vocab_size=head.shape[0],
        trained_context=header.whole_number("context_length"),
        norm_eps=header.positive_number("attention.layer_norm_rms_epsilon"),
        layers=layers,
    )


def _rows_of_fused_tensors(
    header: Header, layers: tuple[Layer, ...], first_layer: int
) -> dict[str, TensorRows]:
    """Return the parts of fused tensors: q, k and v in attn_qkv, gate and up of the experts."""
    matrices: dict[str, TensorRows] = {}

    def split(prefix: str, fused: str, parts: Iterable[tuple[str, int]]) -> None:
        first = 0
        for name, rows in parts if f"{prefix}{fused}.weight" in header.tensors else ():
            matrices[f"{prefix}{name}"] = TensorRows(f"{prefix}{fused}.weight", first, rows)
            first += rows

    for index, layer in enumerate(layers, first_layer):
        prefix = f"blk.{index}."
        for operation in layer.operations:
            if isinstance(operation, Linear) and operation.out == "qkv":
                split(prefix, "attn_qkv", operation.matrices)
            elif isinstance(operation, MixExperts):
                halves = ("ffn_gate_exps", "ffn_up_exps")
                split(prefix, "ffn_gate_up_exps", ((n, operation.experts.hidden) for n in halves))
    return matrices


def layer_attentions(
    heads: HeadCounts,
    rope: Rope | None,
    windows: Sequence[int] = (),
    near: Rope | None = None,
    **alike: Any,
) -> list[Attention]:
    """Return the attention of each layer, which are alike but for heads and windows.

    near: the positions of layers that have a window. alike: more of `Attention`, of all layers.
    """
    counts = zip(heads.heads, heads.kv_heads, windows or (0,) * len(heads.heads), strict=True)
    common = {"head_dim": heads.head_dim, "scale": heads.score_scale} | alike
    return [
        Attention(heads=n, kv_heads=kv, rope=near if window else rope, window=window, **common)
        for n, kv, window in counts
    ]


def dense_feed_forwards(header: Header, activation: Activation) -> list[FeedForward]:
    """Return the dense feed-forward parts."""
    return [
        FeedForward(activation, hidden)
        for hidden in header.whole_numbers_by_layer("feed_forward_length")
    ]


def expert_feed_forwards(
    header: Header, experts: Experts, activation: Activation
) -> list[FeedForward]:
    """Return the feed-forward parts of a model whose layers all have the same experts."""
    return [FeedForward(activation, experts=experts)] * header.n_layers


def read_windows(header: Header, pattern: int, default: int = 0) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 where it sees everything.

    The file's pattern is an array, true for layers with a window, or a number n: every n-th layer
    has none. `pattern` and `default`, a window, are those of files without the keys.
    """
    layers = header.n_layers
    window = header.whole_number("attention.sliding_window", default, least=0)
    if window == 0:
        return (0,) * layers
    given = header.value_or_raise("attention.sliding_window_pattern", pattern)
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        local = [given == 0 or index % given < given - 1 for index in range(layers)]
    else:
        local = [bool(item) for item in np.asarray(given).reshape(-1)]
    if len(local) < layers:
        raise BadInput(
            f"{header.architecture}.attention.sliding_window_pattern has {len(local)} entries; "
            f"{layers}, one a layer, were expected"
        )
    return tuple(window if is_local else 0 for is_local in local[:layers])
