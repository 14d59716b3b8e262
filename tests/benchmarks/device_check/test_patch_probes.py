"""The programs for a GPU: on the simulated board, with a model, and what they leave of an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.benchmarks.device_check.test_simulated import simulated

from orinbench.device_check.check import PROBE
from orinbench.device_check.gpu import SIZES, Found, Work
from orinbench.device_check.probe import PROBES, main
from orinbench.shapes import shape_named
from orinbench.synth import write_synthetic
from orinllm.compiler import compiler_path

# One process for all; a device that has failed is the last.
ALL = """
import json, sys
from orinbench.device_check.check import PROBE
from orinbench.device_check.gpu import Work
from orinbench.device_check.probe import PROBES
names = ("computes", "copies", "matvec", "odd_view", "growing_local_memory", "wrapped_arguments")
found = {name: PROBES[name](Work("tiny")) for name in (*names, "freed_after_a_fault")}
with open(sys.argv[1], "w") as file: json.dump(found, file)
"""


def test_with_all_patches_nothing_is_wrong(tmp_path: Path) -> None:
    variables = {"DEV": "TEGRA+NV", "HCQDEV_WAIT_TIMEOUT_MS": "300000"}
    out = tmp_path / "found.json"
    done = simulated(sys.executable, "-c", ALL, out, variables=variables)
    assert out.exists(), done.err
    found = json.loads(out.read_text())
    assert found.pop("computes") == {"sum": True}
    assert set(found.pop("copies")) == {"copy_in_gb_s", "copy_out_gb_s"}
    assert found.pop("matvec")["matvec_us"] > 0
    assert found == {
        name: {"wrong": 0}
        for name in ("odd_view", "growing_local_memory", "wrapped_arguments", "freed_after_a_fault")
    }


def test_the_bytes_of_a_models_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad import Context

    for name, value in compiler_path(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)
    path, sizes, tiny = tmp_path / "tiny.gguf", SIZES["tiny"], shape_named("tiny")
    write_synthetic(path, "tiny", "Q6_K", seed=1)
    with Context(DEV="CPU"):
        said = PROBES["cache"](Work("tiny", model=str(path)))
    halves = 2 * tiny.n_layers * tiny.n_kv_heads * sizes.context * tiny.head_dim
    assert said == {"cache_bytes": 2 * halves}


@pytest.mark.parametrize("error", ["the GPU\nhas stopped", None])
def test_an_exception_is_what_a_program_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    def computes(work: Work) -> Found:
        if error:
            raise RuntimeError(error)
        return {"sum": True}

    monkeypatch.setitem(PROBES, "computes", computes)
    out = tmp_path / "found.json"
    assert main(str(out), "computes", "tiny", "-", "-") == bool(error)
    failed = {"failed": "RuntimeError: the GPU has stopped"}
    assert json.loads(out.read_text()) == (failed if error else {"sum": True})


def test_a_program_of_its_own_without_a_board_says_why(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, *PROBE, str(out), "computes", "tiny", "-", "-"]
    environment = {"DEV": "TEGRA+NV", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 1 and "failed" in json.loads(out.read_text())
