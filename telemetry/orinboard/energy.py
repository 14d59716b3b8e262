"""Joules of a region or since the start, by a sampler in a process of its own.

Beside a loop that holds Python's lock a thread comes too late, and its interval does not show it.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from orinboard.files import Roots
from orinboard.meter import Energy, EnergyMeter, Sample, samples_between
from orinboard.sampler_health import SamplerHealth
from orinboard.sampling import (
    GAP_PERIODS,
    GAP_SECONDS,
    PowerSampling,
    Reader,
    SamplingStatus,
    boottime_seconds,
)
from orinboard.sensors.fast_rails import ChipAveraging

#: Samples a second of an exporter, which measures for hours, and around a benchmark of seconds.
DEFAULT_HERTZ, BENCHMARK_HERTZ = 10.0, 300.0
#: Program of the sampler's process; run with -m, its classes would be called otherwise.
CHILD = "from orinboard.sampling import main; main()"
#: Seconds that a region waits for its first and for its last sample.
FIRST_SECONDS, EDGE_SECONDS = 5.0, 1.0
#: The longest wait for the sampler's process to say what it has, in seconds.
ASK_SECONDS = 0.5
#: A window that the samples miss by less than this many seconds is whole.
EDGE_TOLERANCE = 0.01
#: A sampler whose counters have stood still for so many seconds is ill; a slow one for as many of
#: its longest gaps.
STALE_SECONDS, STALE_GAPS = 10.0, 2


class EnergySampler:
    """Measures energy in a process of its own: as a context manager over a timed region.

    >>> with EnergySampler() as meter:  # doctest: +SKIP
    ...     generate(tokens)
    >>> meter.energy().total_joules / tokens  # doctest: +SKIP

    The region's first and last samples are taken as it is entered and left. A sensor that blocks
    cannot hold the region up: what it did not answer in time is a gap. A reader that raises costs
    its own sample and is counted in `health().errors`. Given `readers` of its own, it reads them in
    a thread. `listen` is told each sample and the longest distance to the next that is no gap;
    without it, samples wait in the process until a figure is asked for.
    Raises OSError where no process can be started.
    """

    def __init__(
        self,
        roots: Roots | None = None,
        hertz: float = DEFAULT_HERTZ,
        *,
        monotonic: bool = False,
        keep: bool = False,
        rails: tuple[str, ...] = (),
        readers: Sequence[Reader] | None = None,
        listen: Callable[[Sample, float], None] | None = None,
    ) -> None:
        self._roots, self._hertz, self._rails = roots or Roots(), hertz, rails
        self._own, self._told = readers, listen
        self._kept: list[Sample] | None = [] if keep else None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        gap = max(GAP_PERIODS / hertz, GAP_SECONDS)
        self._status = SamplingStatus(gap, gap)
        self._began = self._looked = time.monotonic()
        # A question to the process that waits for its answer, when it was asked, and when the last
        # answer came.
        self._answered = threading.Condition(self._lock)
        self._asking, self._asked, self._heard = False, -math.inf, boottime_seconds()
        self._gap_shown = 0.0
        self._meter = EnergyMeter(self._status.max_gap, monotonic, rails)

    def start_sampling(self) -> Self:
        """Begin; returns after the first sample."""
        if self._own is None:
            self._start_process()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._sampling_loop, name="energy", daemon=True)
        self._thread.start()
        self._first.wait(FIRST_SECONDS)
        self._fetch_samples()
        return self

    def _start_process(self) -> None:
        asked = {
            "roots": astuple(self._roots),
            "hertz": self._hertz,
            "rails": self._rails,
            "pid": os.getpid(),
        }
        # The path as it is now: the entry points of Nix and of pip make it in different ways.
        path = os.pathsep.join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )

    def stop_after_last_sample(self) -> None:
        """Take a last sample and end."""
        self._stop.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        if self._thread is not None:
            self._thread.join(EDGE_SECONDS)
        if process is not None:
            # One that hangs in a read of the kernel cannot be waited for, only be told.
            if process.poll() is None and self._thread is not None and self._thread.is_alive():
                process.kill()
            else:
                process.wait()

    def __enter__(self) -> Self:
        return self.start_sampling()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_after_last_sample()

    def _fetch_samples(self) -> None:
        """Get the samples that wait in the process, if more can have come since the last time."""
        thread = self._thread
        if self._process is None or self._told is not None or thread is None:
            return
        assert self._process.stdin is not None
        with self._lock:
            now = time.monotonic()
            if self._stop.is_set() or (not self._asking and now - self._asked < 1 / self._hertz):
                return
            if not self._asking:
                try:
                    os.write(self._process.stdin.fileno(), b"?")
                except (OSError, ValueError):  # it has ended, or is told to
                    return
                self._asking, self._asked = True, now
            # Who comes while it hangs does not wait for it again.
            left = max(self._asked + ASK_SECONDS - now, 0.0)
            self._answered.wait_for(lambda: not self._asking, left)

    def energy(self) -> Energy:
        """Energy taken until now; a sample that is overdue is a gap that has begun."""
        self._fetch_samples()
        with self._lock:
            energy, last = self._meter.energy(), self._meter.last
            running = self._thread is not None and self._thread.is_alive()
            # Of a process that does not answer nobody knows which samples it has.
            now = self._heard if self._asking else boottime_seconds()
            waiting = now - last.seconds if last else 0.0
            if running and waiting > self._status.next_gap:
                energy = replace(
                    energy,
                    seconds=energy.seconds + waiting,
                    gap_seconds=energy.gap_seconds + (waiting if energy.joules else 0.0),
                )
            # What was told to be missing stays so: a counter only rises.
            self._gap_shown = max(self._gap_shown, energy.gap_seconds)
            return replace(energy, gap_seconds=self._gap_shown)

    def energy_between(self, start: float, end: float) -> Energy:
        """Energy taken from `start` to `end`, seconds of time.monotonic() in any process.

        For a sampler that keeps its samples: a region inside the one that was sampled, such as
        the timed part of a worker's repetition.
        """
        meter = EnergyMeter(self._meter.max_gap, choice=self._meter.choice)
        for sample in samples_between(self.kept_samples, start, end):
            meter.add_sample(sample)
        energy = meter.energy()
        missing = max(end - start - energy.seconds, 0.0)
        if not energy.joules or missing < EDGE_TOLERANCE:
            return energy
        return replace(energy, seconds=end - start, gap_seconds=energy.gap_seconds + missing)

    @property
    def kept_samples(self) -> list[Sample]:
        """The samples of a sampler that keeps them."""
        self._fetch_samples()
        with self._lock:
            return list(self._kept or ())

    @property
    def chip_averagings(self) -> tuple[ChipAveraging, ...]:
        """The power chips, and how each of them averages."""
        return self._status.averagings

    def joules_by_rail(self) -> dict[str, float]:
        """Joules by rail since the start, the module's under `module`."""
        self._fetch_samples()
        with self._lock:
            return self._meter.joules_by_rail()

    def health(self) -> SamplerHealth:
        """Health of the sampling."""
        self._fetch_samples()
        alive = self._thread is not None and self._thread.is_alive()
        with self._lock:
            now, patience = time.monotonic(), max(STALE_SECONDS, STALE_GAPS * self._status.next_gap)
            # A machine without any rail has nothing that could stand still.
            still = now - max(self._began, self._meter.counted_at) if self._meter.joules else 0.0
            errors = dict(self._status.errors)
            return SamplerHealth(alive, now - self._looked, still, patience, errors)

    @property
    def smoothed_read_seconds(self) -> float:
        """Seconds that one sample takes, smoothed."""
        return self._status.read_seconds

    @property
    def last_sample(self) -> Sample | None:
        """The newest sample."""
        self._fetch_samples()
        return self._meter.last

    def _sampling_loop(self) -> None:
        if self._process is None:
            sampling = PowerSampling(self._roots, self._hertz, rails=self._rails, readers=self._own)
            sampling.sample_until_stopped(self._stop.wait, self._add_sample)
            return
        assert self._process.stdout is not None
        with Connection(os.dup(self._process.stdout.fileno()), writable=False) as samples:
            try:
                while True:
                    answer, batch = samples.recv()
                    for sample, status in batch:
                        self._add_sample(sample, status)
                    if answer:
                        with self._lock:
                            self._asking, self._heard = False, boottime_seconds()
                            self._answered.notify_all()
            except EOFError:
                with self._lock:
                    self._asking = False
                    self._answered.notify_all()

    def _add_sample(self, sample: Sample, status: SamplingStatus) -> None:
        with self._lock:
            # An averaging chip's first values are of the time before.
            if sample.awake >= self._began or self._meter.last is not None:
                self._meter.max_gap = status.max_gap
                self._meter.add_sample(sample)
                if self._kept is not None:
                    self._kept.append(sample)
            self._looked = sample.awake
            self._status = status
        if self._told is not None:
            self._told(sample, status.max_gap)
        if sample.awake >= self._began:
            self._first.set()
