import numpy as np
import pytest

from orinbench.model import open_model
from orinbench.reference import Reference

PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]


@pytest.mark.parametrize("quant", ["Q6_K", "Q4_K_M", "Q8_0", "F16"])
def test_fused(emulated, synthetic, quant):
    path = synthetic("tiny", quant)
    ex = emulated(path)
    ref = Reference(open_model(path))
    tokens = PROMPT[:5]
    ex.fill(tokens, 0, 4)
    ex.step(tokens[4], 4)
    for _ in range(3):
        got = ex.logits().astype(float)
        tok = ex.token()
        want = ref.logits(tokens)[-1]
        err = np.linalg.norm(got - want) / np.linalg.norm(want)
        print(quant, err, tok, want.argmax())
        assert err < 0.04
        assert tok == got.argmax()
        tokens.append(tok)
        ex.step()
    ex.fill(PROMPT, 0, 69)
    ex.step(PROMPT[69], 69)
    got, want = ex.logits().astype(float), ref.logits(PROMPT)[-1]
    err = np.linalg.norm(got - want) / np.linalg.norm(want)
    print(quant, "prompt", err)
    assert err < 0.02
