"""lfm2, dense and of experts. Source: src/models/lfm2.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.network.arch.decoder import (
    FeedForward,
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    layer_attentions,
    read_experts,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Convolve, Gating, Linear


def lfm2_config(header: Header) -> Config:
    """Return the Config of an LFM2: layers without key-value heads have a short convolution."""
    heads, dim = read_head_counts(header, least=0), header.whole_number("embedding_length")
    rope = read_rope(header, heads.head_dim, interleaved=False)
    taps = header.whole_number("shortconv.l_cache", least=2)

    convolution = (
        Linear("projected", "normed", (("shortconv.in_proj", 3 * dim),)),
        Convolve("convolved", "projected", "shortconv.conv", dim, taps, gated=True),
        Linear("out", "convolved", (("shortconv.out_proj", dim),)),
    )
    feed_forwards = dense_feed_forwards(header, Activation.SILU)
    if header.architecture == "lfm2moe":
        first = header.whole_number("leading_dense_block_count", 0, least=0)
        hidden = header.whole_number("expert_feed_forward_length")
        reads = ("leading_dense_block_count",)
        experts = read_experts(header, hidden, Gating.SIGMOID, normalized=True, reads=reads)
        mixed = FeedForward(Activation.SILU, experts=replace(experts, choice_bias=True))
        feed_forwards[first:] = [mixed] * len(feed_forwards[first:])
    mixers = [None if kv_heads else convolution for kv_heads in heads.kv_heads]
    maker = LayerMaker(layer_attentions(heads, rope, qk_norm=True), feed_forwards, mixers=mixers)
    return replace(decoder_config(header, maker), final_norm="token_embd_norm")
