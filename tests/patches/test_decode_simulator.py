"""0013, 0014: a tiny model through the fused kernels on the modelled Orin, prompt and tokens.

`orinbench check` judges tokens and logits against the float64 reference; the model's GPU runs the
PTX that NVRTC makes for sm_87, through tinygrad's NV queues.
"""

import json
from pathlib import Path

import pytest
from tests.patches.conftest import REPOSITORY, Python, tinygrad_root

PATHS = (tinygrad_root(), *(REPOSITORY / room for room in ("benchmarks", "telemetry", "simulator")))


@pytest.mark.parametrize("quant", ["Q6_K", "Q4_K"])
def test_tiny_model_on_the_modelled_orin(python: Python, tmp_path: Path, quant: str) -> None:
    path, paths = tmp_path / "tiny.gguf", ":".join(map(str, PATHS))
    synth = ("-m", "orinbench", "synth", "--shape", "tiny", "--quant", quant, path)
    made = python(*synth, PYTHONPATH=paths)
    assert made.returncode == 0, made.stderr[-2000:]
    check = ("-m", "orinbench", "check", "-m", path, "--backend", "tinygrad:NV", "-n", "1")
    done = python(
        *("-m", "nvgpusim", "--strict", "--quiet", "--", *check, "-o", "json"),
        timeout=400,
        PYTHONPATH=paths,
        HCQDEV_WAIT_TIMEOUT_MS="300000",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = json.loads(done.stdout)
    (verdict,) = report["verdicts"]
    assert verdict["passed"]
    assert verdict["fused"]
    assert verdict["n_tokens"] == 2
    assert verdict["relative_error"] < 0.04  # what 8-bit activations leave in two layers
