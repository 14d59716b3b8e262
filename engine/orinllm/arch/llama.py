"""llama and what is made of it: Mistral, SmolLM2 and 3, Mixtral, Granite.

Source: src/models/{llama,smollm3,granite}.cpp of llama.cpp 0.5.0.
"""

from dataclasses import replace

from orinllm.arch.decoder import (
    Heads,
    LayerParts,
    decoder,
    dense,
    experts_of,
    heads_of,
    mixture,
    plain_attention,
)
from orinllm.arch.header import Header
from orinllm.arch.rope import rope_of
from orinllm.config import Activation, Attention, Config, Gating
from orinllm.errors import BadInput

# In SmolLM3 every fourth layer has no positions; its file has no key for that.
_SMOLLM3_STEP = 4


def llama(header: Header) -> Config:
    """Return the Config of a llama; with experts it is a Mixtral."""
    return decoder(header, _parts(header))


def smollm3(header: Header) -> Config:
    """Return the Config of a SmolLM3."""
    with_rope = plain_attention(rope_of(header, heads_of(header).head_dim, interleaved=True))

    def attention(index: int, heads: Heads) -> Attention:
        plain = with_rope(index, heads)
        return replace(plain, rope=None) if (index + 1) % _SMOLLM3_STEP == 0 else plain

    return decoder(header, LayerParts(attention, dense(header, Activation.SILU)))


def granite(header: Header) -> Config:
    """Return the Config of a Granite, dense or of experts."""
    logit_scale = header.number("logit_scale")
    if logit_scale == 0:
        raise BadInput(
            f"{header.architecture}.logit_scale is 0; a number other than 0 was expected"
        )
    header.without({"deepstack_mapping": "a vision model's projector"})
    parts = _parts(
        header,
        scale=header.number("attention.scale", 0.0) or None,
        # Dense files turn positions off by the key that says that a scaling was trained.
        has_rope=header.architecture != "granite" or header.flag("rope.scaling.finetuned", True),
    )
    return replace(
        decoder(header, parts),
        embedding_scale=header.number("embedding_scale", 0.0) or 1.0,
        residual_scale=header.number("residual_scale", 0.0) or 1.0,
        logit_scale=1 / logit_scale,
    )


def _parts(header: Header, scale: float | None = None, has_rope: bool = True) -> LayerParts:
    head_dim = heads_of(header).head_dim
    rope = rope_of(header, head_dim, interleaved=True) if has_rope else None
    if rope is not None and 2 * len(rope.frequencies) != head_dim:
        raise BadInput(
            f"{header.architecture}.rope.dimension_count is {2 * len(rope.frequencies)}; "
            f"the whole head, {head_dim}, was expected"
        )
    if header.count("expert_count", 0, least=0):
        hidden = set(header.counts("feed_forward_length"))
        if len(hidden) > 1:
            raise BadInput(f"{header.architecture}: experts of different widths are not supported")
        experts = experts_of(header, hidden.pop(), Gating.SOFTMAX, normalized=True)
        feed_forward = mixture(experts, Activation.SILU)
    else:
        feed_forward = dense(header, Activation.SILU)
    return LayerParts(plain_attention(rope, scale=scale), feed_forward)
