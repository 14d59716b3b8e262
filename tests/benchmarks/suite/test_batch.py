"""`batch` where a model has hand-written kernels: on a device that runs them on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from orinbench.suite.batch import _expect_near
from orinbench.suite.task import WrongResultError

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json
from dataclasses import asdict
from tests.engine import cuda_emulation
cuda_emulation.install()
from orinbench import protocol
from orinbench.suite.registry import BENCHMARKS
from orinbench.suite.task import WrongResultError
from orinbench.tinygrad_paths import DecoderPath
from orinbench.tinygrad_runner import TinygradRunner

runner = TinygradRunner()
options = {"model": "", "shape": "tiny", "quant": "F16", "batch": "2,33", "n_prompt": "2"}
two, many, prompt = BENCHMARKS["batch"].cases({**options, "n_gen": "1"})

def prepare(case):
    return runner.suite.prepare(protocol.Prepare(
        case.benchmark, case.unit, case.label, dict(case.parameters), case.needs_bytes,
        case.family, case.cost, seed=7, max_call_s=120.0, repetitions=2))

ready = [asdict(prepare(case)) for case in (two, many, prompt)]
compiled = [runner.suite.repeat(case.label, 1).kernels_compiled for case in (many, prompt, two)]

def check():
    task = BENCHMARKS["batch"].prepare(dict(two.parameters), 7)
    try: return [task.extra["decode_path"], task.check()]
    except WrongResultError as wrong: return str(wrong)

again = check()
logits, decode = DecoderPath.logits, DecoderPath.decode
DecoderPath.logits = lambda path: logits(path)[::-1]  # of one sequence as the other's
other_sequence = check()
DecoderPath.logits = logits
DecoderPath.decode = lambda path, token, at: decode(path, token, max(at - 1, 0))
other_position = check()
print(json.dumps({"ready": ready, "compiled": compiled, "again": again,
                  "wrong": [other_sequence, other_position]}))
"""


def test_a_batch_takes_the_path_that_the_model_takes(suite_environment: dict[str, str]) -> None:
    """Fused, general beyond 32 sequences, one sequence, fused again: each right, and each still
    what it was when its repetitions come; logits that are another's are wrong."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | suite_environment | {"DEV": "EMU", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    two, many, prompt = said["ready"]
    for prepared, path in ((two, "fused"), (many, "jit"), (prompt, "fused")):
        assert prepared["extra"]["decode_path"] == path
        assert "numpy" in prepared["check"] and "not checked" not in prepared["check"]
    assert said["again"] == ["fused", two["check"]]
    assert (two["extra"]["batch"], two["work"], many["work"]) == (2, 2, 33)
    # a list of hand-written kernels, five a layer, is one graph
    assert two["extra"]["kernels"] < many["extra"]["kernels"]
    assert two["extra"]["launches"] == 1
    assert "copies of token ids and positions" in two["included"]
    assert "general path" in many["included"] and "general" not in two["included"]
    assert said["compiled"] == [0, 0, 0]
    assert all(text.startswith("wrong result: off from numpy") for text in said["wrong"])


def test_of_eight_bits_each_rows_noise_is_judged() -> None:
    """Noise that rounding explains passes, far as its largest error is; one wrong row does not."""
    draw = np.random.default_rng(1)
    want = draw.standard_normal((4, 4, 5000))
    model: Any = SimpleNamespace(
        n_layers=2, tensors={"a": SimpleNamespace(type=GGMLQuantizationType.Q6_K)}
    )
    got = want + 0.04 * draw.standard_normal(want.shape)
    assert np.abs(got - want).max() > 0.15
    assert _expect_near(got, want, model).startswith("off from numpy by at most 4.")
    half: Any = SimpleNamespace(
        n_layers=2, tensors={"a": SimpleNamespace(type=GGMLQuantizationType.F16)}
    )
    with pytest.raises(WrongResultError, match=r"above the tolerance 0\.0045"):
        _expect_near(got, want, half)
    got[2, 1] = want[1, 2]
    with pytest.raises(WrongResultError, match=r"off from numpy by 1\.4 of"):
        _expect_near(got, want, model)
    got[2, 1] = np.nan
    with pytest.raises(WrongResultError, match="nan"):
        _expect_near(got, want, model)
