"""gpt-oss. Source: src/models/openai-moe.cpp of llama.cpp 0.5.0."""

from orinllm.network.arch.decoder import (
    LayerParts,
    attentions,
    decoder,
    experts_of,
    heads_of,
    mixture,
    windows_of,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Gating

# Layers 0, 2, 4, ... have the window.
_PATTERN = 2


def gpt_oss(header: Header) -> Config:
    """Return the Config of a gpt-oss: YaRN, sinks, windows, and biases everywhere."""
    heads = heads_of(header)
    windows = windows_of(header, _PATTERN)
    far = rope_of(header, heads.head_dim, interleaved=False)
    base = header.positive("rope.freq_base", 10000.0)
    base = header.positive("rope.freq_base_swa", base)
    near = rope_of(header, heads.head_dim, interleaved=False, base=base)
    hidden = header.count("expert_feed_forward_length")
    experts = experts_of(header, hidden, Gating.SOFTMAX_OF_CHOSEN, normalized=False, biased=True)
    layers = attentions(heads, far, windows, near, sinks=True)
    mixed = mixture(header, experts, Activation.GPT_OSS)
    return decoder(header, LayerParts(layers, mixed, ffn_norm="post_attention_norm"))
