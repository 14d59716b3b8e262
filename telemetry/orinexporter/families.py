"""From readings to Prometheus metric families: names, units, help, labels.

A family without samples is left out, header and all. Nothing that node_exporter gives is here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orinboard.readings import Readings
from orinboard.summed_rails import module_watts

Value = float | int | bool | None
Row = tuple[tuple[str, ...], Value]
KnownRows = list[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """`jetson_<name>`, a counter where its name ends in `_total`.

    `rows` makes the samples of what it is given: values of the labels, and the figure.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    rows: Callable[..., Iterable[Row]]

    def known_rows(self, *given: object) -> KnownRows:
        """The rows that have a value."""
        return [(labels, float(v)) for labels, v in self.rows(*given) if v is not None]

    def prometheus_metric(self, rows: KnownRows) -> Metric:
        """The family with these rows."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        metric = kind(f"jetson_{self.name}", self.help, labels=self.labels)
        for labels, value in rows:
            metric.add_metric(labels, value)
        return metric


def row_reader(things: str, value: str, *labels: str) -> Callable[[Readings], Iterable[Row]]:
    """Rows of a field of the readings: one for each of its things, labelled by its own fields."""
    names = labels or ("name",)
    return lambda r: [
        (tuple(getattr(thing, name) for name in names), getattr(thing, value))
        for thing in getattr(r, things)
    ]


def family_of_each(name: str, text: str, label: str, field: str) -> MetricFamily:
    """A family of a field such as `gpus.load`, a row for each by its name."""
    return MetricFamily(name, text, (label,), row_reader(*field.split(".")))


def family_of_rails(name: str, text: str, value: str) -> MetricFamily:
    """The same of rails, which have a device, too."""
    return MetricFamily(name, text, RAIL, row_reader("rails", value, "name", "device"))


def family_of_one(name: str, text: str, field: str) -> MetricFamily:
    """The same of what a board has once, or not at all: `memory.nvmap_bytes`."""
    thing, value = field.split(".")
    return MetricFamily(name, text, (), lambda r: [((), getattr(getattr(r, thing), value, None))])


def board_info_rows(r: Readings) -> list[Row]:
    """Identity of a Jetson."""
    if r.identity is None or not r.identity.soc:
        return []
    release = r.identity.l4t or ""
    return [((r.identity.model, r.identity.soc, release, r.identity.firmware or ""), 1)]


RAIL = ("rail", "device")
LEVEL = (*RAIL, "level")

#: Families of a board's readings.
BOARD = (
    MetricFamily(
        "info",
        "The board and its releases; always 1.",
        ("model", "soc", "l4t", "firmware"),
        board_info_rows,
    ),
    MetricFamily(
        "power_mode_info",
        "The nvpmodel power mode; always 1.",
        ("id", "name"),
        lambda r: [((str(m.id), m.name or ""), 1) for m in [r.power_mode] if m],
    ),
    MetricFamily(
        "clocks_pinned",
        "1 if the minimum and maximum clock of a domain are equal, as jetson_clocks sets them.",
        ("domain",),
        lambda r: [((domain,), fixed) for domain, fixed in r.pinned_by_domain.items()],
    ),
    family_of_each("gpu_load_ratio", "Load of the GPU.", "gpu", "gpus.load"),
    family_of_each("gpu_frequency_hertz", "Clock of the GPU.", "gpu", "gpus.current_hz"),
    family_of_each("gpu_min_frequency_hertz", "Minimum clock of the GPU.", "gpu", "gpus.min_hz"),
    family_of_each("gpu_max_frequency_hertz", "Maximum clock of the GPU.", "gpu", "gpus.max_hz"),
    family_of_each(
        "gpu_multiprocessors", "Streaming multiprocessors switched on.", "gpu", "gpus.sms"
    ),
    MetricFamily(
        "gpu_governor_info",
        "The governor that sets the clock of the GPU; always 1.",
        ("gpu", "governor"),
        lambda r: [((g.name, g.governor), 1) for g in r.gpus if g.governor],
    ),
    family_of_rails("rail_voltage_volts", "Voltage of a rail.", "volts"),
    family_of_rails(
        "rail_current_amperes",
        "Current of a rail; slightly negative readings occur at idle.",
        "amperes",
    ),
    family_of_rails("rail_power_watts", "Power of a rail.", "watts"),
    MetricFamily(
        "rail_current_limit_amperes",
        "Current at which a rail raises its alarm.",
        LEVEL,
        lambda r: [((x.name, x.device, level), amps) for x in r.rails for level, amps in x.limits],
    ),
    MetricFamily(
        "rail_alarm",
        "1 if the current of a rail is above its limit.",
        LEVEL,
        lambda r: [((x.name, x.device, level), up) for x in r.rails for level, up in x.alarms],
    ),
    MetricFamily(
        "module_power_watts",
        "Power of the module: VDD_IN, or its inputs' sum; of the system on a Thor.",
        (),
        lambda r: [((), module_watts(r.rails))],
    ),
    family_of_each(
        "temperature_celsius",
        "Temperature of a zone; no sample while the zone is gated.",
        "zone",
        "zones.celsius",
    ),
    MetricFamily(
        "thermal_zone_online",
        "1 if a zone can be read; 0 while the unit that it measures is gated.",
        ("zone",),
        lambda r: [((zone.name,), zone.celsius is not None) for zone in r.zones],
    ),
    MetricFamily(
        "temperature_trip_celsius",
        "Temperature at which the kernel reacts.",
        ("zone", "trip", "type"),
        lambda r: [((z.name, str(t.index), t.kind), t.celsius) for z in r.zones for t in z.trips],
    ),
    family_of_each(
        "cooling_state_ratio",
        "State of a cooling device or throttle alert, as a share of its maximum state.",
        "type",
        "coolings.ratio",
    ),
    family_of_each("fan_pwm_ratio", "Duty cycle of a fan.", "fan", "fans.pwm"),
    family_of_each("fan_speed_rpm", "Speed of a fan in revolutions per minute.", "fan", "fans.rpm"),
    MetricFamily(
        "throttle_events_total",
        "Electrical throttle events since the exporter started.",
        ("event", "reason"),
        row_reader("throttles", "count", "event", "reason"),
    ),
    MetricFamily(
        "throttle_enabled",
        "1 if an event slows the chip down.",
        ("event",),
        row_reader("throttles", "enabled", "event"),
    ),
    family_of_one("nvmap_memory_bytes", "Memory allocated for the GPU.", "memory.nvmap_bytes"),
    family_of_one(
        "memory_largest_free_block_bytes",
        "Size of the largest free block of physical memory.",
        "memory.largest_free_block_bytes",
    ),
    family_of_one(
        "memory_largest_free_blocks",
        "Number of free blocks of the largest size.",
        "memory.largest_free_blocks",
    ),
    family_of_one("emc_frequency_hertz", "Clock of the memory controller.", "emc.current_hz"),
    family_of_one(
        "emc_max_frequency_hertz", "Maximum clock of the memory controller.", "emc.max_hz"
    ),
    MetricFamily(
        "emc_activity_hertz",
        "Clocks a second in which memory was used, as the activity monitor counts them.",
        (),
        lambda r: [((), r.emc_activity_hz)],
    ),
    family_of_each("engine_frequency_hertz", "Clock of an engine.", "engine", "engines.current_hz"),
    family_of_each("engine_load_ratio", "Load of an engine.", "engine", "engines.load"),
    family_of_each(
        "engine_enabled", "1 if the clock of an engine is running.", "engine", "engines.enabled"
    ),
)

#: Families of what a running EnergySampler has counted.
ENERGY = (
    MetricFamily(
        "energy_joules_total",
        "Energy drawn by a rail, or by the module, while it was sampled.",
        ("rail",),
        lambda sampler: [((rail,), value) for rail, value in sampler.joules_by_rail().items()],
    ),
    MetricFamily(
        "energy_gap_seconds_total",
        "Time whose energy is missing from the counters, because of missing samples or sleep.",
        (),
        lambda sampler: [((), sampler.energy().gap_seconds)] if sampler.joules_by_rail() else [],
    ),
)

#: Families of a Snapshot and of errors counted since the start, by source and errno.
SOURCES = (
    MetricFamily(
        "scrape_source_success",
        "1 if a source that the board has was read completely.",
        ("source",),
        lambda snapshot, _: [((n,), not o.errors) for n, o in snapshot.outcomes.items()],
    ),
    MetricFamily(
        "scrape_source_duration_seconds",
        "Time taken to read a source.",
        ("source",),
        lambda snapshot, _: [((n,), o.seconds) for n, o in snapshot.outcomes.items()],
    ),
    MetricFamily(
        "read_errors_total",
        "Files that could not be read or understood, by source and errno.",
        ("source", "errno"),
        lambda _, errors: sorted(errors.items()),
    ),
)
