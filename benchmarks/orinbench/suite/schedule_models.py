"""The fixed models whose scheduling is timed: inputs, the graph over them, and numpy's answer.

This module imports tinygrad; see `tinygrad_runner`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.llm.model import Transformer

from orinbench.model import open_model
from orinbench.reference import Reference
from orinbench.suite.arrays import tensor
from orinbench.suite.gpt2_model import SHAPES, NumpyGpt2, TinygradGpt2, random_weights
from orinbench.synth import cached_synthetic

_TOKENS = [3, 141, 592, 65]


@dataclass(frozen=True)
class Model:
    """`graph` builds an unrealized tensor anew; `answer` is what it must hold."""

    graph: Callable[[], Any]
    answer: Any
    tolerance: float


def llama() -> Model:
    """Two layers of a llama over packed Q6_K weights: four tokens to the last one's logits."""
    path = cached_synthetic("tiny", "Q6_K", 0)
    transformer, _ = Transformer.from_gguf(path, max_context=64)
    ids = Tensor([_TOKENS], dtype="int").realize()
    for block in transformer.blk:  # allocated once, and no part of what is timed
        block._init_state(Tensor.empty(1, 1, transformer.token_embd.weight.shape[1]))
        block.cache_kv.realize()
        block.freqs_cis.realize()

    def graph() -> Any:
        x = transformer.token_embd(ids).float()
        for block in transformer.blk:
            x = block(x, 0)
        return transformer.output(transformer.output_norm(x))[:, -1, :].float()

    return Model(graph, Reference(open_model(path)).logits(_TOKENS), 3e-2)


def gpt2_block() -> Model:
    """A layer of GPT-2's real width, one token at position 0."""
    shape = SHAPES["124m"]
    weights = random_weights(type(shape)(1, shape.n_embd, shape.n_heads, 8, 8), 0)
    narrow = type(shape)(1, shape.n_embd, shape.n_heads, 8, 8)
    model = TinygradGpt2(narrow, weights, "float32")
    values = np.random.default_rng(0).standard_normal((1, shape.n_embd), np.float32)
    x = tensor(values, "float32")
    answer = NumpyGpt2(narrow, weights).block(0, values.astype(np.float64))
    return Model(lambda: model.block(0, x, 0), answer, 1e-3)


MODELS: dict[str, Callable[[], Model]] = {"llama": llama, "gpt2_block": gpt2_block}
