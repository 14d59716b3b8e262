"""Fixtures of the patches' tests: the tree under test, compilers from wheels, subprocesses.

The tests run against the tinygrad that Python imports. `tools/series verify` sets SERIES_TREE to
the tree that it means, and an installed tinygrad that came first would make its verdict worthless.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patches.tegra.copies import LATE, Copies
from tests.patches.tegra.device import PRELUDE, Run, Tegra

from orinllm.gpu.host_compiler import try_write_clang_script

COMPILERS = {
    "NVRTC_PATH": "cuda_nvrtc/lib/libnvrtc.so.*",
    "NVJITLINK_PATH": "nvjitlink/lib/libnvJitLink.so.*",
}
CUDA_HEADER = "cuda_runtime/include/cuda_fp16.h"
REPOSITORY = Path(__file__).resolve().parents[2]


def tinygrad_root() -> Path:
    """The folder that holds the `tinygrad` package under test, found without importing it."""
    spec = importlib.util.find_spec("tinygrad")
    assert spec is not None and spec.origin is not None, "tinygrad is not installed"
    return Path(spec.origin).resolve().parents[1]


def modelled() -> dict[str, str]:
    """Variables of tinygrad on the modelled board."""
    return {
        "DEV": "TEGRA+NV",
        "HCQDEV_WAIT_TIMEOUT_MS": "20000",
        "PYTHONPATH": f"{tinygrad_root()}:{REPOSITORY / 'simulator'}",
    }


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("CUDA_PATH", str(wheel_file(CUDA_HEADER).parents[1]))
    wanted = os.environ.get("SERIES_TREE")
    if wanted and tinygrad_root() != Path(wanted).resolve():
        raise pytest.UsageError(f"tinygrad comes from {tinygrad_root()}, not from {wanted}")


@pytest.fixture(autouse=True)
def no_compile_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a patch's test compile afresh; other rooms' tests keep the cache."""
    from tinygrad.helpers import Context

    monkeypatch.setenv("CCACHE", "0")
    with Context(CCACHE=0):
        yield


def wheel_file(pattern: str) -> Path:
    """A file of one of the NVIDIA wheels, e.g. 'cuda_nvrtc/lib/libnvrtc.so.*'."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [path for place in places for path in sorted(Path(place).glob(pattern))]
    assert found, f"nvidia/{pattern}: missing, install the extra cuda-tools"
    return found[0]


@pytest.fixture(scope="session")
def clang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `clang`: the one of the ziglang wheel, for tinygrad's CPU device."""
    folder = tmp_path_factory.mktemp("clang")
    assert try_write_clang_script(folder), "ziglang: missing, install the extra cpu"
    return folder


@pytest.fixture(scope="session")
def settings(clang: Path) -> dict[str, str]:
    """An environment for tinygrad in a fresh process: compilers at hand."""
    drop = ["DEV", "BEAM", "DEBUG", "CACHEDB", "PARALLEL", "CCACHE"]
    # tinygrad is not what coverage is of, and the tracer doubles the time of a simulated launch.
    drop += ["COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"]
    return {k: v for k, v in os.environ.items() if k not in drop} | {
        "PATH": f"{clang}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tinygrad_root()),
    }


@pytest.fixture
def environment(settings: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """That with empty caches."""
    return settings | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python(environment: dict[str, str], tmp_path: Path) -> Python:
    """Run Python in that environment: python(*args, stdin=..., timeout=..., give_up=..., **vars).

    A process that writes `give_up` to stderr is known to hang, and ended at once.
    """

    def run(
        *args: str | Path,
        stdin: str = "",
        timeout: float = 120,
        give_up: str | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        paths = _streams(tmp_path, stdin)
        with (
            paths[0].open() as fin,
            paths[1].open("w") as fout,
            paths[2].open("w") as ferr,
            subprocess.Popen(
                [sys.executable, *map(str, args)],
                stdin=fin,
                stdout=fout,
                stderr=ferr,
                cwd=tmp_path,
                env=environment | variables,
                start_new_session=True,
            ) as process,
        ):
            return _ended(process.poll, process.pid, paths, timeout, give_up)

    return run


def _streams(folder: Path, stdin: str = "") -> list[Path]:
    """Files for a process's standard streams."""
    paths = [folder / f"python.{name}" for name in ("stdin", "stdout", "stderr")]
    for path, text in zip(paths, (stdin, "", ""), strict=True):
        path.write_text(text)
    return paths


def _ended(
    poll: Callable[[], int | None], pid: int, paths: list[Path], timeout: float, give_up: str | None
) -> subprocess.CompletedProcess[str]:
    """Wait for a process with a session of its own, and end it when it is known to hang."""
    deadline, killed = time.monotonic() + timeout, ""
    while (status := poll()) is None:
        err = paths[2].read_text()
        if not killed and ((give_up and give_up in err) or time.monotonic() > deadline):
            # The workers of a pool must go too: they are of its session.
            os.killpg(pid, signal.SIGKILL)
            killed = f"killed after {timeout} s or at '{give_up}': {err[-2000:]}"
        time.sleep(0.05)
    if killed:
        pytest.fail(killed)
    return subprocess.CompletedProcess([], status, *(path.read_text() for path in paths[1:]))


@pytest.fixture(scope="session")
def copies(settings: dict[str, str]) -> Iterator[Copies]:
    """Copies of a process that has imported tinygrad for the model."""
    copied = Copies(settings | modelled())
    yield copied
    copied.close()


@pytest.fixture
def tegra(python: Python, copies: Copies, environment: dict[str, str], tmp_path: Path) -> Tegra:
    """Run a script on the model: tegra(script, *options, clean=True, seconds=570, **env).

    In a copy of a process with the modules, or, with a variable that they read, in one that starts.

    With `clean`, the script has to succeed without a GPU error and without leaving anything open.
    """

    def run(
        script: str,
        *options: str,
        clean: bool = True,
        seconds: float = 570,
        give_up: str | None = None,
        **variables: str,
    ) -> Run:
        path, report = tmp_path / "script.py", tmp_path / "report.jsonl"
        path.write_text(PRELUDE + script)
        command = ["-m", "nvgpusim", "--quiet", "--report", str(report), *options, "--", str(path)]
        settings = modelled() | variables
        if variables.keys() <= LATE:
            paths = _streams(tmp_path)
            pid = copies.start(command[2:], tmp_path, environment | settings, paths)
            done = _ended(copies.poll, pid, paths, seconds, give_up)
        else:
            done = python(*command, timeout=seconds, give_up=give_up, **settings)
        said: dict[str, Any] = {}
        for line in done.stdout.splitlines():
            if line.startswith("SAYS "):
                said |= json.loads(line[5:])
        lines = report.read_text().splitlines() if report.exists() else []
        entry = json.loads(lines[0]) if lines else {"faults": [], "notes": [], "leaks": []}
        result = Run(said, done.stderr, done.returncode, entry, done.stdout)
        if clean:
            assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
            found = (entry["faults"], result.notes)
            assert found == ([], []), found
            assert entry["leaks"] == []
        return result

    return run
