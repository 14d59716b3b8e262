"""0011: the KV cache is float16, and the logits hold."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.patches.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from orinbench.check.reference import Reference, log_softmax
from orinbench.model import open_model
from orinbench.synth import write_synthetic

PROMPT = [(7 * i) % 200 + 3 for i in range(36)]


def test_cache_is_half_and_logits_hold(
    tmp_path: Path, clang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from tinygrad import Context, Tensor, UOp, dtypes
    from tinygrad.llm.model import Transformer

    monkeypatch.setenv("PATH", f"{clang}{os.pathsep}{os.environ['PATH']}")
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, "tiny", "F16", seed=3)
    want = log_softmax(Reference(open_model(path)).logits(PROMPT, last=4))
    with Context(DEV="CPU"):
        model, _ = Transformer.from_gguf(path, max_context=64)
        # forward() ends in the sampler: keep the logits that it gets.
        start = UOp.variable("start_pos", 0, 63)
        got = []
        for position, tokens in [(0, PROMPT[:33]), *((i, [PROMPT[i]]) for i in range(33, 36))]:
            x = model.token_embd(Tensor([tokens], dtype="int32")).float()
            for block in model.blk:
                x = block(x, start.bind(position))
            logits = model.output(model.output_norm(x))[:, -1, :].float()
            got.append(log_softmax(logits.numpy().astype(np.float64).reshape(-1)))
        caches = [block.cache_kv for block in model.blk]
    assert {cache.dtype for cache in caches} == {dtypes.half}
    # 3.2e-3 measured, 2.8e-3 of it with a float32 cache too: what float16 weights cost.
    assert np.abs(np.array(got) - want).max() < 4e-3
