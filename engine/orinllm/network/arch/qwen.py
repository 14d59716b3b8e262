"""Qwen2, Qwen3 and their models that see. Source: src/models/qwen*.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    LayerParts,
    attentions,
    decoder,
    dense,
    experts_of,
    heads_of,
    mixture,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of, with_axes
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Attention, Deepstack, Gating, Layer


def qwen2(header: Header) -> Config:
    """Return the Config of a Qwen2 or 2.5: biases of q, k and v are tensors of the file."""
    return decoder(header, LayerParts(_attentions(header), dense(header, Activation.SILU)))


def qwen3(header: Header) -> Config:
    """Return the Config of a dense Qwen3: q and k are normed by head."""
    layers = _attentions(header, qk_norm=True)
    return decoder(header, LayerParts(layers, dense(header, Activation.SILU)))


def qwen3moe(header: Header) -> Config:
    """Return the Config of a Qwen3 of experts."""
    # llama.cpp takes the dense width, shared by the experts in use, for files without the key.
    used = header.count("expert_used_count")
    default = header.count("feed_forward_length", least=0) // used
    hidden = header.count("expert_feed_forward_length", default)
    experts = experts_of(header, hidden, Gating.SOFTMAX, normalized=True)
    layers = _attentions(header, qk_norm=True)
    return decoder(header, LayerParts(layers, mixture(header, experts, Activation.SILU)))


def qwen3vl(header: Header) -> Config:
    """Return the Config of a Qwen3-VL: pictures' rows go on being added behind its first layers."""
    config = qwen3(header) if header.architecture == "qwen3vl" else qwen3moe(header)
    parts = header.count("n_deepstack_layers", 0, least=0)
    if parts >= header.n_layers:
        raise BadInput(
            f"{header.architecture}.n_deepstack_layers is {parts} of {header.n_layers} layers; "
            "fewer were expected"
        )
    first = [
        Layer((*layer.operations, Deepstack(part)))
        for part, layer in enumerate(config.layers[:parts])
    ]
    return replace(config, layers=(*first, *config.layers[parts:]))


def _attentions(header: Header, qk_norm: bool = False) -> list[Attention]:
    """Return attention with rotary positions, of three parts where the family sees."""
    heads, name = heads_of(header), header.architecture
    rope = rope_of(header, heads.head_dim, interleaved=False)
    if "vl" in name:
        rope = with_axes(header, rope, mixed=name != "qwen2vl")
    return attentions(heads, rope, qk_norm=qk_norm)
