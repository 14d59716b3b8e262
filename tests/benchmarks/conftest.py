"""Builders of results without a machine, and a llama-bench without llama.cpp."""

import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.benchmarks.orinbench_command import Build, Patch

from orinbench.measure.backends.backend import (
    BackendIdentity,
    CopyBandwidthSamples,
    FirstTokenTime,
    LoadReport,
    Sample,
    WarmUpCost,
)
from orinbench.measure.backends.tinygrad_backend import worker_environment
from orinbench.measure.environment import read_environment
from orinbench.measure.plan import Case, Lane, Plan
from orinbench.measure.results import LaneResult, RowResult, RunResult
from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic
from orinbench.synth.shapes import SHAPES, ModelShape
from orinboard.replay import TreeOnDisk, load_recording

# A busy machine is slow and not wrong.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

FAKE = Path(__file__).with_name("fake_llama_bench.py")
BOARD = Path(__file__).parents[2] / "telemetry/boards/agx-orin"


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of the tiny shape, written once a session."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_synthetic(path, "tiny", "Q6_K", 0, None)
    return path


@pytest.fixture(scope="session")
def least_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one narrow layer that is not quantized: its kernels are soon compiled."""
    path = tmp_path_factory.mktemp("models") / "least.gguf"
    with Patch.context() as patch:
        patch.setitem(SHAPES, "least", ModelShape(1, 64, 64, 2, 1, 32, 320, 128, tied=True))
        write_synthetic(path, "least", "F16", 0, None)
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_path: Path) -> ModelInfo:
    return open_model(tiny_path)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a worker on the CPU device; kernels are compiled once."""
    folder = tmp_path_factory.mktemp("suite")
    return {**worker_environment("CPU", folder), "CACHEDB": str(folder / "cache.db")}


@pytest.fixture
def fake_llama_bench(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """An executable that answers as llama-bench does; `argv.log` beside it keeps the calls.

    Its behaviour is the value of FAKE_LLAMA_BENCH; see fake_llama_bench.py.
    """
    script = tmp_path / "llama-bench"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE}" "$0" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("FAKE_LLAMA_BENCH", raising=False)
    yield script


@pytest.fixture
def bench(fake_llama_bench: Path, tiny_path: Path) -> list[str]:
    """Arguments for a run of the fake llama.cpp that takes no time."""
    flags = "--backend llama.cpp --no-check --ttft 0 --llama-bench".split()
    return ["-m", str(tiny_path), *flags, str(fake_llama_bench)]


@pytest.fixture
def fake_llama_server(fake_llama_bench: Path, monkeypatch: Patch) -> Path:
    """A llama-server beside the fake llama-bench; fake_llama_server.py says what it does."""
    script = fake_llama_bench.with_name("llama-server")
    program = FAKE.with_name("fake_llama_server.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.delenv("FAKE_LLAMA_SERVER", raising=False)
    return script


@pytest.fixture
def known_bandwidth(monkeypatch: Patch) -> None:
    """A copy bandwidth without a probe of it, which takes seconds and has a test of its own."""
    found = CopyBandwidthSamples(1 << 20, [10.0])
    monkeypatch.setattr("orinbench.measure.command.measure_copy_bandwidth", lambda *_: found)


@pytest.fixture
def orin(monkeypatch: Patch) -> Iterator[TreeOnDisk]:
    """The simulated AGX Orin on disk: it idles at 6.6 W, with clocks that may move."""
    monkeypatch.setattr("orinbench.measure.board.IDLE_SECONDS", 0.3)
    stage = TreeOnDisk()
    stage.apply_changes(load_recording(BOARD)[0].changes)
    yield stage
    stage.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    """No test writes into the user's cache or history, or is told of the user's killed runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("orinbench.measure.command.journal_directory", lambda: tmp_path / "runs")


@pytest.fixture
def no_llama_bench(monkeypatch: Patch) -> None:
    """A PATH on which no llama-bench is."""
    path = os.environ["PATH"].split(os.pathsep)
    kept = [folder for folder in path if not Path(folder, "llama-bench").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(kept))


@pytest.fixture
def recorded_run(tiny_model: ModelInfo) -> Build:
    """Return a function that builds a run of one or more backends from milliseconds a sample."""

    def lane(backend: str, milliseconds: dict[Case, list[float]], **fields: Any) -> LaneResult:
        is_llama = backend == "llama.cpp"
        plan = Lane(backend, tuple(milliseconds), tiny_model.path)
        warm_up = None if is_llama else WarmUpCost(2.0, 1.0, 0.5, 3, 38, 4, "f32", "f32")
        engine = {"build_commit": "abc", "backends": "CPU", "n_threads": 2, "n_ubatch": 512}
        rows = [
            RowResult(
                case,
                warm_up,
                [
                    Sample(
                        round=round_,
                        process=round_,
                        ns=round(value * 1e6),
                        peak_device_bytes=None if is_llama else 5 << 20,
                        peak_rss_bytes=100 << 20,
                        discarded_ns=[round(value * 2e6)] if is_llama else [],
                        engine_record=engine if is_llama else None,
                    )
                    for round_, value in enumerate(values)
                ],
            )
            for case, values in milliseconds.items()
        ]
        defaults: dict[str, Any] = {
            "identity": BackendIdentity(
                "llama.cpp abc" if is_llama else "tinygrad 0.13.0",
                "abc" if is_llama else "0.13.0",
                1 if is_llama else None,
                "CPU",
                None,
                None,
                None,
                2,
            ),
            "first_token": FirstTokenTime(32, 1.5)
            if is_llama
            else FirstTokenTime(
                *(32, 1.5, 9.0),
                LoadReport(0.2, "general", "the forward pass", None),
                LoadReport(0.2, "general", "the forward pass", None, 4.0, 37),
            ),
            "bandwidth": CopyBandwidthSamples(1 << 28, [9.0, 10.0, 11.0]),
            "check": {"passed": True, "text": f"passed, {backend}"},
        }
        return LaneResult(plan, tiny_model, rows, **(defaults | fields))

    def build(
        lanes: dict[str, dict[Case, list[float]]], repetitions: int = 6, **fields: Any
    ) -> RunResult:
        results = [
            lane(backend, milliseconds, **fields.pop(backend, {}))
            for backend, milliseconds in lanes.items()
        ]
        plan = Plan(tuple(result.plan for result in results), repetitions, 0, repetitions)
        quiet = replace(read_environment(), load_average=0.0)
        return RunResult(plan, quiet, results, "2026-11-21T12:00:00Z", **fields)

    return build
