"""A tinygrad device as a backend: worker processes that run `tinygrad_runner`."""

import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from orinbench.benchmark import protocol
from orinbench.benchmark.backend import BackendDiedError, FirstToken, Sample
from orinbench.benchmark.envelope import SMS
from orinbench.benchmark.plan import TINYGRAD_DEVICES, Case, LanePlan
from orinbench.benchmark.process import WorkerProcess
from orinbench.benchmark.prompt_text import prompt_text
from orinbench.errors import BenchError
from orinllm.compiler import compiler_path

# Copy buffers: beyond any cache, and small enough to leave room for the model.
CPU_COPY_BYTES = 256 << 20
GPU_COPY_BYTES = 1 << 30
COPY_REPETITIONS = 7
# Tokens of a short question.
FIRST_TOKEN_PROMPT = 32


class TinygradBackend:
    """One tinygrad device with one model.

    With `cold_start` all kernels are compiled anew: a first process fills an empty kernel cache
    (the time to its first token is the cold one), a second finds them there. Without it the
    user's own cache is used and nothing is known about what it holds. With `general` the model is
    tinygrad.llm's own network.
    """

    def __init__(
        self,
        plan: LanePlan,
        cold_start: bool,
        timeout: float,
        verbose: bool = False,
        general: bool = False,
    ) -> None:
        device = plan.lane.device
        assert device is not None
        self.plan = plan
        self.cold_start = cold_start
        self.general = general
        self._timeout = timeout
        self._verbose = verbose
        self._directory = Path(tempfile.mkdtemp(prefix="orinbench-"))
        self.environment = worker_environment(device, self._directory, plan.lane.n_threads)
        if sms := plan.llama_cases[0].sms:
            self.environment[SMS] = str(sms)
        if cold_start:
            self.environment["CACHEDB"] = str(self._directory / "cache.db")
        self._worker: WorkerProcess | None = None

    @property
    def worker(self) -> WorkerProcess:
        """The process that holds the model; started by `first_token`."""
        assert self._worker is not None, "first_token() comes before anything that needs the model"
        return self._worker

    def open(self) -> protocol.Identity:
        """Open the device in a process of its own and say what it is."""
        with self.start() as worker:
            return worker.ask(protocol.Open(), protocol.Identity)

    def first_token(self) -> FirstToken:
        """Measure the time to the first token; the process of the warm one stays."""
        cold_s = cold = None
        if self.cold_start:
            with self.start() as worker:
                cold = self._load(worker)
                cold_s = time.monotonic() - worker.started
        self._worker = self.start()
        warm = self._load(self._worker)
        warm_s = time.monotonic() - self._worker.started
        return FirstToken(self._first_prompt, warm_s, cold_s, warm, cold)

    def _load(self, worker: WorkerProcess) -> protocol.Loaded:
        load = protocol.Load(
            str(self.plan.lane.model),
            self.plan.max_context,
            self.plan.most_sequences,
            self.plan.lane.key_type,
            self._first_prompt,
            self.general,
        )
        return worker.ask(load, protocol.Loaded)

    @property
    def _first_prompt(self) -> int:
        return min(FIRST_TOKEN_PROMPT, self.plan.max_context)

    def warm_up(self, case: Case) -> protocol.WarmedUp:
        """Compile and capture what `case` needs."""
        return self.worker.ask(protocol.WarmUp(case, self._text(case, 0)), protocol.WarmedUp)

    def measure(self, case: Case, round_: int, seed: int) -> Sample:
        """Time one repetition in the worker."""
        request = protocol.Measure(case, seed, self._text(case, seed))
        return sample_of(self.worker.ask(request, protocol.Measured), round_)

    def _text(self, case: Case, seed: int) -> str:
        model = self.plan.lane.model
        assert model is not None
        return prompt_text(model, case.n_prompt, seed) if case.text else ""

    def renew(self) -> float | None:
        """Load the model into a fresh process and take its first token, which is timed."""
        self.worker.close()
        self._worker = self.start()
        self._load(self._worker)
        return time.monotonic() - self._worker.started

    def close(self) -> None:
        """End the worker and remove the private kernel cache."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> WorkerProcess:
        """Start a process on the lane's device."""
        return WorkerProcess(self.environment, self._timeout, verbose=self._verbose)


def sample_of(measured: protocol.Measured, round_: int) -> Sample:
    """Return a worker's repetition as the sample of a round."""
    return Sample(round=round_, **asdict(measured))


def worker_environment(
    device: str, directory: Path, n_threads: int | None = None
) -> dict[str, str]:
    """Return what a worker on tinygrad's `device` needs besides the environment of the bench."""
    environment = {"DEV": device, **compiler_path(directory / "bin", os.environ)}
    if n_threads is not None:
        environment["CPU_COUNT"] = str(n_threads)
    return environment


def copy_bandwidth(device: str, timeout: float) -> protocol.Bandwidth:
    """Measure the copy bandwidth of a tinygrad device, in a process whose buffers go with it.

    Raises BackendDiedError if the device cannot do it.
    """
    n_bytes = CPU_COPY_BYTES if device.startswith("CPU") else GPU_COPY_BYTES
    request = protocol.MeasureBandwidth(n_bytes, COPY_REPETITIONS)
    with (
        tempfile.TemporaryDirectory(prefix="orinbench-") as directory,
        WorkerProcess(worker_environment(device, Path(directory)), timeout) as worker,
    ):
        return worker.ask(request, protocol.Bandwidth)


def chosen_device(asked: str | None) -> str:
    """Return tinygrad's device: as asked, as DEV says, or the first that opens.

    Raises BenchError, which says why it does not, or none does.
    """
    for source, device in (("--device", asked), ("DEV", os.environ.get("DEV"))):
        if device:
            if reason := probe_device(device):
                raise BenchError(f"{source} {device}: does not open: {reason}")
            return device
    why = []
    for device in TINYGRAD_DEVICES:
        if (reason := probe_device(device)) is None:
            return device
        why.append(f"{device}: {reason}")
    raise BenchError(f"no device opens: {'; '.join(why)}")


def probe_device(device: str, timeout: float = 120.0) -> str | None:
    """Open tinygrad's `device` with an empty cache; return why it does not open, or None."""
    with tempfile.TemporaryDirectory(prefix="orinbench-") as directory:
        environment = {**worker_environment(device, Path(directory)), "CCACHE": "0"}
        try:
            with WorkerProcess(environment, timeout) as worker:
                worker.ask(protocol.Open(), protocol.Identity)
        except BackendDiedError as error:
            return str(error)
    return None
