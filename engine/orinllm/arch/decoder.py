"""Common parts of the families: layers read from the common keys, and the experts' keys."""

from collections.abc import Callable
from dataclasses import dataclass

from orinllm.arch.header import Header
from orinllm.config import (
    Activation,
    Attention,
    Config,
    Experts,
    FeedForward,
    Gating,
    Layer,
    Matrix,
    Rope,
)
from orinllm.errors import BadInput


@dataclass(frozen=True)
class Heads:
    """The attention heads of the layers; counts are by layer."""

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int

    @property
    def scale(self) -> float:
        """The usual scale of the scores."""
        return float(self.head_dim**-0.5)


def heads_of(header: Header) -> Heads:
    """Read the heads; raises BadInput where they do not divide or values are of another length."""
    heads = header.counts("attention.head_count")
    kv_heads = header.counts("attention.head_count_kv", heads)
    for n_heads, n_kv_heads in zip(heads, kv_heads, strict=True):
        if n_heads % n_kv_heads:
            raise BadInput(
                f"{header.architecture}.attention.head_count is {n_heads}, no multiple of "
                f"attention.head_count_kv, {n_kv_heads}"
            )
    head_dim = header.count("attention.key_length", header.count("embedding_length") // heads[0])
    if (value_length := header.count("attention.value_length", head_dim)) != head_dim:
        raise BadInput(
            f"{header.architecture}.attention.value_length is {value_length} and key_length "
            f"{head_dim}: values of another length than keys are not supported"
        )
    return Heads(heads, kv_heads, head_dim)


def experts_of(
    header: Header, hidden: int, gating: Gating, normalized: bool, biased: bool = False
) -> Experts:
    """Read a mixture of experts that are `hidden` wide each."""
    count, used = header.count("expert_count"), header.count("expert_used_count")
    if used > count:
        raise BadInput(
            f"{header.architecture}.expert_used_count is {used} of {count} experts; "
            f"at most {count} was expected"
        )
    header.without(
        {
            "expert_shared_count": "a shared expert",
            "expert_shared_feed_forward_length": "a shared expert",
            "leading_dense_block_count": "dense layers before the experts",
        }
    )
    if header.has("expert_group_count") and header.count("expert_group_count") > 1:
        raise BadInput(f"{header.architecture}.expert_group_count: groups are not supported")
    # llama.cpp takes a scale of 0 for 1.
    scale = header.number("expert_weights_scale", 1.0) or 1.0
    return Experts(count, used, hidden, gating, normalized, scale, biased)


@dataclass(frozen=True)
class LayerParts:
    """A maker of a family's layer `index` from the header's numbers."""

    attention: Callable[[int, Heads], Attention]
    feed_forward: Callable[[int], FeedForward]
    post_norms: bool = False


def decoder(header: Header, parts: LayerParts) -> Config:
    """Return the Config of a family without multipliers, fused tensors and other specials."""
    heads = heads_of(header)
    layers = tuple(
        Layer(parts.attention(index, heads), parts.feed_forward(index), parts.post_norms)
        for index in range(header.n_layers)
    )
    head = header.tensors.get("output.weight") or header.tensors.get("token_embd.weight")
    if head is None or len(head.shape) != 2:
        raise BadInput("the file is no language model: it has no matrix token_embd.weight")
    return Config(
        matrices=_fused(header, layers),
        architecture=header.architecture,
        dim=header.count("embedding_length"),
        vocab_size=head.shape[0],
        trained_context=header.count("context_length"),
        norm_eps=header.positive("attention.layer_norm_rms_epsilon"),
        layers=layers,
    )


def _fused(header: Header, layers: tuple[Layer, ...]) -> dict[str, Matrix]:
    """Return the parts of fused tensors: q, k and v in attn_qkv, gate and up of the experts."""
    matrices: dict[str, Matrix] = {}

    def split(fused: str, parts: dict[str, int]) -> None:
        first = 0
        for name, rows in parts.items() if f"{fused}.weight" in header.tensors else ():
            matrices[name] = Matrix(f"{fused}.weight", first, rows)
            first += rows

    for index, layer in enumerate(layers):
        prefix, attention = f"blk.{index}.", layer.attention
        kv_rows = attention.kv_heads * attention.head_dim
        rows = {"attn_q": attention.heads * attention.head_dim, "attn_k": kv_rows}
        rows["attn_v"] = kv_rows
        split(f"{prefix}attn_qkv", {f"{prefix}{name}": count for name, count in rows.items()})
        if experts := layer.feed_forward.experts:
            halves = (f"{prefix}ffn_gate_exps", f"{prefix}ffn_up_exps")
            split(f"{prefix}ffn_gate_up_exps", dict.fromkeys(halves, experts.hidden))
    return matrices


def plain_attention(
    rope: Rope | None, qk_norm: bool = False, scale: float | None = None
) -> Callable[[int, Heads], Attention]:
    """Return the attention of families whose layers are alike."""

    def attention(index: int, heads: Heads) -> Attention:
        return Attention(
            heads=heads.heads[index],
            kv_heads=heads.kv_heads[index],
            head_dim=heads.head_dim,
            scale=heads.scale if scale is None else scale,
            rope=rope,
            qk_norm=qk_norm,
        )

    return attention


def dense(header: Header, activation: Activation) -> Callable[[int], FeedForward]:
    """Return the dense feed-forward parts."""
    hidden = header.counts("feed_forward_length")
    return lambda index: FeedForward(activation, hidden[index])


def mixture(experts: Experts, activation: Activation) -> Callable[[int], FeedForward]:
    """Return the feed-forward parts of a model whose layers all have the same experts."""
    return lambda index: FeedForward(activation, experts=experts)
