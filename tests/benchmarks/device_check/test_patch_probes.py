"""The probes of the patches: on the simulated board with all of them, and models that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.device_check.test_simulated import simulated

from orinbench.device_check.patch_probes import PROBES, SIZES, main
from orinbench.shapes import shape_named
from orinbench.synth import write_synthetic
from orinllm.compiler import compiler_path

# One process for all; a device that has failed is the last.
ALL = """
import json, sys
from orinbench.device_check.patch_probes import PROBES, SIZES
names = ("opens", "copies", "matvec", "odd_view", "growing_local_memory", "wrapped_arguments")
found = {name: PROBES[name](SIZES["tiny"], "-") for name in names}
found["freed_after_a_fault"] = PROBES["freed_after_a_fault"](SIZES["tiny"], "-")
with open(sys.argv[1], "w") as file: json.dump(found, file)
"""


def test_with_all_patches_nothing_is_wrong(tmp_path: Path) -> None:
    variables = {"DEV": "TEGRA+NV", "HCQDEV_WAIT_TIMEOUT_MS": "300000"}
    out = tmp_path / "found.json"
    done = simulated(sys.executable, "-c", ALL, out, variables=variables)
    assert out.exists(), done.err
    found = json.loads(out.read_text())
    assert found.pop("opens") == {"sum": True}
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
        said = PROBES["cache"](sizes, str(path))
    halves = 2 * tiny.n_layers * tiny.n_kv_heads * sizes.context * tiny.head_dim
    assert said == {"cache_bytes": 2 * halves}


def test_an_exception_is_what_a_probe_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> dict[str, Any]:
        raise RuntimeError("the GPU\nhas stopped")

    monkeypatch.setitem(PROBES, "opens", closed)
    out = tmp_path / "found.json"
    main((str(out), "opens", "tiny", "-"))
    assert json.loads(out.read_text()) == {"error": "RuntimeError: the GPU has stopped"}


def test_a_program_of_its_own_without_a_board_says_why(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "orinbench.device_check.patch_probes"]
    command += [str(out), "opens", "tiny", "-"]
    environment = {"DEV": "TEGRA+NV", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    assert "error" in json.loads(out.read_text())
