"""Samples of power: when they are taken, what they cost, and the process that takes them.

A sampler in step with its load measures the same phase of it again and again: so each sample lies
anywhere in a period of its own (stratified sampling), which no rhythm can follow. Time is
CLOCK_BOOTTIME, which no clock step moves and which goes on during suspend.

`main`, in a process of its own, takes samples until its standard input ends, so that it never
outlives whoever started it. A byte there asks for the samples so far: from then on they wait to be
asked for, so that nobody is woken for each.
"""

import json
import math
import os
import random
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from orinboard.files import FileReader, Roots
from orinboard.meter import Sample
from orinboard.readings import Rail, Readings
from orinboard.sensors.fast_rails import ChipAveraging, FastRailReader
from orinboard.sensors.nvml import NvmlPowerReader
from orinboard.sensors.rapl import read_rapl

#: Counters that the hardware keeps need no more samples a second than this.
COUNTER_HERTZ = 10.0
#: Samples further apart than this many seconds leave a gap.
GAP_SECONDS = 0.5
#: Slow samplers: as many periods, those of a slow chip or bus too.
GAP_PERIODS = 5
#: Seconds between questions to readers that had nothing to say.
PROBE_SECONDS = 10.0
#: Looks in a chip's cycle: with one at any moment of it a value in three would be missed.
LOOKS = 3
#: A period has this many times the time that a reading takes.
BREATH = 1.1
#: Samples that wait to be asked for, and that are kept for who does not read; seconds that a
#: reading may take once nobody listens any more.
MOST_WAITING, MOST_KEPT, LAST_SECONDS = 256, 20_000, 5.0

Reader = Callable[[FileReader], Readings]


@dataclass(frozen=True, slots=True)
class SamplingStatus:
    """The state of the sampling beside its newest sample.

    `max_gap` judges the distance to the sample before, `next_gap` that to the one to come.
    """

    max_gap: float
    next_gap: float
    read_seconds: float = 0.0
    averagings: tuple[ChipAveraging, ...] = ()
    errors: dict[str, int] = field(default_factory=dict)


def boottime_seconds() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class TimeSources:
    """The clocks that the sampling goes by."""

    monotonic: Callable[[], float] = time.monotonic
    boottime: Callable[[], float] = boottime_seconds
    sleep: Callable[[float], None] = time.sleep


def due_times(started: float, period: Callable[[], float], draw: random.Random) -> Iterator[float]:
    """Moments to sample at: one anywhere in each period. `period` is asked before each."""
    begin = started
    while True:
        length = period()
        yield begin + draw.random() * length
        begin += length


class PowerSampling:
    """Takes samples of all power sensors, `hertz` times a second or as often as they can answer."""

    def __init__(
        self,
        roots: Roots,
        hertz: float,
        *,
        rails: tuple[str, ...] = (),
        readers: Sequence[Reader] | None = None,
        clock: TimeSources | None = None,
        pid: int | None = None,
        draw: random.Random | None = None,
    ) -> None:
        self._files, self._period = FileReader(roots), 1 / hertz
        self._clock, self._draw = clock or TimeSources(), draw or random.Random()
        self._power = FastRailReader(rails, self._clock.monotonic, self._draw)
        self._readers = readers or (self._power, NvmlPowerReader(pid or os.getpid()), read_rapl)
        self._answering = list(self._readers)
        self._errors: Counter[str] = Counter()
        self._read_seconds = 0.0
        self._counters_only = False
        self._next_probe = 0.0

    def sample_until_stopped(
        self, wait: Callable[[float], bool], emit: Callable[[Sample, SamplingStatus], None]
    ) -> None:
        """Take and emit samples until `wait`, which waits so many seconds, says to stop.

        The last sample then holds what was drawn until that moment.
        """
        now = self._clock.monotonic()
        due = due_times(now, self.next_period_seconds, self._draw)
        while True:
            self.take_and_emit_sample(emit)
            now = self._clock.monotonic()
            at = next(due)
            if at < now - self.next_period_seconds():
                # After a stall the rhythm goes on from now: there is no catching up on power.
                due = due_times(now, self.next_period_seconds, self._draw)
                at = next(due)
            if wait(max(at - now, 0.0)):
                # A chip that averages shows this moment only later.
                self._clock.sleep(self._power.lag_seconds)
                self.take_and_emit_sample(emit)
                self._power.close()
                return

    def take_and_emit_sample(self, emit: Callable[[Sample, SamplingStatus], None]) -> None:
        """Take one sample and emit it. Whatever a board answers, the next one comes."""
        try:
            # Of the pace until now: a reading that hangs must not excuse itself.
            max_gap = self.allowed_gap_seconds()
            sample = self.read_sample()
        except Exception as error:
            self._errors[type(error).__name__] += 1
            return
        errors, gap = dict(self._errors), self.allowed_gap_seconds()
        emit(
            sample, SamplingStatus(max_gap, gap, self._read_seconds, self._power.averagings, errors)
        )

    def allowed_gap_seconds(self) -> float:
        """Seconds between two samples beyond which nobody knows what was drawn between them."""
        return max(GAP_PERIODS * self.next_period_seconds(), GAP_SECONDS)

    def next_period_seconds(self) -> float:
        """Seconds of the next period: none much shorter than what the chip or its bus needs."""
        slowest = 1 / COUNTER_HERTZ if self._counters_only else 0.0
        least = self._power.update_seconds
        if self._read_seconds < least / LOOKS:  # reading does not wait for the chip
            least /= LOOKS
        return max(self._period, BREATH * self._read_seconds, least, slowest)

    def read_sample(self) -> Sample:
        """Read every sensor once."""
        before, began = self._clock.boottime(), self._clock.monotonic()
        self._power.began = began
        rails = self._read_rails(began)
        if self._files.errors:
            self._errors.update(self._files.errors)
            self._files.errors.clear()
        self._counters_only = bool(rails) and all(rail.joules is not None for rail in rails)
        after, ended = self._clock.boottime(), self._clock.monotonic()
        took = after - before
        if took > self.allowed_gap_seconds():
            # It hung. When the values were taken nobody knows, and the pace learns little from it.
            self._read_seconds *= 1 + 1 / 8
            return Sample(after, ended, rails, hung=True)
        # A reading that was interrupted once says little: the figure follows it slowly.
        self._read_seconds += (took - self._read_seconds) / 8
        # The sensors are read one after the other: the middle of it is the time of all.
        back = (ended - self._power.began) / 2 + self._power.lag_seconds
        blur = self._power.update_seconds
        # A value's age and when it was read know nothing of each other: their variances add.
        span = math.hypot(ended - self._power.began, blur)
        return Sample(after - back, ended - back, rails, blur=blur, span=span)

    def _read_rails(self, now: float) -> tuple[Rail, ...]:
        probe = now >= self._next_probe
        if probe:
            self._next_probe = now + PROBE_SECONDS
        rails: tuple[Rail, ...] = ()
        answering = []
        for reader in self._readers if probe else self._answering:
            try:
                part = reader(self._files).rails
            except Exception as error:
                self._errors[type(error).__name__] += 1
                answering.append(reader)
                continue
            if part or reader is self._power:
                rails += part
                answering.append(reader)
        if probe:
            self._answering = answering
        return rails


class SampleOutbox:
    """Samples on their way to who started this process: sent at once, or when they are asked for.

    A thread of its own sends them: neither a sensor that hangs nor a reader that is busy delays
    anything but itself.
    """

    def __init__(self, output: Connection) -> None:
        self._output, self._changed = output, threading.Condition()
        self._waiting: list[tuple[Sample, SamplingStatus]] = []
        self._most, self._asked, self._ended = 1, False, False
        self._thread = threading.Thread(target=self._send_batches_until_ended, daemon=True)
        self._thread.start()

    def put(self, sample: Sample, status: SamplingStatus) -> None:
        """Take a sample; waits only if nobody has read for very long."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < MOST_KEPT or self._ended)
            self._waiting.append((sample, status))
            if len(self._waiting) >= self._most:
                self._changed.notify_all()

    def answer_request(self) -> None:
        """Send what there is, from now on only when it is asked for."""
        with self._changed:
            self._most, self._asked = MOST_WAITING, True
            self._changed.notify_all()

    def send_last_and_end(self) -> None:
        """Send the last of them."""
        with self._changed:
            self._asked = self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _send_batches_until_ended(self) -> None:
        try:
            while not (self._ended and not self._asked):
                with self._changed:
                    self._changed.wait_for(lambda: self._asked or len(self._waiting) >= self._most)
                    answer, batch = self._asked, self._waiting
                    self._asked, self._waiting = False, []
                    self._changed.notify_all()
                self._output.send((answer, batch))
        except BrokenPipeError:
            with self._changed:
                self._ended = True
                self._changed.notify_all()


def answer_stdin_then_exit(outbox: SampleOutbox, stop: int) -> None:
    """Answer the bytes of standard input; close `stop` when it ends."""
    try:
        while os.read(0, 1):
            outbox.answer_request()
    finally:
        os.close(stop)
        time.sleep(LAST_SECONDS)
        os._exit(1)  # a sensor hangs


def main() -> None:
    """Sample as the first argument says, to standard output, until standard input ends."""
    asked = json.loads(sys.argv[1])
    outbox = SampleOutbox(Connection(os.dup(1), readable=False))
    os.dup2(2, 1)  # nothing that prints may get in between
    stopped, stop = os.pipe()
    threading.Thread(target=answer_stdin_then_exit, args=(outbox, stop), daemon=True).start()

    def wait(seconds: float) -> bool:
        return bool(select.select([stopped], [], [], seconds)[0])

    sampling = PowerSampling(
        Roots(*asked["roots"]), asked["hertz"], rails=tuple(asked["rails"]), pid=asked["pid"]
    )
    sampling.sample_until_stopped(wait, outbox.put)
    outbox.send_last_and_end()
