"""Runs a plan: open, first token, check, warm up, then the rounds in the plan's order.

Rounds are spread over fresh processes: each backend is started anew, its model loaded and its cases
warmed up, before the rounds that this process serves. A backend that fails costs its own rows,
nothing else. Ctrl-C ends the run and keeps what is there.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from orinbench.check.row_result_gate import require_row_passed
from orinbench.errors import BenchError, CheckFailed
from orinbench.interrupts import Interrupts
from orinbench.measure.backends.backend import (
    Backend,
    BackendError,
    CaseLeftOutError,
    CopyBandwidthSamples,
    NonfiniteLogitsError,
)
from orinbench.measure.board import (
    UNKNOWN_IDLE,
    IdlePower,
    board_warnings,
    has_sensors,
    measure_energy,
    measure_idle_power,
    read_board_state,
    wait_for_cooldown,
)
from orinbench.measure.clocks import UsedGpuFinder, read_clocks
from orinbench.measure.environment import read_environment
from orinbench.measure.journal import Journal
from orinbench.measure.plan import Plan, planned_repetitions
from orinbench.measure.results import LaneResult, RowResult, RunResult
from orinbench.model import ModelInfo
from orinbench.progress import Progress
from orinbench.show.markdown import counted_noun
from orinboard.files import Roots

Check = Callable[[LaneResult, Backend], dict[str, Any]]
BandwidthProbe = Callable[[str], CopyBandwidthSamples]


@dataclass
class PlanRunner:
    """One run. `backends` and `models` are in the order of the plan's lanes.

    `gate` checks a backend's numbers and raises CheckFailed; lanes without a model have none and
    check each case in its warm-up. `probe` measures a device's copy bandwidth and raises
    BackendError; None leaves the roofline out. Before each repetition come a pause of `delay`
    seconds and the wait until the board is no hotter than `cooldown` °C. `roots` is where the
    board's sensors are; each sample goes into the `journal` at once. `rails` are the ones whose
    energy is summed, instead of those that are known to make up the machine. With `fit_seconds` a
    run takes fewer processes than planned, but no fewer than `least_processes`, if to start them
    all would take longer than this.
    """

    plan: Plan
    backends: Sequence[Backend]
    models: Sequence[ModelInfo | None]
    talk: Progress
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
    idle: IdlePower = field(default=UNKNOWN_IDLE, init=False)

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
        self._lanes = list(zip(self.result.lanes, self.backends, strict=True))
        self._bandwidths: dict[str, CopyBandwidthSamples | None] = {}
        self._gpu = UsedGpuFinder(self.roots)

    def run_plan(self) -> RunResult:
        """Return the result; `partial` says that Ctrl-C cut it short.

        Raises BenchError if no backend opens, CheckFailed if a backend computes wrongly.
        """
        try:
            try:
                self._prepare_lanes()
                self._measure_rounds()
            finally:
                self.interrupts.start_holding()
        except KeyboardInterrupt:
            self.result.partial = True
            self.talk.print_line(f"ended by {self.interrupts.name}; what was measured follows")
        finally:
            self.talk.close()
            for backend in self.backends:
                backend.close()
        return self.result

    def _prepare_lanes(self) -> None:
        self.idle = measure_idle_power(self.roots, self.rails)
        self._open_backends()
        for lane, _ in self._lanes:
            self._measure_bandwidth(lane)
            self.talk.finish_step("copy bandwidth")
        for lane, backend in self._lanes:
            if lane.plan.model is not None and lane.error is None:
                self.talk.show_phase(f"{lane.plan.name}: first token of {lane.plan.model.name}")
                with self._recording_failure(lane):
                    lane.first_token = backend.time_first_token()
                    lane.first_tokens_s = [lane.first_token.warm_s]
            self.talk.finish_step("first token")
        for lane, backend in self._lanes:
            # The gate says where numbers that are none begin.
            if self.gate is not None and (lane.error is None or lane.no_numbers):
                with self._recording_failure(lane):
                    lane.check = self.gate(lane, backend)
            self.talk.finish_step("check")
        for lane, backend in self._lanes:
            for row in lane.rows if self.warm_up else ():
                if lane.plan.is_tinygrad:
                    self.talk.show_phase(f"{lane.plan.name}: warm-up of {row.case.label}")
                if lane.can_run(row):
                    with self._recording_failure(lane, row):
                        row.warm_up = backend.warm_up(row.case)
                    require_row_passed(lane, row)
                self.talk.finish_step("warm-up")

    def _open_backends(self) -> None:
        for lane, backend in self._lanes:
            self.talk.show_phase(f"opening {lane.plan.name}")
            try:
                lane.identity = backend.open_and_identify()
            except BackendError as error:
                lane.error = str(error)
            self.talk.finish_step(f"opened {lane.plan.name}")
        lanes = self.result.lanes
        reasons = [f"{lane.plan.name}: {lane.error}" for lane in lanes if lane.error]
        if len(reasons) == len(lanes):
            flag = "--backend" if any(lane.model for lane in lanes) else "--device"
            raise BenchError(f"{flag}: none opens ({'; '.join(reasons)})")
        for reason in reasons:
            self.talk.print_line(reason)

    @contextmanager
    def _recording_failure(self, lane: LaneResult, row: RowResult | None = None) -> Iterator[None]:
        """Let a backend's death inside cost its lane, or a row of it alone."""
        name = f"{lane.plan.name}: {row.case.label}" if row else lane.plan.name
        try:
            yield
        except BackendError as error:
            (row or lane).error = str(error)
            lane.no_numbers |= row is None and isinstance(error, NonfiniteLogitsError)
            self.talk.print_line(f"{name}: {error}")
        except CaseLeftOutError as error:
            assert row is not None, "only a case is left out"
            row.left_out = str(error)
            self.talk.print_line(f"{name} left out: {error}")

    def _measure_bandwidth(self, lane: LaneResult) -> None:
        """Measure the bandwidth of the lane's device, once a device.

        llama.cpp's device is the CPU, or else the GPU that a tinygrad lane of this run opened.
        """
        if lane.error is not None or self.probe is None:
            return
        opened = [other.plan.device for other in self.result.lanes if other.ran_on_gpu]
        device = lane.plan.device or next((name for name in opened if name), None)
        if not lane.ran_on_gpu:
            device = lane.plan.device or "CPU"
        if device is None:
            return
        if device not in self._bandwidths:
            self.talk.show_phase(f"{device}: copy bandwidth")
            try:
                self._bandwidths[device] = self.probe(device)
            except BackendError as error:
                self.talk.print_line(f"{device}: copy bandwidth not measured: {error}")
                self._bandwidths[device] = None
        lane.bandwidth = self._bandwidths[device]

    def _measure_rounds(self) -> None:
        self._fit_and_announce_processes()
        process = 0
        for step in planned_repetitions(self.plan):
            lane, backend = self._lanes[step.lane]
            row = lane.rows[step.case]
            if row.left_out is not None:
                continue
            if (wanted := self.plan.process_of_round(step.round)) != process:
                process = wanted
                self._restart_and_warm_up(process)
            if lane.can_run(row):
                self._pause_and_cool_down()
                with self._recording_failure(lane, row):
                    self._time_and_record_repetition(step.round, lane, row, backend)
            self.talk.finish_step(f"{lane.plan.name} {row.case.label}")

    def _fit_and_announce_processes(self) -> None:
        """Take fewer processes if they would take too long, and say how long the rest takes."""
        rows = [row for lane in self.result.lanes for row in lane.rows if row.left_out is None]
        repetition_s = sum(row.warm_up.repetition_s for row in rows if row.warm_up)
        start_s = sum(
            (lane.first_tokens_s[0] if lane.first_tokens_s else 0.0)
            + sum(row.warm_up.seconds - row.warm_up.compile_s for row in lane.rows if row.warm_up)
            for lane in self.result.lanes
            if lane.plan.is_tinygrad
        )
        planned = self.plan.processes
        if self.fit_seconds is not None and start_s * (planned - 1) > self.fit_seconds:
            fitting = max(self.least_processes, 1 + int(self.fit_seconds / start_s))
            self.plan = replace(self.plan, processes=min(planned, fitting))
            self.result.plan = self.plan
        repetitions, processes = self.plan.repetitions, self.plan.processes
        fewer = f" instead of {planned}, since each start takes {start_s:.0f} s"
        self.talk.announce_steps(
            f"{counted_noun(repetitions, 'round')} of {counted_noun(len(rows), 'test')}, spread "
            f"over {counted_noun(processes, 'fresh process')} of each backend"
            + fewer
            * (processes < planned),
            repetitions * (repetition_s + len(rows) * self.delay) + start_s * (processes - 1),
            len(rows) * repetitions + len(self.plan.lanes) * (processes - 1),
        )

    def _restart_and_warm_up(self, process: int) -> None:
        """Start every backend anew, in an order drawn, and warm up what it serves."""
        drawn = list(self._lanes)
        random.Random(f"{self.plan.seed} {process}").shuffle(drawn)
        for lane, backend in drawn:
            if any(lane.can_run(row) for row in lane.rows):
                self.talk.show_phase(
                    f"{lane.plan.name}: process {process + 1} of {self.plan.processes}"
                )
                with self._recording_failure(lane):
                    if (seconds := backend.restart()) is not None:
                        lane.first_tokens_s.append(seconds)
            for row in lane.rows if self.warm_up else ():
                if lane.can_run(row):
                    with self._recording_failure(lane, row):
                        # The record says what the first process's took.
                        backend.warm_up(row.case)
            self.talk.finish_step("fresh process")

    def _pause_and_cool_down(self) -> None:
        """Pause, and wait for a board that is too hot; raises BenchError if it stays hot."""
        time.sleep(self.delay)
        if self.cooldown is None:
            return
        told: list[float] = []

        def tell(celsius: float) -> None:
            if not told:
                self.talk.print_line(f"cooling down from {celsius:.1f} to {self.cooldown:g} °C")
            told.append(celsius)

        wait_for_cooldown(self.cooldown, tell, roots=self.roots)

    def _time_and_record_repetition(
        self, round_: int, lane: LaneResult, row: RowResult, backend: Backend
    ) -> None:
        board = read_board_state(self.roots)
        gpu = self._gpu() if lane.ran_on_gpu else None
        clocks = read_clocks(board if lane.ran_on_gpu else None, gpu=gpu)
        with measure_energy(self.roots, rails=self.rails, idle=self.idle) as energy:
            sample = backend.time_repetition(row.case, self.plan.seed + round_)
        energy.set_timed_part(sample.ns, sample.ended_s)
        after = read_board_state(self.roots)
        sample = replace(
            sample,
            round=round_,
            process=self.plan.process_of_round(round_),
            clocks_before=clocks,
            clocks_after=read_clocks(after if lane.ran_on_gpu else None, gpu=gpu),
            board_before=board.json_record() if has_sensors(board) else None,
            board_after=after.json_record() if has_sensors(after) else None,
            board_warnings=board_warnings(board, after, self.roots),
            energy=energy.record_fields(row.work_units) or None,
        )
        if not sample.finite:
            raise CheckFailed(
                f"{lane.plan.name} {row.case.label}: a timed repetition left logits that are "
                "not finite: nothing is faster than no numbers"
            )
        row.samples.append(sample)
        if self.journal is not None:
            self.journal.append_sample(lane.plan, row, sample)
