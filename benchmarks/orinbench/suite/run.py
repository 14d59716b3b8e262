"""Runs benchmarks of the suite on devices, one after the other, and collects their records."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jetson.files import Roots
from orinbench.errors import BenchError
from orinbench.interrupts import Interrupts
from orinbench.journal import Journal
from orinbench.plan import TINYGRAD_DEVICES, Lane, LanePlan, Plan, check_backend_name
from orinbench.protocol import Bandwidth
from orinbench.record import make_records
from orinbench.runner import Runner
from orinbench.schema import Record
from orinbench.suite.backend import SuiteBackend
from orinbench.suite.registry import BENCHMARKS
from orinbench.talk import Talk
from orinbench.tinygrad_backend import copy_bandwidth, probe_device

SELECTIONS = ("quick", "full", "tiny")


@dataclass(frozen=True)
class Settings:
    """How the suite runs, whatever it measures."""

    repetitions: int = 10
    processes: int = 6
    seed: int = 0
    max_call_s: float | None = None  # None: as each benchmark says
    timeout: float = 1800.0
    delay: float = 0.0
    cooldown: float | None = None
    rails: tuple[str, ...] = ()
    roofline: bool = True
    verbose: bool = False
    roots: Roots = field(default_factory=Roots)
    interrupts: Interrupts = field(default_factory=Interrupts)
    journal: Journal | None = None


@dataclass
class SuiteResult:
    """What was measured; `partial` says that Ctrl-C cut it short."""

    records: list[Record] = field(default_factory=list)
    partial: bool = False

    @property
    def failed(self) -> bool:
        """Whether any row carries an error."""
        return any(record["error"] for record in self.records)


# From names of benchmarks to the options that each runs with.
Selection = Mapping[str, Mapping[str, Any]]


def parse_selection(text: str) -> dict[str, dict[str, str]]:
    """Return what `--select` asks for: `quick`, `full` or `tiny`, or names with full's options.

    `-NAME` leaves a benchmark out. Raises BenchError for anything else.
    """
    chosen: dict[str, dict[str, str]] = {}
    for word in (word.strip() for word in text.split(",") if word.strip()):
        if word in SELECTIONS:
            chosen |= {name: benchmark.preset(word) for name, benchmark in BENCHMARKS.items()}
        elif word in BENCHMARKS:
            chosen[word] = BENCHMARKS[word].preset("full")
        elif word.removeprefix("-") in BENCHMARKS:
            chosen.pop(word.removeprefix("-"), None)
        else:
            known = ", ".join((*SELECTIONS, *BENCHMARKS))
            raise BenchError(f"--select {word}: no such benchmark; there are {known}")
    if not chosen:
        raise BenchError(f"--select: nothing chosen; there are {', '.join(SELECTIONS)}")
    return {name: chosen[name] for name in BENCHMARKS if name in chosen}


def choose_devices(given: Sequence[str], talk: Talk) -> list[str]:
    """Return the devices asked for, or all that open; raises BenchError if there is none."""
    names = [name for text in given for name in text.split(",") if name]
    for name in names:
        if not check_backend_name(f"tinygrad:{name}"):
            raise BenchError(
                f"--device {name}: unknown; there are {', '.join(TINYGRAD_DEVICES)}, each with an "
                "optional :RENDERER"
            )
    if names:
        return list(dict.fromkeys(names))
    reasons = {}
    for name in TINYGRAD_DEVICES:
        talk.phase(f"trying {name}")
        if (reason := probe_device(name)) is not None:
            reasons[name] = reason
            talk.line(f"{name} does not open: {reason}")
    if len(reasons) == len(TINYGRAD_DEVICES):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise BenchError(f"--device: none opens ({why})")
    return [name for name in TINYGRAD_DEVICES if name not in reasons]


def run_suite(
    selection: Selection,
    devices: Sequence[str],
    settings: Settings,
    talk: Callable[[], Talk],
    result: SuiteResult | None = None,
    finished: Callable[[SuiteResult], None] = lambda _: None,
) -> SuiteResult:
    """Run each benchmark on all devices, interleaved, and return the records of all.

    Rows that fail carry their error, and a benchmark of which no device opens does not keep the
    next from running. `result` is filled as it goes, and `finished` gets it after each benchmark.
    Raises BenchError, before anything runs, for options that mean nothing.
    """
    result = result or SuiteResult()
    planned = {name: tuple(BENCHMARKS[name].cases(given)) for name, given in selection.items()}
    probe = functools.cache(lambda device: copy_bandwidth(device, settings.timeout))
    for name, cases in planned.items():
        lanes = tuple(LanePlan(Lane(f"tinygrad:{device}"), cases) for device in devices)
        plan = Plan(lanes, settings.repetitions, settings.seed, settings.processes)
        needs_probe = settings.roofline and BENCHMARKS[name].roofline
        own = replace(settings, max_call_s=settings.max_call_s or BENCHMARKS[name].max_call_s)
        result.partial = _run_one(plan, devices, own, talk(), probe, needs_probe, result)
        finished(result)
        if result.partial:
            break
        settings.interrupts.release()
    return result


def _run_one(
    plan: Plan,
    devices: Sequence[str],
    settings: Settings,
    talk: Talk,
    probe: Callable[[str], Bandwidth],
    needs_probe: bool,
    result: SuiteResult,
) -> bool:
    """Run one benchmark, add its records to `result`, and return whether it was interrupted."""
    assert settings.max_call_s is not None, "run_suite says what is too slow"
    runner = Runner(
        plan,
        [
            SuiteBackend(
                device,
                settings.seed,
                settings.repetitions,
                settings.max_call_s,
                settings.timeout,
                settings.verbose,
            )
            for device in devices
        ],
        [None] * len(devices),
        talk,
        gate=None,
        probe=probe if needs_probe else None,
        delay=settings.delay,
        cooldown=settings.cooldown,
        rails=settings.rails,
        roots=settings.roots,
        journal=settings.journal,
        interrupts=settings.interrupts,
    )
    try:
        return runner.run().partial
    except Exception:
        runner.result.partial = True
        raise
    finally:
        result.records += make_records(runner.result)
