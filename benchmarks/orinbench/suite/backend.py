"""A tinygrad device as the suite's backend: one worker process for one benchmark."""

import functools
import shutil
import tempfile
from pathlib import Path

from orinbench import protocol
from orinbench.plan import SuiteCase
from orinbench.process import WorkerProcess
from orinbench.samples import FirstToken, Identity, LeftOutError, Sample, WarmUp
from orinbench.tinygrad_backend import identity_of, sample_of, worker_environment


class SuiteBackend:
    """The worker of one device; `max_call_s` and `repetitions` are what `protocol.Prepare` says."""

    def __init__(
        self,
        device: str,
        seed: int,
        repetitions: int,
        max_call_s: float,
        timeout: float,
        verbose: bool = False,
    ) -> None:
        self._seed = seed
        self._repetitions = repetitions
        self._max_call_s = max_call_s
        self._directory = Path(tempfile.mkdtemp(prefix="orinbench-"))
        environment = worker_environment(device, self._directory)
        self._start = functools.partial(WorkerProcess, environment, timeout, verbose=verbose)
        self._worker = self._start()

    def open(self) -> Identity:
        """Open the device."""
        return identity_of(self._worker.ask(protocol.Open(), protocol.Opened))

    def first_token(self) -> FirstToken:
        """Raise: there is no model."""
        raise AssertionError("the suite's lanes have no model")

    def warm_up(self, case: SuiteCase) -> WarmUp:
        """Make a case ready and check its result; raises LeftOutError."""
        request = protocol.Prepare(
            benchmark=case.benchmark,
            unit=case.unit,
            label=case.label,
            parameters=dict(case.parameters),
            needs_bytes=case.needs_bytes,
            family=case.family,
            cost=case.cost,
            seed=self._seed,
            max_call_s=self._max_call_s,
            repetitions=self._repetitions,
        )
        prepared = self._worker.ask(request, protocol.Prepared)
        if prepared.left_out is not None:
            raise LeftOutError(prepared.left_out)
        return WarmUp(
            seconds=prepared.seconds,
            repetition_s=prepared.repetition_s,
            compile_s=prepared.compile_s,
            kernels_compiled=prepared.kernels_compiled,
            kernels_per_token=None,
            launches_per_token=None,
            prepared=prepared,
        )

    def measure(self, case: SuiteCase, round_: int, seed: int) -> Sample:
        """Time one repetition in the worker."""
        measured = self._worker.ask(protocol.Repeat(case.label, seed), protocol.Measured)
        return sample_of(measured, round_)

    def renew(self) -> float | None:
        """Start a worker anew; its cases must be made ready again."""
        self._worker.close()
        self._worker = self._start()
        return None

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
        shutil.rmtree(self._directory, ignore_errors=True)
