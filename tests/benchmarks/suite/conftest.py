"""The suite on tinygrad's CPU device: a worker for the tests of a module, and its cases."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orinbench import protocol
from orinbench.plan import SuiteCase
from orinbench.process import WorkerProcess
from orinbench.suite.registry import BENCHMARKS
from orinbench.tinygrad_backend import worker_environment

Prepare = Callable[..., protocol.Prepared]


@pytest.fixture(autouse=True)
def own_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed runs of other tests are not told here."""
    monkeypatch.setattr("orinbench.suite.command.journal_directory", lambda: tmp_path / "runs")


@pytest.fixture(scope="session")
def suite_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a worker on the CPU device gets; kernels are compiled once a session."""
    folder = tmp_path_factory.mktemp("suite")
    return {
        **worker_environment("CPU", folder),
        "CACHEDB": str(folder / "cache.db"),
        "XDG_CACHE_HOME": str(folder),  # the synthetic models
    }


@pytest.fixture(scope="module")
def worker(suite_environment: dict[str, str]) -> Iterator[WorkerProcess]:
    """A worker on the CPU device."""
    with WorkerProcess(suite_environment, timeout=300) as process:
        yield process


@pytest.fixture
def prepare(worker: WorkerProcess) -> Prepare:
    """Return a function that makes a case ready in the worker."""

    def ask(case: SuiteCase, **changed: Any) -> protocol.Prepared:
        request: dict[str, Any] = {
            "benchmark": case.benchmark,
            "unit": case.unit,
            "label": case.label,
            "parameters": dict(case.parameters),
            "needs_bytes": case.needs_bytes,
            "family": case.family,
            "cost": case.cost,
            "seed": 7,
            "max_call_s": 120.0,
            "repetitions": 2,
        }
        return worker.ask(protocol.Prepare(**(request | changed)), protocol.Prepared)

    return ask


def tiny_cases(name: str, **options: str) -> list[SuiteCase]:
    """Return a benchmark's cases of the tiny selection."""
    return BENCHMARKS[name].cases(BENCHMARKS[name].preset("tiny") | options)
