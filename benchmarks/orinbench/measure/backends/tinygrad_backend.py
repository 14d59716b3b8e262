"""A tinygrad device as a backend: worker processes that run `tinygrad_runner`."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from orinbench.measure.backends.backend import (
    BackendError,
    BackendIdentity,
    CopyBandwidthSamples,
    FirstTokenTime,
    LoadReport,
    LoadRequest,
    Sample,
    WarmUpCost,
)
from orinbench.measure.backends.sm_limit import SMS
from orinbench.measure.backends.worker_process import WorkerProcess
from orinbench.measure.plan import Case, Lane
from orinbench.measure.prompt_text import random_prompt_text
from orinllm.gpu.host_compiler import compiler_environment

if TYPE_CHECKING:
    from orinbench.measure.backends.tinygrad_runner import TinygradRunner

# Copy buffers: beyond any cache, and small enough to leave room for the model.
CPU_COPY_BYTES = 256 << 20
GPU_COPY_BYTES = 1 << 30
COPY_REPETITIONS = 7
# Tokens of a short question.
FIRST_TOKEN_PROMPT = 32


class DeviceBackend:
    """A tinygrad device, and its worker process once one is needed; `environment` is its own."""

    def __init__(
        self,
        device: str,
        timeout: float,
        verbose: bool = False,
        n_threads: int | None = None,
        variables: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._timeout, self._verbose = timeout, verbose
        self._directory = Path(tempfile.mkdtemp(prefix="orinbench-"))
        self.environment = worker_environment(device, self._directory, n_threads)
        self.environment |= variables
        self._worker: WorkerProcess | None = None

    def start_worker(self, say: Callable[[str], None] = lambda text: None) -> WorkerProcess:
        """Start a process on the device."""
        return WorkerProcess(self.environment, self._timeout, verbose=self._verbose, say=say)

    @property
    def lazy_runner(self) -> "TinygradRunner":
        """The worker's runner; the worker is started with the first use."""
        if self._worker is None:
            self._worker = self.start_worker()
        return self._worker.runner

    def end_worker(self) -> None:
        """End the worker; the next use starts another."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def close(self) -> None:
        """End the worker and remove its files; a kept cache becomes one file."""
        self.end_worker()
        if (cache := self.environment.get("CACHEDB")) and Path(cache).exists():
            with contextlib.suppress(sqlite3.Error), sqlite3.connect(cache) as database:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                database.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TinygradBackend(DeviceBackend):
    """One tinygrad device with one model.

    With `cold_start` all kernels are compiled anew: a first process fills an empty kernel cache
    (the time to its first token is the cold one), a second finds them there. Without it the
    user's own cache is used and nothing is known about what it holds. With `general` the model is
    tinygrad.llm's own network.
    """

    def __init__(
        self,
        plan: Lane,
        cold_start: bool,
        timeout: float,
        verbose: bool = False,
        general: bool = False,
    ) -> None:
        assert plan.device is not None and plan.model is not None
        super().__init__(plan.device, timeout, verbose, plan.n_threads, plan.variables)
        self.plan, self.cold_start, self.general = plan, cold_start, general
        self._model = plan.model
        self._checked: set[Case] = set()
        self._n_prompt = min(FIRST_TOKEN_PROMPT, plan.max_context)
        if sms := plan.llama_bench_cases[0].sms:
            self.environment[SMS] = str(sms)
        if cold_start:
            self.environment["CACHEDB"] = str(self._directory / "cache.db")

    def open_and_identify(self) -> BackendIdentity:
        """Open the device in a process of its own and say what it is."""
        with self.start_worker() as worker:
            return worker.runner.open_and_identify()

    def time_first_token(self) -> FirstTokenTime:
        """Measure the time to the first token; the process of the warm one stays."""
        cold_s = cold = None
        if self.cold_start:
            cold, cold_s = self._load_in_fresh_worker()
        warm, warm_s = self._load_in_fresh_worker()
        return FirstTokenTime(self._n_prompt, warm_s, cold_s, warm, cold)

    def _load_in_fresh_worker(self) -> tuple[LoadReport, float]:
        self.end_worker()
        self._worker = self.start_worker()
        plan = self.plan
        load = LoadRequest(
            str(self._model),
            plan.max_context,
            plan.most_sequences,
            plan.key_type,
            self.general,
            None if plan.mmproj is None else str(plan.mmproj),
        )
        loaded = self._worker.runner.load_to_first_token(load, self._n_prompt)
        return loaded, time.monotonic() - self._worker.started

    def warm_up(self, case: Case) -> WarmUpCost:
        """Compile and capture what `case` needs; check its numbers, the first time."""
        first = case not in self._checked
        self._checked.add(case)
        return self.lazy_runner.warm_up(case, self._prompt_text(case, 0), first)

    def time_repetition(self, case: Case, seed: int) -> Sample:
        """Time one repetition in the worker."""
        return self.lazy_runner.time_repetition(case, seed, self._prompt_text(case, seed))

    def _prompt_text(self, case: Case, seed: int) -> str:
        asked = case.text and not case.picture
        return random_prompt_text(self._model, case.n_prompt, seed) if asked else ""

    def restart(self) -> float:
        """Load the model into a fresh process and take its first token, which is timed."""
        return self._load_in_fresh_worker()[1]


def worker_environment(
    device: str, directory: Path, n_threads: int | None = None
) -> dict[str, str]:
    """Return what a worker on tinygrad's `device` needs besides the environment of the bench."""
    environment = {"DEV": device, **compiler_environment(directory / "bin", os.environ)}
    if n_threads is not None:
        environment["CPU_COUNT"] = str(n_threads)
    return environment


def measure_copy_bandwidth(device: str, timeout: float) -> CopyBandwidthSamples:
    """Measure the copy bandwidth of a tinygrad device, in a process whose buffers go with it.

    Raises BackendError if the device cannot do it.
    """
    n_bytes = CPU_COPY_BYTES if device.startswith("CPU") else GPU_COPY_BYTES
    with DeviceBackend(device, timeout) as backend:
        return CopyBandwidthSamples(
            n_bytes, backend.lazy_runner.measure_copy_bandwidth(n_bytes, COPY_REPETITIONS)
        )


def open_failure_reason(device: str, timeout: float = 120.0) -> str | None:
    """Open tinygrad's `device` with an empty cache; return why it does not open, or None."""
    with DeviceBackend(device, timeout) as backend:
        backend.environment["CCACHE"] = "0"
        try:
            backend.lazy_runner.open_and_identify()
        except BackendError as error:
            return str(error)
    return None
