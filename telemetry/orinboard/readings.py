"""Readings by type: hertz, volts, amperes, watts, joules, degrees Celsius, bytes, ratios."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: load as a ratio, clocks in Hz; `sms` are the multiprocessors switched on."""

    name: str
    load: float | None = None
    current_hz: int | None = None
    min_hz: int | None = None
    max_hz: int | None = None
    governor: str | None = None
    railgate: bool | None = None
    tpc_pg_mask: int | None = None
    sms: int | None = None


@dataclass(frozen=True, slots=True)
class Rail:
    """One supply; `joules` is a counter the hardware keeps, which starts again at `joules_wrap`.

    `chip` is what measures it: `ina3221`, `ina238`, `nvml`, `rapl`. `step_watts` is the smallest
    difference between two powers that the chip shows; 0 if that is not known. A rail that was not
    read again since the sample before is not `fresh`.
    """

    name: str
    device: str
    volts: float | None = None
    amperes: float | None = None
    watts: float | None = None
    limits: tuple[tuple[str, float], ...] = ()
    alarms: tuple[tuple[str, bool], ...] = ()
    joules: float | None = None
    joules_wrap: float | None = None
    chip: str = ""
    step_watts: float = 0.0
    fresh: bool = True
    at: float | None = None


@dataclass(frozen=True, slots=True)
class TripPoint:
    """A temperature at which the kernel acts: passive, hot, critical, active."""

    index: int
    kind: str
    celsius: float


@dataclass(frozen=True, slots=True)
class ThermalZone:
    """One thermal zone; `celsius` is None while the block it measures is gated."""

    name: str
    celsius: float | None
    trips: tuple[TripPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class CoolingState:
    """One cooling device or throttle alert: its state over its greatest state."""

    name: str
    ratio: float


@dataclass(frozen=True, slots=True)
class ThrottleCounter:
    """Events since boot (the start is arbitrary) of one electrical throttle."""

    event: str
    reason: str
    count: int | None = None
    enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class Fan:
    """A fan's duty cycle as a ratio, and its speed."""

    name: str
    pwm: float | None = None
    rpm: int | None = None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """GPU allocations, and the largest free piece of physical memory with how many there are."""

    nvmap_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    largest_free_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class CpuClock:
    """One online CPU's clocks in Hz."""

    cpu: int
    current_hz: int | None
    min_hz: int | None
    max_hz: int | None


@dataclass(frozen=True, slots=True)
class OnlineCpus:
    """The CPUs that are online; `clocks` has those with a cpufreq driver."""

    online: tuple[int, ...]
    clocks: tuple[CpuClock, ...] = ()


@dataclass(frozen=True, slots=True)
class PowerMode:
    """nvpmodel's mode; `name` is None when its configuration file is not to be found."""

    id: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of the board; `l4t` is the system's release and `firmware` the boot firmware's."""

    model: str
    soc: str | None = None
    l4t: str | None = None
    firmware: str | None = None


@dataclass(frozen=True, slots=True)
class EngineClock:
    """The clock of the memory controller or of an engine, in Hz, and how much of it is busy."""

    name: str
    current_hz: int | None = None
    min_hz: int | None = None
    max_hz: int | None = None
    enabled: bool | None = None
    load: float | None = None


@dataclass(frozen=True, slots=True)
class CoreTicks:
    """Ticks that a CPU was busy, and all of them, since boot."""

    cpu: int
    busy: int
    total: int


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Memory and swap in bytes, and the CPUs' time: for people, as node_exporter exports them."""

    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    cores: tuple[CoreTicks, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory of the GPU's, in bytes: by nvmap, or by NVML on a Thor."""

    pid: int
    name: str
    nvmap_bytes: int


Part = TypeVar("Part", GpuMemory, EngineClock)


def filled_from_other(one: Part, other: Part) -> Part:
    """One of two sources' values, with the other's where it has none."""
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return type(one)(*(theirs if mine is None else mine for mine, theirs in pairs))


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of one or more sources; those not given are empty or None."""

    gpus: tuple[Gpu, ...] = ()
    rails: tuple[Rail, ...] = ()
    zones: tuple[ThermalZone, ...] = ()
    coolings: tuple[CoolingState, ...] = ()
    throttles: tuple[ThrottleCounter, ...] = ()
    fans: tuple[Fan, ...] = ()
    engines: tuple[EngineClock, ...] = ()
    emc: EngineClock | None = None
    emc_activity_hz: int | None = None
    memory: GpuMemory | None = None
    host: HostUsage | None = None
    processes: tuple[GpuProcess, ...] = ()
    cpu: OnlineCpus | None = None
    power_mode: PowerMode | None = None
    identity: Identity | None = None

    def __add__(self, other: "Readings") -> "Readings":
        merged: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, GpuMemory) and isinstance(theirs, GpuMemory):
                merged[field.name] = filled_from_other(mine, theirs)
            elif field.name == "engines":
                # What everybody may read of an engine, and what root adds.
                engines = {engine.name: engine for engine in mine}
                for engine in theirs:
                    engines[engine.name] = filled_from_other(
                        engines.get(engine.name, engine), engine
                    )
                merged[field.name] = tuple(engines.values())
            else:
                merged[field.name] = mine + theirs if isinstance(mine, tuple) else mine or theirs
        return Readings(**merged)

    @property
    def pinned_by_domain(self) -> dict[str, bool]:
        """By domain, whether the least clock is also the greatest, as jetson_clocks makes it."""
        ranges = {
            "gpu": [(gpu.min_hz, gpu.max_hz) for gpu in self.gpus],
            "cpu": [(clock.min_hz, clock.max_hz) for clock in self.cpu.clocks] if self.cpu else [],
        }
        known = {
            domain: [(low, high) for low, high in pairs if low is not None and high is not None]
            for domain, pairs in ranges.items()
        }
        return {
            domain: all(low == high for low, high in pairs)
            for domain, pairs in known.items()
            if pairs
        }
