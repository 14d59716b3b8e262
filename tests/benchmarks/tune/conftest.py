"""A `tune` whose worker has two small kernels, with a cache and a store of its own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from orinbench.cli import orinbench
from orinbench.errors import BenchError
from orinbench.tune import events
from orinbench.tune.tuning import Entry, Target, Timing

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Said:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


Tune = Callable[..., Said]


@pytest.fixture
def tune(tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run `orinbench tune ARGUMENTS` on the CPU; an error of the bench is code 2 and its line."""
    for name in ("BEAM", "JITBEAM", "PARALLEL", "BEAM_ESTIMATE", "IGNORE_BEAM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DEV", "CPU")
    monkeypatch.setenv("CACHEDB", str(tmp_path / "cache.db"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    worker = (sys.executable, "-m", "tests.benchmarks.tune.small_worker")
    monkeypatch.setattr(events, "TUNE_WORKER", worker)

    def run(*arguments: str | Path) -> Said:
        words = ["tune", *map(str, arguments)]
        result = CliRunner().invoke(orinbench, words, standalone_mode=False)
        if isinstance(result.exception, BenchError):
            return Said(result.exception.exit_code, result.stdout, str(result.exception))
        if result.exception is not None:
            raise result.exception
        return Said(result.return_value or 0, result.stdout, result.stderr)

    return run


def entry(digest: int = 1, speedup: float = 2.0, **changes: object) -> Entry:
    """An entry of a made-up kernel."""
    values: dict[str, object] = {
        "kernel": f"{digest:064x}",
        "target": Target("CPU", "ClangRenderer", "x86_64", "0.13.0", "0" * 12),
        "level": 2,
        "name": f"r_{digest}",
        "opts": "UPCAST(0,4)",
        "default_opts": "",
        "before": Timing(100.0, 90.0, 110.0, 8),
        "after": Timing(100.0 / speedup, 80.0 / speedup, 110.0 / speedup, 8),
        "search_s": 1.5,
        "model": "llama",
        "launches": {"prompt": 1, "token": 2},
        "measured_on": "a processor",
        "measured": "2026-11-21",
    }
    return Entry(**{**values, **changes})  # type: ignore[arg-type]
