"""All sources of a board, each read in its own thread with a budget.

A kernel file can block for ever (a hung driver behind it) although it is opened non-blocking. The
thread that reads it is then lost, and only it: the source counts as failed, no second thread is
started for it, and it is asked again once the first answer has come.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from orinboard.files import FileReader, Roots, Tree
from orinboard.readings import Readings
from orinboard.sensors.debugfs import read_debugfs, read_devfreq_engines, read_thor_emc
from orinboard.sensors.gpu import read_gpus
from orinboard.sensors.hwmon import read_fans, read_rails, read_throttle_counters
from orinboard.sensors.nvml import read_nvml
from orinboard.sensors.rapl import read_rapl
from orinboard.sensors.system import (
    read_cpu,
    read_gpu_memory,
    read_host_usage,
    read_identity,
    read_power_mode,
)
from orinboard.sensors.thermal import read_coolings, read_zones

Reader = Callable[[FileReader], Readings]

SOURCES: Mapping[str, Reader] = {
    "identity": read_identity,
    "gpu": read_gpus,
    "rails": read_rails,
    "thermal": read_zones,
    "cooling": read_coolings,
    "throttle": read_throttle_counters,
    "fan": read_fans,
    "memory": read_gpu_memory,
    "cpu": read_cpu,
    "host": read_host_usage,
    "power_mode": read_power_mode,
    "emc": read_thor_emc,
    "engines": read_devfreq_engines,
    "nvml": read_nvml,
    "rapl": read_rapl,
    "debugfs": read_debugfs,
}
#: Everything that a user without privileges may read.
UNPRIVILEGED = tuple(name for name in SOURCES if name != "debugfs")
DEFAULT_BUDGET = 0.5
#: Error of a source that ran over its budget.
TIMEOUT = "ETIMEDOUT"


@dataclass(frozen=True, slots=True)
class SourceOutcome:
    """The names of its errors (none: it went well), and the seconds that it took."""

    errors: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The readings of all sources, and the outcome of each that the board has."""

    readings: Readings
    outcomes: Mapping[str, SourceOutcome]


@dataclass(slots=True)
class PendingReading:
    """One reading under way, which every caller who comes meanwhile shares."""

    started: float
    done: threading.Event = field(default_factory=threading.Event)
    readings: Readings = field(default_factory=Readings)
    errors: tuple[str, ...] = ()
    seconds: float = 0.0


class SourceThread:
    """One source and the thread that reads it."""

    def __init__(self, name: str, reader: Reader, roots: Roots, trace: Tree | None) -> None:
        self.name = name
        self._reader, self._roots, self._trace = reader, roots, trace
        self._lock = threading.Lock()
        self._flight: PendingReading | None = None
        self._queue: queue.SimpleQueue[PendingReading | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start_or_join_reading(self) -> PendingReading:
        """Begin a reading, or join the one under way."""
        with self._lock:
            if self._flight is None or self._flight.done.is_set():
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._reading_loop, name=f"read {self.name}", daemon=True
                    )
                    self._thread.start()
                self._flight = PendingReading(time.monotonic())
                self._queue.put(self._flight)
            return self._flight

    def close(self) -> None:
        """Let the thread end, at once or when the file it waits for answers."""
        self._queue.put(None)

    def _reading_loop(self) -> None:
        while (flight := self._queue.get()) is not None:
            files = FileReader(self._roots, self._trace)
            try:
                flight.readings = self._reader(files)
            # A reader that fails in a way nobody foresaw must cost its own source and no other.
            except Exception as error:
                files.errors.append(type(error).__name__)
            flight.errors = tuple(files.errors)
            flight.seconds = time.monotonic() - flight.started
            flight.done.set()


class BoardReader:
    """The sources of one board; `close` it, or use it as a context manager.

    `budget` is the longest that `read` waits, in seconds, for all sources together: they are read
    at the same time.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        collectors: Iterable[str] = UNPRIVILEGED,
        *,
        budget: float = DEFAULT_BUDGET,
        trace: Tree | None = None,
        readers: Mapping[str, Reader] = SOURCES,
    ) -> None:
        self.roots = roots or Roots()
        self.budget = budget
        self._sources = [
            SourceThread(name, readers[name], self.roots, trace)
            for name in dict.fromkeys(collectors)
        ]

    def read(self) -> Snapshot:
        """Read every source; never waits longer than the budget and never raises."""
        flights = [(source.name, source.start_or_join_reading()) for source in self._sources]
        readings, outcomes = Readings(), {}
        for name, flight in flights:
            # The budget counts from the start of the reading: who joins one that hangs already
            # does not wait for it again.
            left = flight.started + self.budget - time.monotonic()
            if flight.done.wait(max(left, 0)):
                readings += flight.readings
                if flight.errors or flight.readings != Readings():
                    outcomes[name] = SourceOutcome(flight.errors, flight.seconds)
            else:
                outcomes[name] = SourceOutcome((TIMEOUT,), time.monotonic() - flight.started)
        return Snapshot(readings, outcomes)

    def close(self) -> None:
        """End the threads."""
        for source in self._sources:
            source.close()

    def __enter__(self) -> "BoardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
