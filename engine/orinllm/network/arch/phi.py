"""phi3: Phi-3, 3.5, 4 and 4-mini. Source: src/models/phi3.cpp of llama.cpp 0.5.0.

The converter writes the window of the original configuration, which published models do not use
within their context; llama.cpp sets it to 0, and so does this.
"""

from dataclasses import replace

from orinllm.network.arch.decoder import (
    LayerMaker,
    decoder_config,
    dense_feed_forwards,
    layer_attentions,
    read_head_counts,
)
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import read_rope
from orinllm.network.config import Config, TensorRows
from orinllm.network.layer import Activation


def phi3_config(header: Header) -> Config:
    """Return the Config of a Phi-3: q, k and v are one tensor, gate and up another."""
    heads = read_head_counts(header)
    rope = read_rope(header, heads.head_dim, interleaved=False)
    maker = LayerMaker(layer_attentions(heads, rope), dense_feed_forwards(header, Activation.SILU))
    config = decoder_config(header, maker)
    matrices = dict(config.matrices)
    for index, hidden in enumerate(header.whole_numbers_by_layer("feed_forward_length")):
        both = f"blk.{index}.ffn_up.weight"
        matrices[f"blk.{index}.ffn_gate"] = TensorRows(both, 0, hidden)
        matrices[f"blk.{index}.ffn_up"] = TensorRows(both, hidden, hidden)
    return replace(config, matrices=matrices)
