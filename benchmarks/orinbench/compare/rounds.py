"""Two revisions measured in one run, as two backends are: rounds of fresh processes of both.

A process of each is a pair, so what a process is lucky with is noise, and no verdict.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orinbench.benchmark.backend import BackendDiedError, FirstToken
from orinbench.benchmark.plan import Case, Lane, LanePlan, Plan
from orinbench.benchmark.process import WorkerProcess
from orinbench.benchmark.protocol import Identity
from orinbench.benchmark.results import RunResult
from orinbench.benchmark.runner import Runner
from orinbench.benchmark.tinygrad_backend import TinygradBackend, copy_bandwidth
from orinbench.board.environment import PATCHED
from orinbench.check.gate import Gate
from orinbench.compare.revisions import Built
from orinbench.errors import BenchError
from orinbench.export.record import make_records
from orinbench.export.schema import Record
from orinbench.interrupts import Interrupts
from orinbench.model import ModelInfo
from orinbench.samples.judge import Judged, adjusted, compare_paired, process_medians
from orinbench.talk import Talk


@dataclass(frozen=True)
class Bench:
    """A measurement: one tinygrad device, one model, some tests, and how often."""

    backend: str
    model: ModelInfo
    cases: tuple[Case, ...]
    rounds: int  # processes of each side
    repetitions: int  # of each test in a process
    seed: int
    check: bool | None
    timeout: float
    verbose: bool

    @property
    def lane(self) -> LanePlan:
        """Either side of the plan."""
        return LanePlan(Lane(self.backend, self.model.path), self.cases)


class RevisionBackend(TinygradBackend):
    """tinygrad as a revision has it: the same worker, on the revision's interpreter.

    Its kernels are cached beside its environment, so that each is compiled (or searched) once. A
    process that does not start raises BenchError: the other side alone says nothing.
    """

    def __init__(self, built: Built, bench: Bench) -> None:
        super().__init__(bench.lane, False, bench.timeout, bench.verbose)
        self.built = built
        self.environment["CACHEDB"] = str(built.folder / "cache.db")
        # It comes before an environment's own packages, and what it names is behind them already.
        self.environment["PYTHONPATH"] = ""

    @contextmanager
    def _needed(self) -> Iterator[None]:
        try:
            yield
        except BackendDiedError as error:
            name, backend = self.built.revision.name, self.plan.lane.backend
            raise BenchError(f"{name}: {backend}: {error}") from error

    def open(self) -> Identity:
        """Open the device; raises BenchError also if another tinygrad is in the way."""
        with self._needed():
            identity = super().open()
            if identity.build_commit != self.built.version:
                raise BackendDiedError(
                    f"runs tinygrad {identity.build_commit} instead of {self.built.version}: is "
                    "there one in the current folder?"
                )
        return identity

    def first_token(self) -> FirstToken:
        """Load the model and take its first token."""
        with self._needed():
            return super().first_token()

    def renew(self) -> float | None:
        """Start a fresh process."""
        with self._needed():
            return super().renew()

    def start(self) -> WorkerProcess:
        """Start a process of the revision."""
        command = (str(self.built.python), "-m", "orinbench.benchmark.worker")
        return WorkerProcess(self.environment, self._timeout, command, self._verbose)


@dataclass
class Measured:
    """The run of both revisions, its lanes in the order (before, after)."""

    sides: tuple[Built, Built]
    run: RunResult

    @property
    def rounds(self) -> int:
        """Processes of which both sides have samples of some test."""
        both = zip(*(lane.rows for lane in self.run.lanes), strict=True)
        return max((len(set(a.processes) & set(b.processes)) for a, b in both), default=0)

    def judge(self) -> list[Judged]:
        """Compare process by process what both have, all tests at once; a pair is of medians."""
        labels, comparisons = [], []
        for rows in zip(*(lane.rows for lane in self.run.lanes), strict=True):
            before, after = (process_medians(row.throughputs, row.processes) for row in rows)
            if both := [process for process in before if process in after]:
                labels.append(rows[0].case.label)
                pairs = [after[process] for process in both], [before[process] for process in both]
                comparisons.append(compare_paired(*pairs))
        backend = self.run.lanes[0].plan.lane.backend
        return [
            Judged(label, backend, comparison, "pair")
            for label, comparison in zip(labels, adjusted(comparisons), strict=True)
        ]

    def errors(self) -> list[str]:
        """Return each failure of a test."""
        return [
            f"{built.revision.name} {row.case.label} failed: {row.error}"
            for built, lane in zip(self.sides, self.run.lanes, strict=True)
            for row in lane.rows
            if row.error
        ]

    def records(self, side: int) -> list[Record]:
        """Return one side's records, with the versions that made them."""
        built, run = self.sides[side], self.run
        alone = RunResult(
            run.plan, run.environment, [run.lanes[side]], run.started, run.synthetic, run.partial
        )
        records = make_records(alone)
        for record in records:
            record.environment = record.environment | _versions(built.version)
            record.extra = {"revision": built.revision.commit, "name": built.revision.name}
        return records


def _versions(version: str) -> dict[str, Any]:
    patched = PATCHED.fullmatch(version)
    return {
        "tinygrad_version": version,
        "tinygrad_base": patched["base"] if patched else None,
        "tinygrad_series": patched["series"] if patched else None,
    }


def measure(
    sides: tuple[Built, Built], bench: Bench, talk: Talk, synthetic: bool, interrupts: Interrupts
) -> Measured:
    """Measure both sides, interleaved, each in as many fresh processes as there are rounds.

    Raises BenchError if a side does not run at all, CheckFailed if one computes wrongly.
    """
    runner = Runner(
        Plan((bench.lane,) * 2, bench.rounds * bench.repetitions, bench.seed, bench.rounds),
        [RevisionBackend(built, bench) for built in sides],
        [bench.model] * 2,
        talk,
        gate=Gate(bench.check, talk, None, bench.timeout),
        probe=lambda device: copy_bandwidth(device, bench.timeout),
        interrupts=interrupts,
    )
    runner.result.synthetic = synthetic
    return Measured(sides, runner.run())
