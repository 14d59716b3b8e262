"""Tiny models through the fused kernels on the modelled Orin, prompt and tokens, watched.

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

# Without init: the matrix product reads rows of its tile that no token fills, and drops what they
# give.
WATCH = ("--sanitize", "race,sync,bounds")


@pytest.mark.parametrize(("shape", "quant"), [("tiny", "Q6_K"), ("tiny-qwen3moe", "Q4_K")])
def test_tiny_model_on_the_modelled_orin(tmp_path: Path, shape: str, quant: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, shape, quant, seed=0)
    drop = ("DEV", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    environment = {k: v for k, v in os.environ.items() if k not in drop} | {
        **{name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()},
        "CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]),
        "CACHEDB": str(tmp_path / "cache.db"),
        "HCQDEV_WAIT_TIMEOUT_MS": "300000",
    }
    report = str(tmp_path / "report.jsonl")
    check = ("-m", "orinbench", "check", "-m", path, "--backend", "tinygrad:NV", "-n", "1")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "nvgpusim",
            *WATCH,
            "--report",
            report,
            "--quiet",
            "--",
            *check,
            "-o",
            "json",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (answer,) = json.loads(done.stdout)
    (verdict,) = answer["verdicts"]
    assert verdict["passed"]
    assert verdict["fused"]
    assert verdict["n_tokens"] == 2
    assert verdict["relative_error"] < 0.04  # what 8-bit activations leave in two layers
    entries = [json.loads(line) for line in Path(report).read_text().splitlines()]
    assert [(e["faults"], e["notes"]) for e in entries] == [([], [])] * len(entries) and entries
