"""Qwen2, Qwen3 and their models that see. Source: src/models/qwen*.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    expert_feed_forwards,
    layer_attentions,
    read_experts,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope, rope_with_axes
from orinllm.network.config import Config
from orinllm.network.layer import Activation, AddDeepstackRows, Attention, Gating, Layer


def qwen2_config(header: Header) -> Config:
    """Return the Config of a Qwen2 or 2.5: biases of q, k and v are tensors of the file."""
    return decoder_config(
        header, LayerMaker(_layer_attentions(header), dense_feed_forwards(header, Activation.SILU))
    )


def qwen3_config(header: Header) -> Config:
    """Return the Config of a dense Qwen3: q and k are normed by head."""
    layers = _layer_attentions(header, qk_norm=True)
    return decoder_config(header, LayerMaker(layers, dense_feed_forwards(header, Activation.SILU)))


def qwen3moe_config(header: Header) -> Config:
    """Return the Config of a Qwen3 of experts."""
    # llama.cpp takes the dense width, shared by the experts in use, for files without the key.
    used = header.whole_number("expert_used_count")
    default = header.whole_number("feed_forward_length", least=0) // used
    hidden = header.whole_number("expert_feed_forward_length", default)
    experts = read_experts(header, hidden, Gating.SOFTMAX, normalized=True)
    layers = _layer_attentions(header, qk_norm=True)
    return decoder_config(
        header, LayerMaker(layers, expert_feed_forwards(header, experts, Activation.SILU))
    )


def qwen3vl_config(header: Header) -> Config:
    """Return the Config of a Qwen3-VL: pictures' rows go on being added behind its first layers."""
    config = qwen3_config(header) if header.architecture == "qwen3vl" else qwen3moe_config(header)
    parts = header.whole_number("n_deepstack_layers", 0, least=0)
    if parts >= header.n_layers:
        raise BadInput(
            f"{header.architecture}.n_deepstack_layers is {parts} of {header.n_layers} layers; "
            "fewer were expected"
        )
    first = [
        Layer((*layer.operations, AddDeepstackRows(part)))
        for part, layer in enumerate(config.layers[:parts])
    ]
    return replace(config, layers=(*first, *config.layers[parts:]))


def _layer_attentions(header: Header, qk_norm: bool = False) -> list[Attention]:
    """Return attention with rotary positions, of three parts where the family sees."""
    heads, name = read_head_counts(header), header.architecture
    rope = read_rope(header, heads.head_dim, interleaved=False)
    if "vl" in name:
        rope = rope_with_axes(header, rope, mixed=name != "qwen2vl")
    return layer_attentions(heads, rope, qk_norm=qk_norm)
