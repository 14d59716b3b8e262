"""gemma2, and gemma3 without its encoder (network/vision/gemma3.py).

Source: src/models/{gemma2,gemma3}.cpp of llama.cpp 0.5.0.
"""

from dataclasses import replace

from orinllm.network.arch.decoder import (
    HeadCounts,
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    layer_attentions,
    read_head_counts,
    read_windows,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import Config
from orinllm.network.layer import Activation, Attention

# Every sixth layer of Gemma 3, and every second of Gemma 2, sees everything.
_PATTERN_2, _PATTERN_3 = 2, 6
# The 27Bs, known by their layers, scale scores by the width of a head as if they shared dim.
_LAYERS_27B_2, _LAYERS_27B_3 = 46, 62
# Of Gemma 2, where the file has no keys for them.
_WINDOW_2, _SCORE_CAP_2, _LOGIT_CAP_2 = 4096, 50.0, 30.0


def gemma2_config(header: Header) -> Config:
    """Return the Config of a Gemma 2: scores and logits are soft-capped."""
    heads, windows = read_head_counts(header), read_windows(header, _PATTERN_2, _WINDOW_2)
    far = read_rope(header, heads.head_dim, interleaved=False)
    base = header.positive_number(
        "rope.freq_base_swa", header.positive_number("rope.freq_base", 10000.0)
    )
    near = read_rope(header, heads.head_dim, interleaved=False, base=base)
    scale = _score_scale(header, heads, _LAYERS_27B_2)
    cap = header.number("attn_logit_softcapping", _SCORE_CAP_2)
    layers = layer_attentions(heads, far, windows, near, scale=scale, softcap=cap)
    return _gemma_config(header, layers, header.number("final_logit_softcapping", _LOGIT_CAP_2))


def gemma3_config(header: Header) -> Config:
    """Return the Config of a Gemma 3: windows with a rotary base of their own, norms of q and k."""
    heads, windows = read_head_counts(header), read_windows(header, _PATTERN_3)
    far = read_rope(header, heads.head_dim, interleaved=False)
    base = header.positive_number("rope.freq_base_swa", 10000.0)
    near = read_rope(header, heads.head_dim, interleaved=False, base=base, factor=1.0)
    scale = _score_scale(header, heads, _LAYERS_27B_3)
    layers = layer_attentions(heads, far, windows, near, scale=scale, qk_norm=True)
    config = _gemma_config(header, layers, header.number("final_logit_softcapping", 0.0))
    return replace(config, whole_pictures=True)


def _score_scale(header: Header, heads: HeadCounts, layers_27b: int) -> float:
    dim = header.whole_number("embedding_length")
    whole = header.n_layers == layers_27b
    return float((dim // heads.heads[0]) ** -0.5) if whole else heads.score_scale


def _gemma_config(header: Header, layers: list[Attention], logit_softcap: float) -> Config:
    maker = LayerMaker(layers, dense_feed_forwards(header, Activation.GELU), post_norms=True)
    scale = header.whole_number("embedding_length") ** 0.5
    return replace(
        decoder_config(header, maker), embedding_scale=scale, logit_softcap=logit_softcap
    )
