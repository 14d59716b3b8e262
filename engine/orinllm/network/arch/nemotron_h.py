"""nemotron_h, dense and of experts, and Mamba-2 layers, which granitehybrid has too.

Source: src/models/{nemotron-h,mamba-base}.cpp of llama.cpp 0.5.0.
"""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    SHARED,
    FeedForward,
    attention_of,
    attentions,
    config_with,
    experts_of,
    heads_of,
)
from orinllm.network.arch.header import Header
from orinllm.network.config import Config
from orinllm.network.layer import (
    Activation,
    Add,
    Convolve,
    Gating,
    Layer,
    Linear,
    Norm,
    Operation,
    Scan,
    X,
)


def nemotron_h(header: Header) -> Config:
    """Return the Config of a Nemotron-H: each layer is a Mamba-2, attention or a feed-forward."""
    heads, dim = heads_of(header, least=0), header.count("embedding_length")
    hidden = header.counts("feed_forward_length", least=0)
    scale = header.number("attention.scale", 0.0) or heads.scale
    attended = attentions(heads, None, scale=scale)
    experts = _experts(header) if header.architecture == "nemotron_h_moe" else None

    def layer(index: int) -> Layer:
        norm = Norm("normed", X, "attn_norm")
        if hidden[index]:
            part = experts or FeedForward(Activation.RELU_SQUARED, hidden[index])
            return Layer((norm, *part.operations("normed", dim, _added)))
        if heads.kv_heads[index]:
            mixer = attention_of("normed", attended[index], dim)
        else:
            mixer = mamba2(header)
        return Layer((norm, *mixer, Add("out")))

    return config_with(header, tuple(layer(index) for index in range(header.n_layers)))


def _added(of: str, by: str | None) -> tuple[Operation, ...]:
    return (Add(of, by=by),)


def _experts(header: Header) -> FeedForward:
    hidden = header.count("expert_feed_forward_length")
    normalized = header.flag("expert_weights_norm", False)
    experts = experts_of(header, hidden, Gating.SIGMOID, normalized, reads=SHARED)
    experts = replace(experts, choice_bias=True, gated=False)
    shared = header.count("expert_shared_feed_forward_length")
    return FeedForward(Activation.RELU_SQUARED, 0, experts, shared)


def mamba2(header: Header) -> tuple[Operation, ...]:
    """Return a Mamba-2 of the value "normed"; raises BadInput for sizes that do not divide."""
    inner, heads = header.count("ssm.inner_size"), header.count("ssm.time_step_rank")
    groups, state = header.count("ssm.group_count"), header.count("ssm.state_size")
    taps, dim = header.count("ssm.conv_kernel", least=2), header.count("embedding_length")
    if inner % heads or heads % groups:
        raise BadInput(
            f"{header.architecture}.ssm.inner_size is {inner}, ssm.time_step_rank {heads}, "
            f"ssm.group_count {groups}: each of them was expected to divide the one before"
        )
    scan = Scan("mixed", "convolved", "projected", heads, inner // heads, groups, state)
    return (
        Linear("projected", "normed", (("ssm_in", inner + scan.channels + heads),)),
        Convolve("convolved", "projected", "ssm_conv1d", scan.channels, taps, first=inner),
        scan,
        Linear("out", "mixed", (("ssm_out", dim),)),
    )
