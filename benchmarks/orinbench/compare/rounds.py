"""Two revisions measured in one run: rounds of fresh processes, both revisions in each.

What a process is lucky with (where its memory lies, which threads it got) stays for its lifetime,
so repetitions inside one process agree with each other more than with the next process. A round
starts both revisions anew and gives one pair; that luck is then noise, and no verdict.
"""

import statistics as stdlib_statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.plan import Case, Lane, LanePlan, Plan
from orinbench.benchmark.process import WorkerProcess
from orinbench.benchmark.protocol import Bandwidth, Identity
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
from orinbench.statistics.judge import Judged, adjusted, compare_paired
from orinbench.talk import RichTalk, Talk

SIDES = 2


class RevisionBackend(TinygradBackend):
    """tinygrad as a revision has it: the same worker, on the revision's interpreter.

    Its kernels are cached beside its environment, so that each is compiled (or searched) once.
    """

    def __init__(self, built: Built, plan: LanePlan, timeout: float, verbose: bool) -> None:
        super().__init__(plan, False, timeout, verbose)
        self.built = built
        self.environment["CACHEDB"] = str(built.folder / "cache.db")
        # It comes before an environment's own packages, and what it names is behind them already.
        self.environment["PYTHONPATH"] = ""

    def open(self) -> Identity:
        """Open the device; raises BackendDiedError if another tinygrad is in the way."""
        identity = super().open()
        if identity.build_commit != self.built.version:
            raise BackendDiedError(
                f"runs tinygrad {identity.build_commit} instead of {self.built.version}: is there "
                "one in the current folder?"
            )
        return identity

    def _start(self) -> WorkerProcess:
        command = (str(self.built.python), "-m", "orinbench.benchmark.worker")
        return WorkerProcess(self.environment, self._timeout, command, self._verbose)


@dataclass(frozen=True)
class Bench:
    """What is measured: one tinygrad device, one model, some tests, and how often."""

    backend: str
    model: ModelInfo
    cases: tuple[Case, ...]
    rounds: int
    repetitions: int  # of each test in a round
    seed: int
    check: bool | None
    timeout: float
    verbose: bool


class RoundTalk:
    """What a round says: its phases on a terminal, and what must be known anywhere."""

    def __init__(self, talk: Talk, name: str) -> None:
        self._talk = talk
        self._name = name
        self._terminal = isinstance(talk, RichTalk)

    def line(self, text: str) -> None:
        """Pass a line on."""
        self._talk.line(f"{self._name}: {text}")

    def phase(self, text: str) -> None:
        """Move a spinner; say nothing where lines stay."""
        if self._terminal:
            self._talk.phase(f"{self._name}: {text}")

    detail = phase

    def begin(self, total: int) -> None:
        """Rounds are short: no bar."""

    def expect(self, text: str, seconds: float, left: int) -> None:
        """Rounds are short: no bar."""

    def advance(self, text: str) -> None:
        """Rounds are short: no bar."""

    def close(self) -> None:
        """The talk goes on after the round."""


@dataclass
class Measured:
    """Both revisions' rounds, in the order (before, after); `partial` if Ctrl-C cut them short."""

    sides: tuple[Built, Built]
    backend: str
    runs: list[RunResult]
    partial: bool = False

    def judge(self) -> list[Judged]:
        """Compare round by round what both have, all tests at once; a pair is of medians."""
        labels, comparisons = [], []
        for index, case in enumerate(self.runs[0].plan.lanes[0].cases if self.runs else ()):
            pairs = [
                tuple(stdlib_statistics.median(lane.rows[index].throughputs) for lane in run.lanes)
                for run in self.runs
                if all(lane.rows[index].samples for lane in run.lanes)
            ]
            if pairs:
                before, after = zip(*pairs, strict=True)
                labels.append(case.label)
                comparisons.append(compare_paired(after, before))
        return [
            Judged(label, self.backend, comparison, "pair")
            for label, comparison in zip(labels, adjusted(comparisons), strict=True)
        ]

    def errors(self) -> list[str]:
        """Return each failure of a test once."""
        return list(
            dict.fromkeys(
                f"{built.revision.name} {row.case.label} failed: {row.error}"
                for run in self.runs
                for built, lane in zip(self.sides, run.lanes, strict=True)
                for row in lane.rows
                if row.error
            )
        )

    def records(self, side: int) -> list[Record]:
        """Return one side's records: the samples of all rounds, and the versions that made them."""
        built = self.sides[side]
        first = self.runs[0]
        lane = first.lanes[side]
        for index, row in enumerate(lane.rows):
            row.samples = [
                replace(sample, round=number, process=number)
                for number, run in enumerate(self.runs)
                for sample in run.lanes[side].rows[index].samples
            ]
        whole = RunResult(first.plan, first.environment, [lane], first.started)
        whole.partial, whole.synthetic = self.partial, first.synthetic
        records = make_records(whole)
        for record in records:
            record["repetitions"] = len(self.runs) * first.plan.repetitions
            record["environment"] |= _versions(built.version)
            record["extra"] = {"revision": built.revision.commit, "name": built.revision.name}
        return records


def _versions(version: str) -> dict[str, Any]:
    patched = PATCHED.fullmatch(version)
    return {
        "tinygrad_version": version,
        "tinygrad_base": patched["base"] if patched else None,
        "tinygrad_series": patched["series"] if patched else None,
    }


def measure(
    sides: tuple[Built, Built],
    bench: Bench,
    talk: Talk,
    synthetic: bool,
    interrupts: Interrupts,
) -> Measured:
    """Measure both sides in rounds; each round begins with the other side than the one before.

    Raises BenchError if a side does not run at all, CheckFailed if one computes wrongly.
    """
    measured = Measured(sides, bench.backend, [])
    bandwidths: dict[str, Bandwidth] = {}

    def probe(device: str) -> Bandwidth:
        if device not in bandwidths:
            bandwidths[device] = copy_bandwidth(device, bench.timeout)
        return bandwidths[device]

    try:
        for number in range(bench.rounds):
            name = f"round {number + 1} of {bench.rounds}"
            if not isinstance(talk, RichTalk):
                talk.line(name)
            run = _round(sides, bench, number, RoundTalk(talk, name), probe, interrupts)
            run.synthetic = synthetic
            for built, lane in zip(sides, run.lanes, strict=True):
                if lane.error:
                    raise BenchError(f"{built.revision.name}: {bench.backend}: {lane.error}")
            if run.partial:
                measured.partial = True
                break
            measured.runs.append(run)
            interrupts.release()
    except KeyboardInterrupt:
        measured.partial = True
    interrupts.hold()
    return measured


def _round(
    sides: Sequence[Built],
    bench: Bench,
    number: int,
    talk: Talk,
    probe: Any,
    interrupts: Interrupts,
) -> RunResult:
    """Run one round and return its result, its lanes in the order of `sides`."""
    order = [(number + place) % SIDES for place in range(SIDES)]
    lane_plan = LanePlan(Lane(bench.backend, bench.model.path), bench.cases)
    runner = Runner(
        Plan((lane_plan,) * SIDES, bench.repetitions, bench.seed + number),
        [RevisionBackend(sides[i], lane_plan, bench.timeout, bench.verbose) for i in order],
        [bench.model] * SIDES,
        talk,
        gate=Gate(bench.check if number == 0 else False, talk, None, bench.timeout),
        probe=probe,
        interrupts=interrupts,
    )
    run = runner.run()
    run.lanes = [run.lanes[order.index(side)] for side in range(SIDES)]
    return run
