"""gpt-oss. Source: src/models/openai-moe.cpp of llama.cpp 0.5.0."""

from orinllm.network.arch.decoder import (
    LayerMaker,
    decoder_config,
    expert_feed_forwards,
    layer_attentions,
    read_experts,
    read_head_counts,
    read_windows,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Gating

# Layers 0, 2, 4, ... have the window.
_PATTERN = 2


def gpt_oss_config(header: Header) -> Config:
    """Return the Config of a gpt-oss: YaRN, sinks, windows, and biases everywhere."""
    heads = read_head_counts(header)
    windows = read_windows(header, _PATTERN)
    far = read_rope(header, heads.head_dim, interleaved=False)
    base = header.positive_number("rope.freq_base", 10000.0)
    base = header.positive_number("rope.freq_base_swa", base)
    near = read_rope(header, heads.head_dim, interleaved=False, base=base)
    hidden = header.whole_number("expert_feed_forward_length")
    experts = read_experts(header, hidden, Gating.SOFTMAX_OF_CHOSEN, normalized=False, biased=True)
    layers = layer_attentions(heads, far, windows, near, sinks=True)
    mixed = expert_feed_forwards(header, experts, Activation.GPT_OSS)
    return decoder_config(header, LayerMaker(layers, mixed, ffn_norm="post_attention_norm"))
