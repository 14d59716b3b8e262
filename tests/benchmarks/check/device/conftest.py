"""Reports without a board."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.files_and_json import write_atomically


@pytest.fixture(scope="module", autouse=True)
def programs_of_nobody_else(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that the simulator keeps are those of this run."""
    with Patch.context() as patch:
        patch.setenv("NVGPUSIM_CACHE", str(tmp_path_factory.mktemp("programs")))
        yield


def step(result: Any, status: str = "done", reason: str | None = None) -> dict[str, Any]:
    """An entry of a report's steps."""
    return {"status": status, "seconds": 1.5, "reason": reason, "result": result}


def report(simulated: bool = False, **steps: Any) -> dict[str, Any]:
    """A report of a board on which everything is as the documents have it."""
    windows = {
        "va_end": {"end": "0xfc00000000", "works": True, "inside": True, "in_windows": False},
        "other_va_end": {"end": "0xffffe00000", "works": False, "errno": "EINVAL"},
    }
    abi = {
        "characteristics": {
            "size": 328,
            "release": "r36",
            "compute_class": 0xC7C0,
            "dma_copy_class": 0xC7B5,
            "sm_arch_sm_version": 0x807,
            "gpu_va_bit_count": 40,
            "sms": 16,
        },
        "calls": [],
        "unexpected": [],
        "windows": windows,
    }
    smoke = {
        "device": "NV",
        "arch": "sm_87",
        "interface": "TegraIface",
        "machine": "aarch64",
        "sum": True,
        "product_error": 0.0,
        "copy": True,
        "windows": True,
        "sms": 16,
        "events": True,
    }
    board = {"environment": {"board": "NVIDIA Jetson AGX Orin Developer Kit"}, "state": {}}
    return {
        "format": "tinygrad-orin device-check 3",
        "started": "2026-11-21T13:00Z",
        "simulated": simulated,
        "versions": {"orinbench": "0.1.0", "tinygrad": "0.13.0+orin.1ba415c2285d"},
        "steps": {"identity": step(board), "abi": step(abi), "smoke": step(smoke), **steps},
    }


def written(folder: Path, whole: dict[str, Any]) -> Path:
    """A report's file."""
    path = folder / "report.json"
    write_atomically(path, json.dumps(whole))
    return path
