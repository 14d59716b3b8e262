"""`orinbench suite`: its cases on devices, one benchmark after the other, as one result."""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import click

from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, BenchError
from orinbench.interrupts import Interrupts
from orinbench.judge.make_records import make_records
from orinbench.judge.schema import Record
from orinbench.judge.verdict import MIN_UNITS
from orinbench.measure.backends.backend import (
    Backend,
    BackendIdentity,
    CaseLeftOutError,
    CopyBandwidthSamples,
    Sample,
    SuiteWarmUpResult,
)
from orinbench.measure.backends.tinygrad_backend import (
    DeviceBackend,
    measure_copy_bandwidth,
    open_failure_reason,
)
from orinbench.measure.board import parse_rails
from orinbench.measure.journal import Journal, journal_directory
from orinbench.measure.plan import (
    TINYGRAD_DEVICES,
    Lane,
    Plan,
    SuiteCase,
    is_backend_name,
    lanes_for_each_environment,
    parse_variables,
)
from orinbench.measure.runner import PlanRunner
from orinbench.measure.suite.cases import (
    MOST_SECONDS,
    SELECTIONS,
    UNITS,
    WITH_ROOFLINE,
    select_cases,
)
from orinbench.options import (
    ABOVE_0,
    LISTS,
    RunOptions,
    checked_process_count,
    kept_cache_environment,
    option_field,
    print_and_keep_records,
    require_asked_board,
    require_output_paths,
    with_options,
)
from orinbench.progress import Progress
from orinboard.files import Roots
from orinllm.gpu.host_compiler import reason_clang_skipped


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(RunOptions):
    """Options of the command."""

    select: str = option_field(
        "--select",
        f"Cases to run: {', '.join(SELECTIONS)}; {', '.join(UNITS)}; or patterns as 'matmul "
        "bf16*'. -NAME leaves cases out.",
        default="quick",
        metavar="LIST",
    )
    devices: tuple[str, ...] = option_field(
        "--device", "NV, CUDA, CPU; measured in turns. [default: all that open]", **LISTS
    )
    max_call: float | None = option_field(
        "--max-call",
        "Leave out cases in which one call takes longer. [default: 2; schedule: 30]",
        type=ABOVE_0,
        metavar="SECONDS",
    )
    roofline: bool = option_field(
        "--roofline/--no-roofline", "Measure the copy bandwidth. [default: yes]", default=True
    )


class SuiteBackend(DeviceBackend, Backend):
    """One device; options and `max_call_s` as `CaseTimer.prepare_case` has them."""

    def __init__(self, plan: Lane, options: SuiteOptions, max_call_s: float) -> None:
        assert plan.device is not None
        timeout, verbose = options.timeout, options.verbose
        super().__init__(plan.device, timeout, verbose, variables=plan.variables)
        self.environment |= kept_cache_environment(options.kept)
        self._options, self._max_call_s = options, max_call_s

    def open_and_identify(self) -> BackendIdentity:
        """Open the device."""
        return self.lazy_runner.open_and_identify()

    def warm_up(self, case: SuiteCase) -> SuiteWarmUpResult:
        """Make a case ready and check its result; raises CaseLeftOutError."""
        seed, repetitions = self._options.seed, self._options.repetitions
        prepared = self.lazy_runner.suite.prepare_case(case, seed, self._max_call_s, repetitions)
        if prepared.left_out is not None:
            raise CaseLeftOutError(prepared.left_out)
        return prepared

    def time_repetition(self, case: SuiteCase, seed: int) -> Sample:
        """Time one repetition in the worker."""
        return self.lazy_runner.suite.time_repetition(case.label, seed)

    def restart(self) -> None:
        """Let a fresh worker serve what comes; its cases must be made ready again."""
        self.end_worker()


@click.command("suite", context_settings={"max_content_width": 100})
@with_options(SuiteOptions)
def suite_command(options: SuiteOptions) -> int:
    """Run a selection of benchmarks on all devices.

    Results go to standard output, everything else to standard error.
    """
    require_output_paths(options)
    processes = checked_process_count(options.processes, options.repetitions, MIN_UNITS)
    require_asked_board(options, Roots())
    parse_variables(options.variables)
    kept_cache_environment(options.kept)
    selection = select_cases(options.select)
    records: list[Record] = []
    partial = False
    with Interrupts() as interrupts, Journal(journal_directory()) as journal:
        try:
            talk = Progress(options.progress)
            devices = tuple(choose_devices(options.devices, talk))
            options = replace(options, processes=processes, devices=devices)
            if note := reason_clang_skipped(os.environ):
                talk.print_line(note)
            probe = functools.cache(lambda device: measure_copy_bandwidth(device, options.timeout))
            for name, cases in selection.items():
                runner = _make_plan_runner(name, cases, options, probe, interrupts, journal)
                try:
                    partial = runner.run_plan().partial
                except Exception:
                    runner.result.partial = True
                    raise
                finally:
                    records += make_records(runner.result)
                if partial:
                    break
                interrupts.release_and_raise()
        except KeyboardInterrupt:
            partial = True
        finally:
            interrupts.start_holding()
            if records:
                print_and_keep_records(records, options)
            journal.mark_not_needed()
    failed = any(record.error for record in records)
    return EXIT_INTERRUPTED if partial else EXIT_FAILED_ROWS if failed else 0


def _make_plan_runner(
    benchmark: str,
    cases: Sequence[SuiteCase],
    options: SuiteOptions,
    probe: Callable[[str], CopyBandwidthSamples],
    interrupts: Interrupts,
    journal: Journal,
) -> PlanRunner:
    max_call_s = options.max_call or MOST_SECONDS[benchmark]
    lanes = lanes_for_each_environment(
        [Lane(f"tinygrad:{device}", tuple(cases)) for device in options.devices], options.variables
    )
    return PlanRunner(
        Plan(lanes, options.repetitions, options.seed, options.processes or MIN_UNITS),
        [SuiteBackend(lane, options, max_call_s) for lane in lanes],
        [None] * len(lanes),
        Progress(options.progress),
        gate=None,
        probe=probe if options.roofline and benchmark in WITH_ROOFLINE else None,
        delay=options.delay,
        cooldown=options.cooldown,
        rails=parse_rails(options.rails),
        roots=Roots(),
        journal=journal,
        interrupts=interrupts,
    )


def choose_devices(given: Sequence[str], talk: Progress) -> list[str]:
    """Return the devices asked for, or all that open; raises BenchError if there is none."""
    names = [name for text in given for name in text.split(",") if name]
    for name in names:
        if not is_backend_name(f"tinygrad:{name}"):
            raise BenchError(
                f"--device {name}: unknown; there are {', '.join(TINYGRAD_DEVICES)}, each with an "
                "optional :RENDERER"
            )
    if names:
        return list(dict.fromkeys(names))
    reasons = {}
    for name in TINYGRAD_DEVICES:
        talk.show_phase(f"trying {name}")
        if (reason := open_failure_reason(name)) is not None:
            reasons[name] = reason
            talk.print_line(f"{name} does not open: {reason}")
    if len(reasons) == len(TINYGRAD_DEVICES):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise BenchError(f"--device: none opens ({why})")
    return [name for name in TINYGRAD_DEVICES if name not in reasons]
