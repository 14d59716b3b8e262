"""The board while it was measured: its state, its energy, and whether it was fit at all.

A thin layer over the `orinboard` readers, which work on any machine: a Jetson's sensors, a discrete
GPU's (NVML) or an x86 processor's (RAPL), or none.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from orinbench.errors import BenchError
from orinbench.files_and_json import write_atomically
from orinbench.judge.sample_statistics import BenchWarning, WarningKind
from orinboard.board import BoardState, read_state
from orinboard.energy import BENCHMARK_HERTZ, EnergySampler
from orinboard.files import FileReader, Roots
from orinboard.meter import COVERAGE, Energy
from orinboard.require import maxn_problems, pinned_problems, unmet_conditions
from orinboard.sensors.thermal import read_zones
from orinboard.summed_rails import require_known_rails

TEXTFILE = "orinbench.prom"
#: Seconds between looks at a cooling board, and the longest wait for it.
COOLDOWN_INTERVAL, COOLDOWN_LIMIT = 5.0, 900.0
#: Fewer readings of the power sensor than this inside a timed region make its energy a rough guess.
FEW_READINGS = 5
#: Seconds of measuring the power before the first backend opens.
IDLE_SECONDS = 2.0
#: Metrics made of a record: name, description, field of the record.
METRICS = (
    ("tokens_per_second", "Median speed of a benchmark row.", "median_ts"),
    ("joules_per_token", "Energy of a token, over the rails in the record.", "joules_per_token"),
    ("tokens_per_joule", "Tokens a second and watt.", "tokens_per_joule"),
    ("ttft_seconds", "Time to the first token, kernels compiled.", "ttft_warm_s"),
    ("roofline_percent", "Speed as a share of what memory bandwidth allows.", "roofline_percent"),
    ("run_tokens", "Tokens of the timed region whose energy was measured.", "energy.tokens"),
    ("run_joules", "Energy of that region.", "energy.joules"),
    ("run_started_seconds", "When it began, as Unix time.", "energy.started"),
    ("run_ended_seconds", "When it ended, as Unix time.", "energy.ended"),
)
LABELS = {"model": "model_type", "backend": "backend", "test": "test"}


def read_board_state(roots: Roots | None = None) -> BoardState:
    """The board now; `.record()` is the record's form of it. Takes some milliseconds."""
    return read_state(roots)


@dataclass
class MeasuredEnergy:
    """A region's energy, complete once the region has been left; times are Unix seconds.

    `timed` is the part of the region that counts, in seconds of time.monotonic(); None is all.
    `idle_watts` is what the machine drew before, shown beside it and not subtracted.
    """

    sampler: EnergySampler
    started: float
    ended: float | None = None
    timed: tuple[float, float] | None = None
    idle_watts: float | None = None

    @property
    def energy(self) -> Energy:
        """Energy drawn in the timed part; or until now, or until the region was left."""
        return self.sampler.energy_between(*self.timed) if self.timed else self.sampler.energy()

    def set_timed_part(self, nanoseconds: int, ended: float | None = None) -> None:
        """The timed part took so long, and ended just now or at `ended` of time.monotonic()."""
        last = self.sampler.last_sample
        # A region that was left ended with its last sample; the sampler's process took its time.
        now = last.awake if last is not None and self.ended is not None else time.monotonic()
        end = now if ended is None else ended
        self.timed = (end - nanoseconds / 1e9, end)

    def record_fields(self, tokens: float) -> dict[str, Any]:
        """The record's fields for `tokens` units of work; empty on a machine without a sensor.

        Joules of a token come with the rails that were summed, and are left out where the samples
        have gaps.
        """
        energy = self.energy
        if energy.total_joules is None:
            return {}
        half = energy.half_width
        interval = None
        if energy.is_complete and tokens and half is not None:
            interval = [(energy.total_joules + sign * half) / tokens for sign in (-1, 1)]
        return {
            "joules_per_token": energy.total_joules / tokens
            if energy.is_complete and tokens
            else None,
            "tokens_per_joule": tokens / energy.total_joules if energy.is_complete else None,
            "energy": {
                "joules": energy.total_joules,
                "half_width_joules": half,
                "joules_per_token_interval": interval,
                "coverage": COVERAGE,
                "boundary": energy.boundary,
                "summed": list(energy.summed),
                "rails": energy.joules,
                "mean_watts": energy.mean_watts,
                "seconds": energy.seconds,
                "gap_seconds": energy.gap_seconds,
                "samples": energy.samples,
                "sensors": [dataclasses.asdict(sensor) for sensor in self.sampler.chip_averagings],
                "idle_watts": self.idle_watts,
                "tokens": tokens,
                "started": self._edge_in_unix_time(0, self.started),
                "ended": self._edge_in_unix_time(1, self.ended),
            },
        }

    def _edge_in_unix_time(self, edge: int, otherwise: float | None) -> float | None:
        if self.timed is None:
            return otherwise
        return self.timed[edge] + time.time() - time.monotonic()


def energy_note(record: Mapping[str, Any]) -> str:
    """Say of a record what its joules hold, how sure they are, and what the machine drew before."""
    runs = [run for run in record["energy"] if run]
    first = runs[0]
    words = [f"Energy of {record['backend']} {record['test']}: the timed region's"]
    words.append(f"sum of {', '.join(first.get('summed') or ['its rails'])}")
    if boundary := first.get("boundary"):
        words.append(f"that is the {boundary}")
    intervals = [
        ends for run in runs if len(ends := run.get("joules_per_token_interval") or []) == 2
    ]
    if intervals:
        low, high = (statistics.median(edges) for edges in zip(*intervals, strict=True))
        words.append(f"{low:.3g} to {high:.3g} J a token in {COVERAGE:.0%} of such samplings")
    if (idle := first.get("idle_watts")) is not None:
        words.append(f"{idle:.1f} W before the first backend opened, not subtracted")
    return "; ".join(words) + "."


def median_reading_count(runs: Sequence[Mapping[str, Any] | None] | None) -> float:
    """The sensor's readings in the timed part of a repetition: the median over all repetitions.

    `runs` is the `energy` of a record: one entry a repetition.
    """
    counts = [run["samples"] for run in runs or () if run]
    return float(statistics.median(counts)) if counts else 0.0


def energy_fields(samples: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The row's fields from `record_fields` of its repetitions: medians, and each of them."""
    known = [run for run in samples if run and run["joules_per_token"] is not None]
    if not known:
        return {}
    fields: dict[str, Any] = {
        name: statistics.median(run[name] for run in known)
        for name in ("joules_per_token", "tokens_per_joule")
    }
    return fields | {"energy": [run["energy"] if run else None for run in samples]}


def parse_rails(spec: str | None, roots: Roots | None = None) -> tuple[str, ...]:
    """The rails in `--rails`, as they are called; raises BenchError for one that is not there."""
    if spec is None:
        return ()
    choice = tuple(dict.fromkeys(name.strip() for name in spec.split(",")))
    try:
        require_known_rails(choice, read_board_state(roots).readings.rails)
    except ValueError as error:
        raise BenchError(f"--rails {spec}: {error}") from None
    return choice


class IdlePower(NamedTuple):
    """The machine's draw before any work, in watts, and whether anything measures it at all."""

    watts: float | None = None
    metered: bool = True


UNKNOWN_IDLE = IdlePower()


def measure_idle_power(roots: Roots | None = None, rails: tuple[str, ...] = ()) -> IdlePower:
    """Return what is drawn before any work; at once where no sensor answers."""
    with EnergySampler(roots, BENCHMARK_HERTZ, rails=rails) as sampler:
        metered = sampler.energy().boundary is not None or bool(sampler.health().errors)
        if metered:
            time.sleep(IDLE_SECONDS)
    return IdlePower(sampler.energy().mean_watts, metered)


@contextmanager
def measure_energy(
    roots: Roots | None = None,
    hertz: float = BENCHMARK_HERTZ,
    rails: tuple[str, ...] = (),
    idle: IdlePower = UNKNOWN_IDLE,
) -> Iterator[MeasuredEnergy]:
    """Measure the energy of what happens inside, `hertz` times a second in a process of its own.

    `rails` names those to sum; else the ones that are known to make up the machine. Where nothing
    is metered no process is started.
    """
    sampler = EnergySampler(roots, hertz, keep=True, rails=rails)
    if idle.metered:
        sampler.start_sampling()
    run = MeasuredEnergy(sampler, time.time(), idle_watts=idle.watts)
    try:
        yield run
    finally:
        sampler.stop_after_last_sample()
        run.ended = time.time()


def require_board_state(spec: str, roots: Roots | None = None) -> None:
    """Refuse to go on unless the board meets `spec`: BenchError says what to run."""
    try:
        problems = unmet_conditions(spec, read_board_state(roots), roots)
    except ValueError as error:
        raise BenchError(f"--require {spec}: {error}") from None
    if problems:
        raise BenchError(f"--require {spec}: {'. '.join(map(str, problems))}")


def board_warnings(
    before: BoardState, after: BoardState, roots: Roots | None = None
) -> tuple[BenchWarning, ...] | None:
    """Return what between two states of a Jetson makes a figure suspect; None of no Jetson."""
    return tuple(_jetson_warnings(before, after, roots or Roots())) if is_jetson(after) else None


def _jetson_warnings(before: BoardState, after: BoardState, roots: Roots) -> Iterator[BenchWarning]:
    throttled = WarningKind.THROTTLED
    for reason, count in after.throttles_by_reason_since(before).items():
        yield BenchWarning(throttled, f"throttled: {reason.replace('_', '-')} events", str(count))
    for name in dict.fromkeys((*before.raised_alerts, *after.raised_alerts)):
        yield BenchWarning(throttled, f"throttling: {name} was raised")
    if before.power_mode != after.power_mode:
        change = f"from {before.power_mode} to {after.power_mode}"
        text = "the power mode changed between samples"
        yield BenchWarning(WarningKind.POWER_MODE, text, change)
    for problem in maxn_problems(after, roots):
        yield BenchWarning(WarningKind.POWER_MODE, str(problem))
    for problem in pinned_problems(after):
        yield BenchWarning(WarningKind.CLOCKS_NOT_PINNED, str(problem))


def has_sensors(state: BoardState) -> bool:
    """True if the machine shows power, temperatures or a power mode: else its state is empty."""
    readings = state.readings
    return bool(readings.rails or readings.zones or readings.gpus or readings.power_mode)


def is_jetson(state: BoardState) -> bool:
    """True if the device tree names a Tegra."""
    return state.identity is not None and bool(state.identity.soc)


def hottest_celsius(celsius: float, roots: Roots | None = None) -> float:
    """The hottest zone in °C, for `--cooldown celsius`; raises BenchError without a sensor."""
    zones = read_zones(FileReader(roots or Roots()))
    if (found := BoardState(zones).junction_or_hottest_celsius) is None:
        raise BenchError(f"--cooldown {celsius:g}: this machine has no temperature sensor")
    return found


def require_textfile_directory(directory: Path) -> None:
    """Raise BenchError, before anything is measured, for a directory that cannot be written."""
    if not directory.is_dir():
        raise BenchError(f"--textfile {directory}: no such directory; name the collector's")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise BenchError(f"--textfile {directory}: not writable for this user")


def wait_for_cooldown(
    celsius: float,
    tell: Callable[[float], None] = lambda _: None,
    *,
    roots: Roots | None = None,
    limit: float = COOLDOWN_LIMIT,
    interval: float = COOLDOWN_INTERVAL,
) -> float:
    """Wait until the board is no hotter than `celsius`; returns the seconds it took.

    `tell` gets the temperature at every look. Raises BenchError without a sensor, and when `limit`
    seconds did not suffice.
    """
    begun = time.monotonic()
    while True:
        now, waited = hottest_celsius(celsius, roots), time.monotonic() - begun
        if now <= celsius:
            return waited
        if waited >= limit:
            raise BenchError(
                f"--cooldown {celsius:g}: still {now:.1f} °C after {waited:.0f} s; "
                "give a higher temperature or cool the board better"
            )
        tell(now)
        time.sleep(interval)


def find_metric_in_record(record: Mapping[str, Any], field: str) -> float | None:
    """A field of a record, `energy.joules` being one of the last repetition; None if missing."""
    outer, _, inner = field.partition(".")
    found = record.get(outer)
    if not inner:
        return found
    repetitions = [found] if isinstance(found, Mapping) else found or []
    return next((last.get(inner) for last in reversed(repetitions) if last), None)


def write_metrics_file(records: Iterable[Mapping[str, Any]], directory: Path) -> Path:
    """Write the records' figures for node_exporter's textfile collector; returns the file.

    Raises BenchError where the directory is missing, which nobody would collect from, or cannot be
    written.
    """
    require_textfile_directory(directory)
    # Rows that differ in other settings only would be one series: the last of them stays.
    rows = {
        tuple(str(record.get(field) or "") for field in LABELS.values()): record
        for record in records
    }
    registry = CollectorRegistry()
    for name, text, field in METRICS:
        numbers = {labels: find_metric_in_record(record, field) for labels, record in rows.items()}
        known = {labels: number for labels, number in numbers.items() if number is not None}
        if known:
            gauge = Gauge(f"orinbench_{name}", text, list(LABELS), registry=registry)
            for labels, number in known.items():
                gauge.labels(*labels).set(number)
    written = "When these figures were written, as Unix time."
    Gauge("orinbench_written_seconds", written, registry=registry).set_to_current_time()
    file = directory / TEXTFILE
    write_atomically(file, generate_latest(registry))
    return file
