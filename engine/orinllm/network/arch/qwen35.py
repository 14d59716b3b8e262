"""qwen35 and qwen35moe: Qwen3.5 and 3.6. Source: src/models/qwen35{,moe}.cpp of llama.cpp 0.5.0.

Value heads lie in the order in which llama.cpp's converter leaves them: the first ones of all key
heads, then the second ones.
"""

from dataclasses import replace

import numpy as np

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    SHARED,
    FeedForward,
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    layer_attentions,
    mtp_config_of_block,
    read_experts,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope, rope_with_axes
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Convolve, GatedDeltaNet, Gating, Linear, Operation

# Every fourth layer has attention, where the file does not say which.
_INTERVAL = 4


def qwen35_config(header: Header) -> Config:
    """Return the Config of a Qwen3.5: gated delta nets, and attention with gates."""
    net = _delta_net_operations(header)
    mixers = [net if recurrent else None for recurrent in _is_recurrent_by_layer(header)]
    return decoder_config(header, replace(_layer_maker(header), mixers=mixers))


def qwen35_mtp_config(header: Header) -> Config:
    """Return the Config of a Qwen3.5's block that proposes tokens: attention, as of its layers.

    Source: graph_mtp of the same files.
    """
    if header.n_mtp_blocks > 1:
        raise BadInput(
            f"{header.architecture}.nextn_predict_layers is {header.n_mtp_blocks}: one block "
            "that proposes tokens is known"
        )
    whole, dim = replace(header, whole=True), header.whole_number("embedding_length")
    index = whole.n_layers - 1
    return mtp_config_of_block(whole, _layer_maker(whole).make_layer(index, dim), index)


def _layer_maker(header: Header) -> LayerMaker:
    heads = read_head_counts(header)
    rope = rope_with_axes(header, read_rope(header, heads.head_dim, interleaved=False), mixed=True)
    layers = layer_attentions(heads, rope, qk_norm=True, gated=True)
    of_experts = header.architecture == "qwen35moe"
    feed_forwards = (
        _expert_feed_forwards(header)
        if of_experts
        else dense_feed_forwards(header, Activation.SILU)
    )
    return LayerMaker(layers, feed_forwards, ffn_norm="post_attention_norm")


def _is_recurrent_by_layer(header: Header) -> tuple[bool, ...]:
    """Return which layers have a delta net."""
    if not header.has_key("attention.recurrent_layers"):
        interval = header.whole_number("full_attention_interval", _INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(header.n_layers))
    items = np.asarray(header.value_or_raise("attention.recurrent_layers")).flat
    given = [bool(item) for item in items]
    if len(given) < header.n_layers:
        raise BadInput(
            f"{header.architecture}.attention.recurrent_layers has {len(given)} entries; "
            f"{header.n_layers}, one a layer, were expected"
        )
    return tuple(given[: header.n_layers])


def _delta_net_operations(header: Header) -> tuple[Operation, ...]:
    """Return a gated delta net of the value "normed"."""
    size, taps = (
        header.whole_number("ssm.state_size"),
        header.whole_number("ssm.conv_kernel", least=2),
    )
    heads, key_heads = (
        header.whole_number("ssm.time_step_rank"),
        header.whole_number("ssm.group_count"),
    )
    inner, name = header.whole_number("ssm.inner_size"), header.architecture
    if inner != heads * size or heads % key_heads:
        raise BadInput(
            f"{name}.ssm.inner_size is {inner}, ssm.time_step_rank {heads}, ssm.group_count "
            f"{key_heads}: an inner size of {heads * size}, and heads that groups divide, were "
            "expected"
        )
    channels, dim = (2 * key_heads + heads) * size, header.whole_number("embedding_length")
    return (
        Linear("projected", "normed", (("attn_qkv", channels), ("attn_gate", inner))),
        Linear("gates", "normed", (("ssm_alpha", heads), ("ssm_beta", heads))),
        Convolve("convolved", "projected", "ssm_conv1d", channels, taps),
        GatedDeltaNet(
            *("mixed", "convolved", "projected"), channels, "gates", heads, key_heads, size
        ),
        Linear("out", "mixed", (("ssm_out", dim),)),
    )


def _expert_feed_forwards(header: Header) -> list[FeedForward]:
    # llama.cpp's defaults: the dense width for the shared expert, shared by those in use else.
    width = header.whole_number("feed_forward_length", 0, least=0)
    hidden = header.whole_number(
        "expert_feed_forward_length", width // header.whole_number("expert_used_count")
    )
    shared = header.whole_number("expert_shared_feed_forward_length", width)
    experts = read_experts(header, hidden, Gating.SOFTMAX, normalized=True, reads=SHARED)
    return [FeedForward(Activation.SILU, 0, experts, shared, shared_gate=True)] * header.n_layers
