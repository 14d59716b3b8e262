"""Qwen2, Qwen3 and their models that see. Source: src/models/qwen*.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import LayerParts, decoder, dense, experts_of, heads_of, mixture
from orinllm.network.arch.decoder import plain_attention as attention
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of, with_axes
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Deepstack, Gating, Layer, Rope


def qwen2(header: Header) -> Config:
    """Return the Config of a Qwen2 or 2.5: biases of q, k and v are tensors of the file."""
    return decoder(header, LayerParts(attention(_rope(header)), dense(header, Activation.SILU)))


def qwen3(header: Header) -> Config:
    """Return the Config of a dense Qwen3: q and k are normed by head."""
    parts = LayerParts(attention(_rope(header), qk_norm=True), dense(header, Activation.SILU))
    return decoder(header, parts)


def qwen3moe(header: Header) -> Config:
    """Return the Config of a Qwen3 of experts."""
    # llama.cpp takes the dense width, shared by the experts in use, for files without the key.
    used = header.count("expert_used_count")
    default = header.count("feed_forward_length", least=0) // used
    hidden = header.count("expert_feed_forward_length", default)
    experts = experts_of(header, hidden, Gating.SOFTMAX, normalized=True)
    parts = LayerParts(attention(_rope(header), qk_norm=True), mixture(experts, Activation.SILU))
    return decoder(header, parts)


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


def _rope(header: Header) -> Rope:
    """Return rotary positions, of three parts where the family sees."""
    rope, name = rope_of(header, heads_of(header).head_dim, interleaved=False), header.architecture
    return with_axes(header, rope, mixed=name != "qwen2vl") if "vl" in name else rope
