"""`orinbench tune sweep`: what BEAM 0, 1, 2 and 4 cost, and what they bring to a token."""

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from orinbench import protocol
from orinbench.errors import EXIT_INTERRUPTED, BenchError
from orinbench.judge import Comparison, compare_paired
from orinbench.process import WorkerProcess
from orinbench.ranges import parse_int_list
from orinbench.samples import BackendDiedError
from orinbench.statistics import Summary, summarize
from orinbench.talk import Talk, make_talk
from orinbench.tinygrad_backend import worker_environment
from orinbench.tune.events import chosen_device, events
from orinbench.tune.workload import Workload, model_options, workload


@dataclass
class Lane:
    """One level: what its search took, what a start takes with and without it, and samples.

    Times are seconds, samples tokens a second. `start_cold_s` is a start with an empty cache, in
    which kernels are compiled and, above level 0, searched; `start_warm_s` finds both there.
    """

    level: int
    cold_l2: bool
    kernels: int = 0
    candidates: int = 0
    search_s: float = 0.0
    start_cold_s: float = 0.0
    start_warm_s: float = 0.0
    tokens_per_s: list[float] = field(default_factory=list)
    against_default: Comparison | None = None

    @property
    def name(self) -> str:
        """The lane as the table calls it."""
        return f"{self.level}, cold L2" if self.cold_l2 else str(self.level)


@click.command("sweep")
@click.argument("model", required=False, metavar="[MODEL]")
@model_options
@click.option("--levels", default="0,1,2,4", metavar="LIST", help="BEAM levels [0,1,2,4]")
@click.option("--cold-l2", is_flag=True, help="search with a flushed L2 as well (CUDA)")
@click.option("-n", "--n-gen", default=32, type=click.IntRange(1), help="tokens a sample [32]")
@click.option("-r", "--repetitions", default=10, type=click.IntRange(1), help="rounds [10]")
@click.option("--timeout", default=14400.0, type=click.FloatRange(1), help="seconds a step [4 h]")
@click.option("output", "-o", "--output", type=click.Choice(["md", "json"]), default="md")
def sweep_command(model: str | None, **options: Any) -> int:
    """Compare BEAM levels: time of the search, of a start with and without it, and speed.

    Every level starts with an empty cache of its own; the user's is not touched. Samples of all
    levels are taken in turn.
    """
    levels = sorted(set(parse_int_list(options["levels"], "--levels")) | {0})
    work, device = workload(model, options), chosen_device(options["device"])
    lanes = [Lane(level, False) for level in levels]
    if options["cold_l2"]:
        if not device.rpartition("+")[2].upper().startswith("CUDA"):
            raise BenchError(f"--cold-l2 is for CUDA; on {device} there is no such mode")
        lanes += [Lane(level, True) for level in levels if level]
    talk = make_talk(False)
    code = 0
    try:
        with tempfile.TemporaryDirectory(prefix="orinbench-sweep-") as directory:
            Sweep(work, device, lanes, Path(directory), options, talk).run()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BackendDiedError as error:
        raise BenchError(f"tune sweep: {device}: {error}") from error
    finally:
        talk.close()
    if options["output"] == "json":
        stored = {"model": work.label, "device": device, "lanes": [asdict(lane) for lane in lanes]}
        click.echo(json.dumps(stored, indent=2, default=lambda verdict: verdict.value))
    else:
        click.echo(table(work, device, lanes))
    return code


class Sweep:
    """One run of `tune sweep`."""

    def __init__(
        self,
        work: Workload,
        device: str,
        lanes: Sequence[Lane],
        directory: Path,
        options: dict[str, Any],
        talk: Talk,
    ) -> None:
        self.work, self.device, self.lanes, self.directory = work, device, lanes, directory
        self.options, self.talk = options, talk
        n_gen = options["n_gen"]
        if work.context < n_gen:
            raise BenchError(f"-n {n_gen}: does not fit into --context {work.context}")
        self.test = protocol.Test(0, n_gen, 0, work.chunk)

    def run(self) -> None:
        """Search and start each level; then take samples of all in turn."""
        for lane in self.lanes:
            self._prepare(lane)
        with ExitStack() as stack:
            workers = []
            for lane in self.lanes:
                self.talk.phase(f"BEAM={lane.name}: starting with the cache")
                worker, lane.start_warm_s = self._started(lane, stack)
                workers.append(worker)
            self.talk.phase(f"timing {self.options['repetitions']} rounds of {len(workers)} levels")
            for turn in range(self.options["repetitions"]):
                pairs = list(zip(self.lanes, workers, strict=True))
                for lane, worker in pairs if turn % 2 == 0 else pairs[::-1]:
                    sample = worker.ask(protocol.Measure(self.test, turn), protocol.Measured)
                    lane.tokens_per_s.append(self.test.n_gen * 1e9 / sample.ns)
        default = self.lanes[0].tokens_per_s
        for lane in self.lanes[1:]:
            lane.against_default = compare_paired(lane.tokens_per_s, default)

    def _cache(self, lane: Lane) -> str:
        return str(self.directory / f"{lane.level}-{lane.cold_l2}.db")

    def _prepare(self, lane: Lane) -> None:
        """Fill a level's empty cache: by its search, or by a start where nothing is searched."""
        begun = time.monotonic()
        if lane.level == 0:
            self.talk.phase("BEAM=0: starting without a cache")
            with ExitStack() as stack:
                _, lane.start_cold_s = self._started(lane, stack)
            return
        request = self.work.request(
            "search", level=lane.level, cold_l2=lane.cold_l2, known=[], token_only=True
        )
        environment = {"CACHEDB": self._cache(lane)}
        timeout = self.options["timeout"]
        with events(self.device, request, lambda: timeout, environment) as stream:
            for event in stream:
                if event["event"] == "model" and event["by_hand"]:
                    raise BenchError(
                        f"tune sweep: a token is {event['by_hand']} hand-written kernels on "
                        f"{self.device}, which no search changes; --general sweeps tinygrad's own"
                    )
                if event["event"] == "kernel":
                    lane.kernels += 1
                if event["event"] == "begin":
                    self.talk.phase(f"BEAM={lane.name}: searching {event['kernel'][:12]}")
                if event["event"] == "found":
                    lane.search_s += event["search_s"]
                    lane.candidates += event["candidates"]
        took = time.monotonic() - begun
        self.talk.line(
            f"BEAM={lane.name}: {lane.kernels} kernels, {lane.candidates} candidates, {took:.0f} s"
        )

    def _started(self, lane: Lane, stack: ExitStack) -> tuple[WorkerProcess, float]:
        """Start a worker of a level; returns it and the seconds until its kernels are captured."""
        environment = worker_environment(self.device, self.directory) | {
            "CACHEDB": self._cache(lane),
            "JITBEAM": str(lane.level),
            "BEAM": "0",
        }
        worker = stack.enter_context(WorkerProcess(environment, self.options["timeout"]))
        load = protocol.Load(str(self.work.path), self.work.context, self.work.general)
        worker.ask(load, protocol.Loaded)
        worker.ask(protocol.WarmUp(self.test), protocol.WarmedUp)
        return worker, time.monotonic() - worker.started


def table(work: Workload, device: str, lanes: Sequence[Lane]) -> str:
    """Return the comparison as Markdown; what an interruption left out is empty."""
    lines = [
        f"{work.label} on {device}, tokens one by one",
        "",
        "| BEAM | kernels | candidates | search s | start s without cache | with | tok/s | gain |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for lane in lanes:
        speed = gain = ""
        if lane.tokens_per_s:
            found = summarize(lane.tokens_per_s)
            speed = f"{found.median:.2f}{_interval(found)}"
        if (against := lane.against_default) is not None:
            gain = f"{against.ratio:.2f}x{_interval(against)}, "
            gain += against.verdict.value
        cold = lane.start_cold_s or (lane.start_warm_s + lane.search_s if lane.start_warm_s else 0)
        starts = " | ".join(f"{s:.1f}" if s else "" for s in (cold, lane.start_warm_s))
        counts = f"{lane.kernels or ''} | {lane.candidates or ''} | {lane.search_s:.1f}"
        lines.append(f"| {lane.name} | {counts} | {starts} | {speed} | {gain} |")
    return "\n".join(lines)


def _interval(found: Summary | Comparison) -> str:
    """Return the 95 % interval in brackets, if there is one."""
    if found.ci_low is None or found.ci_high is None:
        return ""
    return f" ({found.ci_low:.2f}..{found.ci_high:.2f})"
