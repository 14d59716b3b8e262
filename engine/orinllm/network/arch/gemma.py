"""gemma2, and gemma3 without its encoder (network/vision/gemma3.py).

Source: src/models/{gemma2,gemma3}.cpp of llama.cpp 0.5.0.
"""

from collections.abc import Callable
from dataclasses import replace

from orinllm.network.arch.decoder import Heads, LayerParts, decoder, dense, heads_of, windows_of
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Attention, Rope

# Every sixth layer of Gemma 3, and every second of Gemma 2, sees everything.
_PATTERN_2, _PATTERN_3 = 2, 6
# The 27Bs, known by their layers, scale scores by the width of a head as if they shared dim.
_LAYERS_27B_2, _LAYERS_27B_3 = 46, 62
# Of Gemma 2, where the file has no keys for them.
_WINDOW_2, _SCORE_CAP_2, _LOGIT_CAP_2 = 4096, 50.0, 30.0


def gemma2(header: Header) -> Config:
    """Return the Config of a Gemma 2: scores and logits are soft-capped."""
    heads = heads_of(header)
    rope = rope_of(header, heads.head_dim, interleaved=False)
    base = header.positive("rope.freq_base_swa", header.positive("rope.freq_base", 10000.0))
    near = rope_of(header, heads.head_dim, interleaved=False, base=base)
    windows = windows_of(header, _PATTERN_2, _WINDOW_2)
    common = _common(header, windows, (near, rope), _LAYERS_27B_2)
    cap = header.number("attn_logit_softcapping", _SCORE_CAP_2)

    def attention(index: int, heads: Heads) -> Attention:
        return replace(common(index, heads), softcap=cap)

    return _config(header, attention, header.number("final_logit_softcapping", _LOGIT_CAP_2))


def gemma3(header: Header) -> Config:
    """Return the Config of a Gemma 3: windows with a rotary base of their own, norms of q and k."""
    heads = heads_of(header)
    far = rope_of(header, heads.head_dim, interleaved=False)
    base = header.positive("rope.freq_base_swa", 10000.0)
    near = rope_of(header, heads.head_dim, interleaved=False, base=base, factor=1.0)
    windows = windows_of(header, _PATTERN_3)
    common = _common(header, windows, (near, far), _LAYERS_27B_3)

    def attention(index: int, heads: Heads) -> Attention:
        return replace(common(index, heads), qk_norm=True)

    config = _config(header, attention, header.number("final_logit_softcapping", 0.0))
    return replace(config, whole_pictures=True)


def _common(
    header: Header, windows: tuple[int, ...], ropes: tuple[Rope, Rope], layers_27b: int
) -> Callable[[int, Heads], Attention]:
    """Return attention with these windows; the first of `ropes` is of layers that have one."""
    heads, dim = heads_of(header), header.count("embedding_length")
    scale = (dim // heads.heads[0]) ** -0.5 if header.n_layers == layers_27b else heads.scale

    def attention(index: int, heads: Heads) -> Attention:
        return Attention(
            heads=heads.heads[index],
            kv_heads=heads.kv_heads[index],
            head_dim=heads.head_dim,
            scale=scale,
            rope=ropes[0] if windows[index] else ropes[1],
            window=windows[index],
        )

    return attention


def _config(
    header: Header, attention: Callable[[int, Heads], Attention], logit_softcap: float
) -> Config:
    parts = LayerParts(attention, dense(header, Activation.GELU), post_norms=True)
    scale = header.count("embedding_length") ** 0.5
    return replace(decoder(header, parts), embedding_scale=scale, logit_softcap=logit_softcap)
