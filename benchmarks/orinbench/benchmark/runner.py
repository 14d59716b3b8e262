"""Runs a plan: open, first token, check, warm up, then the rounds in the plan's order.

Rounds are spread over fresh processes: each backend is started anew, its model loaded and its cases
warmed up, before the rounds that this process serves. A backend that fails costs its own rows,
nothing else. Ctrl-C ends the run and keeps what is there.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from orinbench.benchmark.backend import Backend, BackendDiedError, LeftOutError
from orinbench.benchmark.journal import Journal
from orinbench.benchmark.plan import Plan, Step, order
from orinbench.benchmark.protocol import Bandwidth
from orinbench.benchmark.results import LaneResult, RowResult, RunResult
from orinbench.board import (
    board_state,
    board_warnings,
    cooldown,
    has_sensors,
    idle_watts,
    measure_energy,
)
from orinbench.board.clocks import GpuInUse, read_clocks
from orinbench.board.environment import read_environment
from orinbench.errors import BenchError
from orinbench.interrupts import Interrupts
from orinbench.model import ModelInfo
from orinbench.talk import Talk
from orinboard.files import Roots

Check = Callable[[LaneResult, Backend], dict[str, Any]]
BandwidthProbe = Callable[[str], Bandwidth]


@dataclass
class Runner:
    """One run. `backends` and `models` are in the order of the plan's lanes.

    `gate` checks a backend's numbers and raises CheckFailed; lanes without a model have none and
    check each case in its warm-up. `probe` measures a device's copy bandwidth and raises
    BackendDiedError; None leaves the roofline out. Before each repetition come a pause of `delay`
    seconds and the wait until the board is no hotter than `cooldown` °C. `roots` is where the
    board's sensors are; each sample goes into the `journal` at once. `rails` are the ones whose
    energy is summed, instead of those that are known to make up the machine. With `fit_seconds` a
    run takes fewer processes than planned, but no fewer than `least_processes`, if to start them
    all would take longer than this.
    """

    plan: Plan
    backends: Sequence[Backend]
    models: Sequence[ModelInfo | None]
    talk: Talk
    gate: Check | None = None
    probe: BandwidthProbe | None = None
    delay: float = 0.0
    warm_up: bool = True
    cooldown: float | None = None
    roots: Roots | None = None
    journal: Journal | None = None
    rails: tuple[str, ...] = ()
    interrupts: Interrupts = field(default_factory=Interrupts)
    fit_seconds: float | None = None
    least_processes: int = 1
    idle: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begin the result."""
        fewer = min(self.plan.processes, self.plan.repetitions)
        self.plan = replace(self.plan, processes=fewer)
        self.result = RunResult(
            plan=self.plan,
            environment=read_environment(),
            lanes=[
                LaneResult(lane, model, [RowResult(case) for case in lane.cases])
                for lane, model in zip(self.plan.lanes, self.models, strict=True)
            ],
            started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        self._bandwidths: dict[str, Bandwidth | None] = {}
        self._gpu = GpuInUse(self.roots)

    def run(self) -> RunResult:
        """Return the result; `partial` says that Ctrl-C cut it short.

        Raises BenchError if no backend opens, CheckFailed if a backend computes wrongly.
        """
        try:
            try:
                self.talk.begin(self._steps())
                self._prepare()
                self._measure()
            finally:
                self.interrupts.hold()
        except KeyboardInterrupt:
            self.result.partial = True
        finally:
            self.talk.close()
            for backend in self.backends:
                backend.close()
        return self.result

    def _steps(self) -> int:
        """Return how many steps the run has, as the progress bar counts them."""
        lanes = len(self.plan.lanes)
        cases = sum(len(lane.cases) for lane in self.plan.lanes)
        # Open, bandwidth, first token and check of a lane; warm-ups; rounds; fresh processes.
        return 4 * lanes + cases * (1 + self.plan.repetitions) + lanes * (self.plan.processes - 1)

    def _prepare(self) -> None:
        self.idle = idle_watts(self.roots, self.rails)
        pairs = list(zip(self.result.lanes, self.backends, strict=True))
        for lane, backend in pairs:
            self.talk.phase(f"opening {lane.plan.lane.backend}")
            try:
                lane.identity = backend.open()
            except BackendDiedError as error:
                lane.error = str(error)
            self.talk.advance(f"opened {lane.plan.lane.backend}")
        reasons = [f"{lane.plan.lane.backend}: {lane.error}" for lane, _ in pairs if lane.error]
        if len(reasons) == len(pairs):
            flag = "--backend" if any(lane.model for lane, _ in pairs) else "--device"
            raise BenchError(f"{flag}: none opens ({'; '.join(reasons)})")
        for reason in reasons:
            self.talk.line(reason)
        for lane, _ in pairs:
            self._measure_bandwidth(lane)
            self.talk.advance("copy bandwidth")
        for lane, backend in pairs:
            if (model := lane.plan.lane.model) is not None:
                self.talk.phase(f"{lane.plan.lane.backend}: first token of {model.name}")
                self._guard(lane, self._start, backend)
            self.talk.advance("first token")
        for lane, backend in pairs:
            self._guard(lane, self._check, backend)
            self.talk.advance("check")
        for lane, backend in pairs:
            for row in lane.rows if self.warm_up else ():
                if lane.plan.lane.is_tinygrad:
                    self.talk.phase(f"{lane.plan.lane.backend}: warm-up of {row.case.label}")
                self._guard_row(lane, row, self._warm_up, backend)
                self.talk.advance("warm-up")

    def _guard(
        self, lane: LaneResult, act: Callable[[LaneResult, Backend], None], backend: Backend
    ) -> None:
        """Do something for a lane that still lives; its death is its own."""
        if lane.error is None:
            try:
                act(lane, backend)
            except BackendDiedError as error:
                lane.error = str(error)
                self.talk.line(f"{lane.plan.lane.backend}: {error}")

    def _guard_row(
        self,
        lane: LaneResult,
        row: RowResult,
        act: Callable[[RowResult, Backend], object],
        backend: Backend,
    ) -> None:
        """Do something for a row that has not failed yet; its failure is its own."""
        if lane.error is row.error is row.left_out is None:
            try:
                act(row, backend)
            except BackendDiedError as error:
                row.error = str(error)
                self.talk.line(f"{lane.plan.lane.backend}: {row.case.label}: {error}")
            except LeftOutError as error:
                row.left_out = str(error)
                self.talk.line(f"{lane.plan.lane.backend}: {row.case.label} left out: {error}")

    def _measure_bandwidth(self, lane: LaneResult) -> None:
        """Measure the bandwidth of the lane's device, once a device.

        llama.cpp's device is the CPU, or else the GPU that a tinygrad lane of this run opened.
        """
        if lane.error is not None or self.probe is None:
            return
        opened = [other.plan.lane.device for other in self.result.lanes if other.on_gpu]
        device = lane.plan.lane.device or next((name for name in opened if name), None)
        if not lane.on_gpu:
            device = lane.plan.lane.device or "CPU"
        if device is None:
            return
        if device not in self._bandwidths:
            self.talk.phase(f"{device}: copy bandwidth")
            try:
                self._bandwidths[device] = self.probe(device)
            except BackendDiedError as error:
                self.talk.line(f"{device}: copy bandwidth not measured: {error}")
                self._bandwidths[device] = None
        lane.bandwidth = self._bandwidths[device]

    def _start(self, lane: LaneResult, backend: Backend) -> None:
        lane.first_token = backend.first_token()
        lane.first_tokens_s = [lane.first_token.warm_s]

    def _check(self, lane: LaneResult, backend: Backend) -> None:
        if self.gate is not None:
            lane.check = self.gate(lane, backend)

    def _warm_up(self, row: RowResult, backend: Backend) -> None:
        row.warm_up = backend.warm_up(row.case)

    def _measure(self) -> None:
        self._fit()
        process = 0
        for step in order(self.plan):
            lane = self.result.lanes[step.lane]
            row = lane.rows[step.case]
            if row.left_out is not None:
                continue
            if (wanted := self.plan.process(step.round)) != process:
                process = wanted
                self._renew(process)
            if lane.error is row.error is row.left_out is None:
                self._rest()
            self._guard_row(
                lane,
                row,
                partial(self._repeat, step),
                self.backends[step.lane],
            )
            self.talk.advance(f"{lane.plan.lane.backend} {row.case.label}")

    def _fit(self) -> None:
        """Take fewer processes if they would take too long, and say how long the rest takes."""
        rows = [row for lane in self.result.lanes for row in lane.rows if row.left_out is None]
        repetition_s = sum(row.warm_up.repetition_s for row in rows if row.warm_up)
        start_s = sum(
            (lane.first_tokens_s[0] if lane.first_tokens_s else 0.0)
            + sum(row.warm_up.seconds - row.warm_up.compile_s for row in lane.rows if row.warm_up)
            for lane in self.result.lanes
            if lane.plan.lane.is_tinygrad
        )
        planned = self.plan.processes
        if self.fit_seconds is not None and start_s * (planned - 1) > self.fit_seconds:
            fitting = max(self.least_processes, 1 + int(self.fit_seconds / start_s))
            self.plan = replace(self.plan, processes=min(planned, fitting))
            self.result.plan = self.plan
        processes = self.plan.processes
        seconds = self.plan.repetitions * (repetition_s + len(rows) * self.delay)
        rounds = f"{self.plan.repetitions} round{'s' * (self.plan.repetitions != 1)}"
        fewer = f" instead of {planned}, since each start takes {start_s:.0f} s"
        self.talk.expect(
            f"{rounds} of {len(rows)} test{'s' * (len(rows) != 1)}, spread over {processes} "
            f"fresh process{'es' * (processes != 1)} of each backend"
            + fewer
            * (processes < planned),
            seconds + start_s * (processes - 1),
            len(rows) * self.plan.repetitions + len(self.plan.lanes) * (processes - 1),
        )

    def _renew(self, process: int) -> None:
        """Start every backend anew, in an order drawn, and warm up what it serves."""
        pairs = list(zip(self.result.lanes, self.backends, strict=True))
        random.Random(f"{self.plan.seed} {process}").shuffle(pairs)
        for lane, backend in pairs:
            if lane.error is None:
                self.talk.phase(
                    f"{lane.plan.lane.backend}: process {process + 1} of {self.plan.processes}"
                )
                self._guard(lane, self._start_anew, backend)
            for row in lane.rows if self.warm_up else ():
                # What the record says of the warm-up is the first process's.
                self._guard_row(lane, row, lambda row, own: own.warm_up(row.case), backend)
            self.talk.advance("fresh process")

    def _start_anew(self, lane: LaneResult, backend: Backend) -> None:
        if (seconds := backend.renew()) is not None:
            lane.first_tokens_s.append(seconds)

    def _rest(self) -> None:
        """Pause, and wait for a board that is too hot; raises BenchError if it stays hot."""
        time.sleep(self.delay)
        if self.cooldown is None:
            return
        told: list[float] = []

        def tell(celsius: float) -> None:
            if not told:
                self.talk.line(f"cooling down from {celsius:.1f} to {self.cooldown:g} °C")
            told.append(celsius)

        cooldown(self.cooldown, tell, roots=self.roots)

    def _repeat(self, step: Step, row: RowResult, backend: Backend) -> None:
        lane = self.result.lanes[step.lane]
        board = board_state(self.roots)
        gpu = self._gpu() if lane.on_gpu else None
        clocks = read_clocks(board if lane.on_gpu else None, gpu=gpu)
        with measure_energy(self.roots, rails=self.rails, idle_watts=self.idle) as energy:
            sample = backend.measure(row.case, step.round, self.plan.seed + step.round)
        energy.count_last(sample.ns, sample.ended_s)
        after = board_state(self.roots)
        sample = replace(
            sample,
            process=self.plan.process(step.round),
            clocks_before=clocks,
            clocks_after=read_clocks(after if lane.on_gpu else None, gpu=gpu),
            board_before=board.record() if has_sensors(board) else None,
            board_after=after.record() if has_sensors(after) else None,
            board_warnings=board_warnings(board, after, self.roots),
            energy=energy.fields(row.work) or None,
        )
        row.samples.append(sample)
        if self.journal is not None:
            self.journal.write(lane.plan.lane, row, sample)
