"""Reports without a board, and small series."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orinbench.jsonfile import write_whole


@pytest.fixture(scope="module", autouse=True)
def programs_of_nobody_else(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that the simulator keeps are those of this run."""
    with pytest.MonkeyPatch.context() as patch:
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
        "format": "tinygrad-orin device-check 2",
        "started": "2026-11-21T13:00Z",
        "simulated": simulated,
        "versions": {"orinbench": "0.1.0", "tinygrad": "0.13.0+orin.1ba415c2285d"},
        "steps": {"identity": step(board), "abi": step(abi), "smoke": step(smoke), **steps},
    }


def written(folder: Path, whole: dict[str, Any]) -> Path:
    """A report's file."""
    path = folder / "report.json"
    write_whole(path, json.dumps(whole))
    return path


def checkout(folder: Path, patches: Mapping[str, str], over: str | None = None) -> Path:
    """A tree as `tools/series checkout` makes it; each patch adds a file, `over` changes 0001's."""
    package = folder / "tinygrad"
    package.mkdir(parents=True)

    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(folder), *author, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init", "-q")
    (package / "__init__.py").touch()
    git("add", "-A")
    git("commit", "-q", "-m", "base")
    git("tag", "base")
    for number, needs in patches.items():
        changed = "0001" if number == over else number
        with (package / f"p{changed}.py").open("a") as file:
            file.write(f"{number}\n")
        trailers = f"Depends-on: {needs}\n" * bool(needs) + f"Patch-Name: {number}-x.patch"
        git("add", "-A")
        git("commit", "-q", "-m", f"fix {number}\n\nwhy\n\n{trailers}")
    return folder
