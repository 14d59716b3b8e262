"""The last ten minutes of a board, for the page: a point every few seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from orinboard.board import BoardState
from orinboard.readings import CoreTicks, Readings
from orinboard.summed_rails import rails_by_key

#: A point every so many seconds, and how many are kept: ten minutes.
INTERVAL_SECONDS, POINTS = 2.0, 300


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment; `seconds` of CLOCK_MONOTONIC, `events` the throttle counters by reason.

    `rails` are watts by the rail's key.
    """

    seconds: float
    watts: float | None
    load: float | None
    celsius: float | None
    events: dict[str, int]
    cores: tuple[CoreTicks, ...] = ()
    rails: dict[str, float | None] = field(default_factory=dict)


def moment_of_readings(readings: Readings, seconds: float) -> Moment:
    """The moment that `readings` show."""
    state = BoardState(readings)
    return Moment(
        seconds,
        state.module_watts,
        next((gpu.load for gpu in readings.gpus if gpu.load is not None), None),
        state.junction_or_hottest_celsius,
        {t.reason: t.count for t in readings.throttles if t.count is not None},
        readings.host.cores if readings.host else (),
        {key: rail.watts for key, rail in rails_by_key(readings.rails).items()},
    )


def core_loads(before: Sequence[CoreTicks], after: Sequence[CoreTicks]) -> dict[int, float]:
    """The load of each CPU between two readings, 0 to 1; none where no time went by."""
    then = {core.cpu: core for core in before}
    loads = {}
    for core in after:
        old = then.get(core.cpu)
        if old and core.total > old.total:
            loads[core.cpu] = min(max((core.busy - old.busy) / (core.total - old.total), 0), 1)
    return loads


def iter_throttle_moments(history: Sequence[Moment]) -> Iterator[tuple[Moment, dict[str, int]]]:
    """Points at which events were counted, with how many; a counter that went back began again."""
    for before, after in pairwise(history):
        events = {}
        for reason, count in after.events.items():
            old = before.events.get(reason, count)
            if more := count - old if count >= old else count:
                events[reason] = more
        if events:
            yield after, events
