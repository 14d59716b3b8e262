"""phi3: Phi-3, 3.5, 4 and 4-mini. Source: src/models/phi3.cpp of llama.cpp 0.5.0.

The converter writes the window of the original configuration, which published models do not use
within their context; llama.cpp sets it to 0, and so does this.
"""

from dataclasses import replace

from orinllm.network.arch.decoder import LayerParts, attentions, decoder, dense, heads_of
from orinllm.network.arch.header import Header
from orinllm.network.arch.rope import rope_of
from orinllm.network.config import Config, TensorRows
from orinllm.network.layer import Activation


def phi3(header: Header) -> Config:
    """Return the Config of a Phi-3: q, k and v are one tensor, gate and up another."""
    heads = heads_of(header)
    rope = rope_of(header, heads.head_dim, interleaved=False)
    parts = LayerParts(attentions(heads, rope), dense(header, Activation.SILU))
    config = decoder(header, parts)
    matrices = dict(config.matrices)
    for index, hidden in enumerate(header.counts("feed_forward_length")):
        both = f"blk.{index}.ffn_up.weight"
        matrices[f"blk.{index}.ffn_gate"] = TensorRows(both, 0, hidden)
        matrices[f"blk.{index}.ffn_up"] = TensorRows(both, hidden, hidden)
    return replace(config, matrices=matrices)
