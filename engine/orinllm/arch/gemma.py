"""gemma3, text only. Source: src/models/gemma3.cpp of llama.cpp 0.5.0."""

from dataclasses import replace

from orinllm.arch.decoder import Heads, LayerParts, decoder, dense, heads_of
from orinllm.arch.header import Header
from orinllm.arch.rope import rope_of
from orinllm.arch.window import windows_of
from orinllm.config import Activation, Attention, Config

# Every sixth layer sees everything.
_PATTERN = 6
# The 27B, known by its layers, scales scores by the width of a head as if they shared dim.
_LAYERS_27B = 62


def gemma3(header: Header) -> Config:
    """Return the Config of a Gemma 3: windows with a rotary base of their own."""
    heads, dim = heads_of(header), header.count("embedding_length")
    windows = windows_of(header, _PATTERN)
    far = rope_of(header, heads.head_dim, interleaved=False)
    base = header.positive("rope.freq_base_swa", 10000.0)
    near = rope_of(header, heads.head_dim, interleaved=False, base=base, factor=1.0)
    scale = (dim // heads.heads[0]) ** -0.5 if header.n_layers == _LAYERS_27B else heads.scale

    def attention(index: int, heads: Heads) -> Attention:
        return Attention(
            heads=heads.heads[index],
            kv_heads=heads.kv_heads[index],
            head_dim=heads.head_dim,
            scale=scale,
            rope=near if windows[index] else far,
            window=windows[index],
            qk_norm=True,
        )

    parts = LayerParts(attention, dense(header, Activation.GELU), post_norms=True)
    softcap = header.number("final_logit_softcapping", 0.0)
    return replace(
        decoder(header, parts),
        embedding_scale=dim**0.5,
        logit_softcap=softcap,
        general_only="its logits are soft-capped" if softcap else None,
    )
