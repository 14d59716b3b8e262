"""nemotron_h, dense and of experts, and Mamba-2 layers, which granitehybrid has too.

Source: src/models/{nemotron-h,mamba-base}.cpp of llama.cpp 0.5.0.
"""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    SHARED,
    FeedForward,
    attention_operations,
    config_of_layers,
    layer_attentions,
    read_experts,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.config import Config
from orinllm.network.layer import (
    Activation,
    AddToResidual,
    Convolve,
    Gating,
    Layer,
    Linear,
    Norm,
    Operation,
    SelectiveScan,
    X,
)


def nemotron_h_config(header: Header) -> Config:
    """Return the Config of a Nemotron-H: each layer is a Mamba-2, attention or a feed-forward."""
    heads, dim = read_head_counts(header, least=0), header.whole_number("embedding_length")
    hidden = header.whole_numbers_by_layer("feed_forward_length", least=0)
    scale = header.number("attention.scale", 0.0) or heads.score_scale
    attended = layer_attentions(heads, None, scale=scale)
    experts = _expert_feed_forward(header) if header.architecture == "nemotron_h_moe" else None

    def layer(index: int) -> Layer:
        norm = Norm("normed", X, "attn_norm")
        if hidden[index]:
            part = experts or FeedForward(Activation.RELU_SQUARED, hidden[index])
            return Layer((norm, *part.operations("normed", dim, _addition_ops)))
        if heads.kv_heads[index]:
            mixer = attention_operations("normed", attended[index], dim)
        else:
            mixer = mamba2_operations(header)
        return Layer((norm, *mixer, AddToResidual("out")))

    return config_of_layers(header, tuple(layer(index) for index in range(header.n_layers)))


def _addition_ops(of: str, by: str | None) -> tuple[Operation, ...]:
    return (AddToResidual(of, by=by),)


def _expert_feed_forward(header: Header) -> FeedForward:
    hidden = header.whole_number("expert_feed_forward_length")
    normalized = header.flag("expert_weights_norm", False)
    experts = read_experts(header, hidden, Gating.SIGMOID, normalized, reads=SHARED)
    experts = replace(experts, choice_bias=True, gated=False)
    shared = header.whole_number("expert_shared_feed_forward_length")
    return FeedForward(Activation.RELU_SQUARED, 0, experts, shared)


def mamba2_operations(header: Header) -> tuple[Operation, ...]:
    """Return a Mamba-2 of the value "normed"; raises BadInput for sizes that do not divide."""
    inner, heads = header.whole_number("ssm.inner_size"), header.whole_number("ssm.time_step_rank")
    groups, state = header.whole_number("ssm.group_count"), header.whole_number("ssm.state_size")
    taps, dim = (
        header.whole_number("ssm.conv_kernel", least=2),
        header.whole_number("embedding_length"),
    )
    if inner % heads or heads % groups:
        raise BadInput(
            f"{header.architecture}.ssm.inner_size is {inner}, ssm.time_step_rank {heads}, "
            f"ssm.group_count {groups}: each of them was expected to divide the one before"
        )
    scan = SelectiveScan("mixed", "convolved", "projected", heads, inner // heads, groups, state)
    return (
        Linear("projected", "normed", (("ssm_in", inner + scan.input_width + heads),)),
        Convolve("convolved", "projected", "ssm_conv1d", scan.input_width, taps, first=inner),
        scan,
        Linear("out", "mixed", (("ssm_out", dim),)),
    )
