"""llama and what is made of it: Mistral and Ministral, SmolLM2 and 3, Mixtral, Granite.

Source: src/models/{llama,mistral3,smollm3,granite,granite-hybrid}.cpp of llama.cpp 0.5.0.
"""

from dataclasses import replace

from orinllm.errors import BadInput
from orinllm.network.arch.decoder import (
    SHARED,
    FeedForward,
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    layer_attentions,
    read_experts,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.nemotron_h import mamba2_operations
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Gating, QueryTemperature

# In SmolLM3 every fourth layer has no positions; its file has no key for that.
_SMOLLM3_STEP = 4


def llama_config(header: Header) -> Config:
    """Return the Config of a llama; with experts it is a Mixtral."""
    return decoder_config(header, _layer_maker(header))


def mistral3_config(header: Header) -> Config:
    """Return the Config of a Ministral 3: queries beyond the original context are scaled."""
    maker, scale = _layer_maker(header), header.number("attention.temperature_scale", 0.0)
    if scale == 0:
        return decoder_config(header, maker)
    trained = header.whole_number("context_length")
    length = header.whole_number("rope.scaling.original_context_length", trained)
    scaled = [replace(one, temperature=QueryTemperature(scale, length)) for one in maker.attentions]
    return decoder_config(header, replace(maker, attentions=scaled))


def smollm3_config(header: Header) -> Config:
    """Return the Config of a SmolLM3."""
    heads = read_head_counts(header)
    layers = layer_attentions(heads, read_rope(header, heads.head_dim, interleaved=True))
    step = slice(_SMOLLM3_STEP - 1, None, _SMOLLM3_STEP)
    layers[step] = [replace(one, rope=None) for one in layers[step]]
    return decoder_config(header, LayerMaker(layers, dense_feed_forwards(header, Activation.SILU)))


def granite_config(header: Header) -> Config:
    """Return the Config of a Granite, dense or of experts."""
    logit_scale = header.number("logit_scale")
    if logit_scale == 0:
        raise BadInput(
            f"{header.architecture}.logit_scale is 0; a number other than 0 was expected"
        )
    header.refuse_keys({"deepstack_mapping": "a vision model's projector"})
    maker = _layer_maker(
        header,
        scale=header.number("attention.scale", 0.0) or None,
        # Dense files turn positions off by the key that says that a scaling was trained.
        has_rope=header.architecture == "granitemoe" or header.flag("rope.scaling.finetuned", True),
    )
    if header.architecture == "granitehybrid":
        kv_heads, net = read_head_counts(header, least=0).kv_heads, mamba2_operations(header)
        maker = replace(maker, mixers=[None if n else net for n in kv_heads])
    maker = replace(maker, residual_scale=header.number("residual_scale", 0.0) or 1.0)
    return replace(
        decoder_config(header, maker),
        embedding_scale=header.number("embedding_scale", 0.0) or 1.0,
        logit_scale=1 / logit_scale,
    )


def _layer_maker(header: Header, scale: float | None = None, has_rope: bool = True) -> LayerMaker:
    heads = read_head_counts(header, least=int(header.architecture != "granitehybrid"))
    rope = read_rope(header, heads.head_dim, interleaved=True) if has_rope else None
    if rope is not None and 2 * len(rope.frequencies) != heads.head_dim:
        raise BadInput(
            f"{header.architecture}.rope.dimension_count is {2 * len(rope.frequencies)}; "
            f"the whole head, {heads.head_dim}, was expected"
        )
    layers = layer_attentions(heads, rope, scale=scale or heads.score_scale)
    if header.whole_number("expert_count", 0, least=0):
        hidden = set(header.whole_numbers_by_layer("feed_forward_length"))
        if len(hidden) > 1:
            raise BadInput(f"{header.architecture}: experts of different widths are not supported")
        is_granite = header.architecture.startswith("granite")
        reads, shared = SHARED if is_granite else (), "expert_shared_feed_forward_length"
        width = hidden.pop()
        experts = read_experts(header, width, Gating.SOFTMAX, normalized=True, reads=reads)
        wide = header.whole_number(shared, 0, least=0) if is_granite else 0
        part = FeedForward(Activation.SILU, 0, experts, wide)
        return LayerMaker(layers, [part] * header.n_layers)
    return LayerMaker(layers, dense_feed_forwards(header, Activation.SILU))
