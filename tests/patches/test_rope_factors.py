"""0017: rotary frequencies are divided by the file's factors, as Llama 3.1 and later need."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.benchmarks.gguf_files import write_family
from tests.patches.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from orinbench.check.reference import Reference, log_softmax
from orinbench.model import open_model

PROMPT = [(7 * i) % 200 + 3 for i in range(48)]


@pytest.mark.parametrize("factors", [True, False], ids=["factors", "none"])
def test_logits_with_rope_factors(
    tmp_path: Path, clang: Path, monkeypatch: pytest.MonkeyPatch, factors: bool
) -> None:
    from tinygrad import Context, Tensor
    from tinygrad.llm.model import Transformer

    monkeypatch.setenv("PATH", f"{clang}{os.pathsep}{os.environ['PATH']}")
    path = write_family(tmp_path / "llama.gguf", "llama", rope_freqs=factors)
    want = log_softmax(Reference(open_model(path)).logits(PROMPT, last=1)[0])
    with Context(DEV="CPU"):
        model, _ = Transformer.from_gguf(path, max_context=64)
        x = model.token_embd(Tensor([PROMPT], dtype="int32")).float()
        for block in model.blk:
            x = block(x, 0)
        logits = model.output(model.output_norm(x))[:, -1, :].float().numpy().reshape(-1)
    # Without the factors 0.6 and more; 3e-3 is what float16 weights and activations cost here.
    assert np.abs(log_softmax(logits.astype(np.float64)) - want).max() < 1e-2
