"""Tiny models through the fused kernels on the modelled Orin, prompt and tokens, under --strict.

`orinbench check` judges tokens and logits against the float64 reference; the model's GPU runs the
PTX that NVRTC makes for sm_87, through tinygrad's NV queues.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patches.conftest import COMPILERS, CUDA_HEADER, wheel_file

from orinbench.synth import write_synthetic


def environment(folder: Path) -> dict[str, str]:
    """The environment of a program on the modelled board: compilers, a cache of its own."""
    drop = ("DEV", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    return {k: v for k, v in os.environ.items() if k not in drop} | {
        **{name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()},
        "CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]),
        "CACHEDB": str(folder / "cache.db"),
        "HCQDEV_WAIT_TIMEOUT_MS": "300000",
    }


@pytest.mark.parametrize(("shape", "quant"), [("tiny", "Q6_K"), ("tiny-qwen3moe", "Q4_0")])
def test_tiny_model_on_the_modelled_orin(tmp_path: Path, shape: str, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, shape, quant, seed=0)
    check = ("-m", "orinbench", "check", "-m", path, "--backend", "tinygrad:NV", "-n", "1")
    done = subprocess.run(
        [sys.executable, "-m", "nvgpusim", "--strict", "--quiet", "--", *check, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = json.loads(done.stdout)
    (verdict,) = report["verdicts"]
    assert verdict["passed"]
    assert verdict["fused"]
    assert verdict["n_tokens"] == 2
    assert verdict["relative_error"] < 0.04  # what 8-bit activations leave in two layers


DRAWS = """
import numpy as np
from tests.engine import chi_square
from orinllm.sampling import Sampling, sample

chi_square.SLOTS = 2
for size, how in (
    (1003, Sampling(seed=5)),
    (3001, Sampling(top_k=0, min_p=0.0, top_p=0.9, seed=4)),
):
    logits = np.asarray(np.random.default_rng(7).normal(0, 2.0, size), np.float32)
    drawn = chi_square.draw("NV", logits, how, range(1, 5))
    want = [sample(logits, how, [], position) for position in range(1, 5)]
    assert drawn.tolist() == want, (drawn, want)
print("as on the host")
"""


def test_tokens_drawn_on_the_modelled_orin(tmp_path: Path) -> None:
    """The PTX of sm_87 draws the host's tokens: from a list, and from all of a row."""
    program = (sys.executable, "-c", DRAWS)
    done = subprocess.run(
        [sys.executable, "-m", "nvgpusim", "--strict", "--quiet", "--", *program],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(tmp_path) | {"DEV": "NV"},
        check=False,
    )
    assert done.stdout == "as on the host\n", done.stdout + done.stderr[-2000:]
    assert done.returncode == 0
