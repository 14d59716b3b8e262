"""How far apart two logits are where the fused kernels and the general path decode differently.

    DEV=CUDA python tests/patches/greedy_gap.py MODEL [TOKENS] [--float64]

The fused path decodes greedily; the general path, and with --float64 a float64 LLaMA, then see the
same tokens. Prints, for each token on which the two paths differ, the general path's gap between
the two candidates and the largest difference of any logit; then the errors, relative to the spread
of the logits. Exit status 1 if a gap is wider than twice the difference.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tinygrad.llm.model import Transformer

from orinbench.greedy import _fused_replay, _jit_replay
from orinbench.model import open_model
from orinbench.reference import Reference


def main() -> int:
    """Return the exit status."""
    path = Path(sys.argv[1])
    n = int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2].isdigit() else 256
    model, _ = Transformer.from_gguf(path, max_context=n + 8)
    tokens = [5]
    list(itertools.islice(model.generate(tokens), n))

    def logits(replay: object) -> np.ndarray:
        return np.stack([replay(t, i) for i, t in enumerate(tokens[:-1])])  # type: ignore[operator]

    found = {"fused": logits(_fused_replay(model.fused))}
    found["general"] = logits(_jit_replay(model))
    if "--float64" in sys.argv:
        found["float64"] = Reference(open_model(path)).logits(tokens[:-1], last=n)
    fused, general = found["fused"], found["general"]
    spread = general.std(axis=-1).mean()
    assert (fused.argmax(-1) == tokens[1:]).all(), "the fused path decodes what its logits say"
    wide = 0
    for i in np.flatnonzero(general.argmax(-1) != fused.argmax(-1)):
        a, b = int(fused[i].argmax()), int(general[i].argmax())
        gap, error = general[i, b] - general[i, a], np.abs(fused[i] - general[i]).max()
        wide += gap > 2 * error
        exact = ""
        if "float64" in found:
            exact = f", float64 has {found['float64'][i, b] - found['float64'][i, a]:+.4f}"
        print(f"token {i}: {a} instead of {b}, gap {gap:.4f}, logits differ by {error:.4f}{exact}")
    for one, other in itertools.combinations(found, 2):
        difference = found[one] - found[other]
        print(
            f"{one} - {other}: rms {np.sqrt((difference**2).mean()) / spread:.2e} of the spread "
            f"{spread:.3f}, at most {np.abs(difference).max():.4f}, "
            f"{(found[one].argmax(-1) == found[other].argmax(-1)).sum()} of {n} first choices alike"
        )
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
