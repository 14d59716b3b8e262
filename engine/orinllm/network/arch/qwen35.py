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
    LayerParts,
    attentions,
    decoder,
    dense,
    experts_of,
    heads_of,
    mtp_config_with,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of, with_axes
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Convolve, Delta, Gating, Linear, Operation

# Every fourth layer has attention, where the file does not say which.
_INTERVAL = 4


def qwen35(header: Header) -> Config:
    """Return the Config of a Qwen3.5: gated delta nets, and attention with gates."""
    net = _delta_net(header)
    mixers = [net if recurrent else None for recurrent in _recurrent(header)]
    return decoder(header, replace(_parts(header), mixers=mixers))


def qwen35_mtp(header: Header) -> Config:
    """Return the Config of a Qwen3.5's block that proposes tokens: attention, as of its layers.

    Source: graph_mtp of the same files.
    """
    if header.proposing > 1:
        raise BadInput(
            f"{header.architecture}.nextn_predict_layers is {header.proposing}: one block that "
            "proposes tokens is known"
        )
    whole, dim = replace(header, whole=True), header.count("embedding_length")
    index = whole.n_layers - 1
    return mtp_config_with(whole, _parts(whole).layer(index, dim), index)


def _parts(header: Header) -> LayerParts:
    heads = heads_of(header)
    rope = with_axes(header, rope_of(header, heads.head_dim, interleaved=False), mixed=True)
    layers = attentions(heads, rope, qk_norm=True, gated=True)
    of_experts = header.architecture == "qwen35moe"
    feed_forwards = _mixture(header) if of_experts else dense(header, Activation.SILU)
    return LayerParts(layers, feed_forwards, ffn_norm="post_attention_norm")


def _recurrent(header: Header) -> tuple[bool, ...]:
    """Return which layers have a delta net."""
    if not header.has("attention.recurrent_layers"):
        interval = header.count("full_attention_interval", _INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(header.n_layers))
    given = [bool(item) for item in np.asarray(header.get("attention.recurrent_layers")).flat]
    if len(given) < header.n_layers:
        raise BadInput(
            f"{header.architecture}.attention.recurrent_layers has {len(given)} entries; "
            f"{header.n_layers}, one a layer, were expected"
        )
    return tuple(given[: header.n_layers])


def _delta_net(header: Header) -> tuple[Operation, ...]:
    """Return a gated delta net of the value "normed"."""
    size, taps = header.count("ssm.state_size"), header.count("ssm.conv_kernel", least=2)
    heads, key_heads = header.count("ssm.time_step_rank"), header.count("ssm.group_count")
    inner, name = header.count("ssm.inner_size"), header.architecture
    if inner != heads * size or heads % key_heads:
        raise BadInput(
            f"{name}.ssm.inner_size is {inner}, ssm.time_step_rank {heads}, ssm.group_count "
            f"{key_heads}: an inner size of {heads * size}, and heads that groups divide, were "
            "expected"
        )
    channels, dim = (2 * key_heads + heads) * size, header.count("embedding_length")
    return (
        Linear("projected", "normed", (("attn_qkv", channels), ("attn_gate", inner))),
        Linear("gates", "normed", (("ssm_alpha", heads), ("ssm_beta", heads))),
        Convolve("convolved", "projected", "ssm_conv1d", channels, taps),
        Delta(*("mixed", "convolved", "projected"), channels, "gates", heads, key_heads, size),
        Linear("out", "mixed", (("ssm_out", dim),)),
    )


def _mixture(header: Header) -> list[FeedForward]:
    # llama.cpp's defaults: the dense width for the shared expert, shared by those in use else.
    width = header.count("feed_forward_length", 0, least=0)
    hidden = header.count("expert_feed_forward_length", width // header.count("expert_used_count"))
    shared = header.count("expert_shared_feed_forward_length", width)
    experts = experts_of(header, hidden, Gating.SOFTMAX, normalized=True, reads=SHARED)
    return [FeedForward(Activation.SILU, 0, experts, shared, shared_gate=True)] * header.n_layers
