"""The state of the board around a measurement, as one record."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from orinboard.files import GATED, Roots
from orinboard.readings import Identity, PowerMode, Readings, ThrottleCounter
from orinboard.sensors import nvgpu
from orinboard.sources import SOURCES, UNPRIVILEGED, BoardReader
from orinboard.summed_rails import module_watts

#: The zone that is the hottest of all on a Tegra: the junction.
JUNCTION = "tj"
#: Endings of the names of L4T's throttle alerts, and NVML's reasons for running slower.
ALERTS = ("-alert", "-slowdown", "-power-cap", "-power-brake")


@dataclass(frozen=True, slots=True)
class BoardState:
    """One moment of a board: `sms_source` is `nvgpu` (asked) or `sysfs` (concluded)."""

    readings: Readings
    sms: int | None = None
    sms_source: str | None = None
    errors: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity | None:
        """The board, where it has a device tree."""
        return self.readings.identity

    @property
    def power_mode(self) -> PowerMode | None:
        """nvpmodel's mode."""
        return self.readings.power_mode

    @property
    def pinned_by_domain(self) -> dict[str, bool]:
        """True for each domain whose clocks are fixed."""
        return self.readings.pinned_by_domain

    @property
    def celsius_by_zone(self) -> dict[str, float]:
        """Degrees Celsius by zone, of the zones that answer."""
        zones = self.readings.zones
        return {zone.name: zone.celsius for zone in zones if zone.celsius is not None}

    @property
    def junction_or_hottest_celsius(self) -> float | None:
        """The junction, or the hottest zone where no zone is called so."""
        temperatures = self.celsius_by_zone
        return temperatures.get(JUNCTION, max(temperatures.values(), default=None))

    @property
    def module_watts(self) -> float | None:
        """The module's power now."""
        return module_watts(self.readings.rails)

    @property
    def raised_alerts(self) -> tuple[str, ...]:
        """The throttle alerts that are raised at this moment."""
        return tuple(
            cooling.name
            for cooling in self.readings.coolings
            if cooling.ratio > 0 and cooling.name.endswith(ALERTS)
        )

    def throttles_by_reason_since(self, before: "BoardState") -> dict[str, int]:
        """Events by reason between two states; none of a counter that went back."""
        counts = {throttle.event: throttle for throttle in before.readings.throttles}
        events = {}
        for throttle in self.readings.throttles:
            grown = throttle_events_between(counts.get(throttle.event), throttle)
            if grown:
                events[throttle.reason] = grown
        return events

    def json_record(self) -> dict[str, Any]:
        """The state as plain values for JSON, without what the board does not have."""
        plain = dataclasses.asdict(self.readings)
        record = {name: value for name, value in plain.items() if value not in (None, ())}
        record |= {"pinned": self.pinned_by_domain, "throttling": list(self.raised_alerts)}
        if self.sms is not None:
            record |= {"sms": self.sms, "sms_source": self.sms_source}
        if self.module_watts is not None:
            record["module_watts"] = self.module_watts
        if self.errors:
            record["errors"] = list(self.errors)
        return record


def throttle_events_between(before: ThrottleCounter | None, after: ThrottleCounter) -> int:
    """Events from one reading to the next.

    A counter that went back was set anew, by a reboot, a suspend or a new driver. It then begins
    anywhere, so nothing is known of what it counted.
    """
    if before is None or before.count is None or after.count is None:
        return 0
    return max(after.count - before.count, 0)


def read_state(roots: Roots | None = None, call: nvgpu.Ioctl = nvgpu.call_ioctl) -> BoardState:
    """Read everything that this user may see, once. Never raises, never waits above the budget."""
    roots = roots or Roots()
    with BoardReader(roots, SOURCES) as board:
        snapshot = board.read()
    readings = snapshot.readings
    # debugfs is root's: that it is closed to a user is no news.
    errors = tuple(
        f"{name}: {error}"
        for name, outcome in snapshot.outcomes.items()
        for error in outcome.errors
        if name in UNPRIVILEGED and error != GATED
    )
    try:
        sms, source = nvgpu.sm_count(roots, call), "nvgpu"
    except OSError as error:
        sms, source, errors = None, "sysfs", (*errors, f"nvgpu: {error}")
    if sms is None:
        sms = next((gpu.sms for gpu in readings.gpus if gpu.sms is not None), None)
        source = "sysfs"
    return BoardState(readings, sms, source if sms is not None else None, errors)
