"""From readings to Prometheus metric families: names, units, help, labels.

A family without samples is left out, header and all. Nothing that node_exporter gives is here.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from orinboard.boundary import module_watts
from orinboard.readings import Readings
from orinboard.sources import Snapshot

Value = float | int | bool | None
Row = tuple[tuple[str, ...], Value]


def family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    rows: Iterable[Row],
) -> Iterator[Metric]:
    """The family, if a row of it has a value."""
    metric = kind(name, help_text, labels=labels)
    for values, value in rows:
        if value is not None:
            metric.add_metric(values, float(value))
    if metric.samples:
        yield metric


def gauge(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[Row]
) -> Iterator[Metric]:
    """A gauge `jetson_<name>`."""
    return family(GaugeMetricFamily, f"jetson_{name}", help_text, labels, rows)


def counter(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[Row]
) -> Iterator[Metric]:
    """A counter `jetson_<name>_total`."""
    return family(CounterMetricFamily, f"jetson_{name}", help_text, labels, rows)


def identity(r: Readings) -> Iterator[Metric]:
    """Identity of the board and its power mode."""
    labels = ("model", "soc", "l4t", "firmware")
    if (board := r.identity) and board.soc:
        which = (board.model, board.soc, board.l4t or "", board.firmware or "")
        yield from gauge("info", "The board and its releases; always 1.", labels, [(which, 1)])
    if mode := r.power_mode:
        row = (str(mode.id), mode.name or "")
        yield from gauge(
            "power_mode_info", "The nvpmodel power mode; always 1.", ("id", "name"), [(row, 1)]
        )
    yield from gauge(
        "clocks_pinned",
        "1 if the minimum and maximum clock of a domain are equal, as jetson_clocks sets them.",
        ("domain",),
        [((domain,), fixed) for domain, fixed in r.pinned.items()],
    )


def gpu(r: Readings) -> Iterator[Metric]:
    """Load, clocks, governor and multiprocessors."""

    def each(field: str) -> list[Row]:
        return [((g.name,), getattr(g, field)) for g in r.gpus]

    only = ("gpu",)
    yield from gauge("gpu_load_ratio", "Load of the GPU.", only, each("load"))
    yield from gauge("gpu_frequency_hertz", "Clock of the GPU.", only, each("current_hz"))
    yield from gauge("gpu_min_frequency_hertz", "Minimum clock of the GPU.", only, each("min_hz"))
    yield from gauge("gpu_max_frequency_hertz", "Maximum clock of the GPU.", only, each("max_hz"))
    yield from gauge(
        "gpu_multiprocessors", "Streaming multiprocessors switched on.", only, each("sms")
    )
    yield from gauge(
        "gpu_governor_info",
        "The governor that sets the clock of the GPU; always 1.",
        ("gpu", "governor"),
        [((g.name, g.governor), 1) for g in r.gpus if g.governor],
    )


def power(r: Readings) -> Iterator[Metric]:
    """Rails and the module."""
    labels = ("rail", "device")

    def each(field: str) -> list[Row]:
        return [((rail.name, rail.device), getattr(rail, field)) for rail in r.rails]

    yield from gauge("rail_voltage_volts", "Voltage of a rail.", labels, each("volts"))
    yield from gauge(
        "rail_current_amperes",
        "Current of a rail; slightly negative readings occur at idle.",
        labels,
        each("amperes"),
    )
    yield from gauge("rail_power_watts", "Power of a rail.", labels, each("watts"))
    yield from gauge(
        "rail_current_limit_amperes",
        "Current at which a rail raises its alarm.",
        (*labels, "level"),
        [((x.name, x.device, level), amperes) for x in r.rails for level, amperes in x.limits],
    )
    yield from gauge(
        "rail_alarm",
        "1 if the current of a rail is above its limit.",
        (*labels, "level"),
        [((x.name, x.device, level), raised) for x in r.rails for level, raised in x.alarms],
    )
    yield from gauge(
        "module_power_watts",
        "Power of the module: VDD_IN, else the sum of the rails that feed it.",
        (),
        [((), module_watts(r.rails))],
    )


def thermal(r: Readings) -> Iterator[Metric]:
    """Zones, trips, cooling devices, fans."""
    yield from gauge(
        "temperature_celsius",
        "Temperature of a zone; no sample while the zone is gated.",
        ("zone",),
        [((zone.name,), zone.celsius) for zone in r.zones],
    )
    yield from gauge(
        "thermal_zone_online",
        "1 if a zone can be read; 0 while the unit that it measures is gated.",
        ("zone",),
        [((zone.name,), zone.celsius is not None) for zone in r.zones],
    )
    yield from gauge(
        "temperature_trip_celsius",
        "Temperature at which the kernel reacts.",
        ("zone", "trip", "type"),
        [((z.name, str(t.index), t.kind), t.celsius) for z in r.zones for t in z.trips],
    )
    yield from gauge(
        "cooling_state_ratio",
        "State of a cooling device or throttle alert, as a share of its maximum state.",
        ("type",),
        [((cooling.name,), cooling.ratio) for cooling in r.coolings],
    )
    yield from gauge(
        "fan_pwm_ratio", "Duty cycle of a fan.", ("fan",), [((f.name,), f.pwm) for f in r.fans]
    )
    yield from gauge(
        "fan_speed_rpm",
        "Speed of a fan in revolutions per minute.",
        ("fan",),
        [((f.name,), f.rpm) for f in r.fans],
    )


def throttle(r: Readings) -> Iterator[Metric]:
    """Electrical throttling."""
    yield from counter(
        "throttle_events",
        "Electrical throttle events since the exporter started.",
        ("event", "reason"),
        [((t.event, t.reason), t.count) for t in r.throttles],
    )
    yield from gauge(
        "throttle_enabled",
        "1 if an event slows the chip down.",
        ("event",),
        [((t.event,), t.enabled) for t in r.throttles],
    )


def memory(r: Readings) -> Iterator[Metric]:
    """Memory figures that tegrastats shows and node_exporter does not."""
    if m := r.memory:
        yield from gauge(
            "nvmap_memory_bytes", "Memory allocated for the GPU.", (), [((), m.nvmap_bytes)]
        )
        yield from gauge(
            "memory_largest_free_block_bytes",
            "Size of the largest free block of physical memory.",
            (),
            [((), m.largest_free_block_bytes)],
        )
        yield from gauge(
            "memory_largest_free_blocks",
            "Number of free blocks of the largest size.",
            (),
            [((), m.largest_free_blocks)],
        )


def privileged(r: Readings) -> Iterator[Metric]:
    """Families for root only: memory controller and engines."""
    if emc := r.emc:
        yield from gauge(
            "emc_frequency_hertz",
            "Clock of the memory controller.",
            (),
            [((), emc.current_hz)],
        )
        yield from gauge(
            "emc_max_frequency_hertz",
            "Maximum clock of the memory controller.",
            (),
            [((), emc.max_hz)],
        )
    yield from gauge(
        "emc_load_ratio",
        "Share of the memory bandwidth in use, as tegrastats shows it.",
        (),
        [((), r.emc_load)],
    )
    yield from gauge(
        "engine_frequency_hertz",
        "Clock of an engine.",
        ("engine",),
        [((engine.name,), engine.current_hz) for engine in r.engines],
    )
    yield from gauge(
        "engine_enabled",
        "1 if the clock of an engine is running.",
        ("engine",),
        [((engine.name,), engine.enabled) for engine in r.engines],
    )


def sources(snapshot: Snapshot, errors: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Outcome of reading; `errors` counts since the start, by source and errno."""
    outcomes = snapshot.outcomes.items()
    yield from gauge(
        "scrape_source_success",
        "1 if a source that the board has was read completely.",
        ("source",),
        [((name,), not outcome.errors) for name, outcome in outcomes],
    )
    yield from gauge(
        "scrape_source_duration_seconds",
        "Time taken to read a source.",
        ("source",),
        [((name,), outcome.seconds) for name, outcome in outcomes],
    )
    yield from counter(
        "read_errors",
        "Files that could not be read or understood, by source and errno.",
        ("source", "errno"),
        [(key, count) for key, count in sorted(errors.items())],
    )


def energy(joules: Mapping[str, float], gap_seconds: float) -> Iterator[Metric]:
    """Energy since the exporter started."""
    yield from counter(
        "energy_joules",
        "Energy drawn by a rail, or by the module, while it was sampled.",
        ("rail",),
        [((rail,), value) for rail, value in joules.items()],
    )
    if joules:
        yield from counter(
            "energy_gap_seconds",
            "Time whose energy is missing from the counters, because of missing samples or sleep.",
            (),
            [((), gap_seconds)],
        )


#: Every part of a board's exposition.
BOARD = (identity, gpu, power, thermal, throttle, memory, privileged)
