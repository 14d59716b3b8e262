"""The probes of the patches: on the simulated board with all of them, and models that are none."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.device_check.test_simulated import simulated

from orinbench.device_check import patch_probes
from orinbench.device_check.patch_probes import PROBES, SIZES, main

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


class FakeLlama:
    """Generates 1, 2, 3, ..., and notes the prompts."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.steps: list[int] = []
        self.blk = [SimpleNamespace(cache_kv=SimpleNamespace(nbytes=lambda: 512))] * 3

    def generate(self, ids: list[int], temperature: float) -> Iterator[int]:
        assert temperature == 0
        self.prompts.append(ids)
        yield from range(1, 100)

    def __call__(self, ids: Any, position: Any, temperature: Any) -> Any:
        assert ids.shape == (4, 1)
        self.steps.append(position.val)
        return ids


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    llama = FakeLlama()
    monkeypatch.setattr(patch_probes, "_loaded", lambda sizes, model: llama)
    return llama


def test_tokens_and_prompts_and_batches_are_timed_when_they_are_warm(llama: FakeLlama) -> None:
    sizes = SIZES["tiny"]
    said = PROBES["tokens"](sizes, "model.gguf")
    assert said["cache_bytes"] == 3 * 512 and said["token_us"] > 0
    assert llama.prompts == [list(range(1, 1 + sizes.prompt))]
    assert PROBES["prompts"](sizes, "model.gguf")["prompt_us"] > 0
    firsts = [prompt[0] for prompt in llama.prompts[1:]]
    assert len(set(firsts)) == len(firsts) == 8, "a prompt whose beginning is cached is no prompt"
    assert {len(prompt) for prompt in llama.prompts} == {sizes.prompt}
    assert PROBES["batches"](sizes, "model.gguf")["step_us"] > 0
    assert llama.steps == list(range(3 + sizes.tokens))


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
