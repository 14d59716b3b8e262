"""Readings of a wall meter, which include carrier board and power supply.

A meter's file is CSV with a header. One column is the time (`time`, `timestamp`, `unix`, `date`:
Unix seconds, or ISO 8601 with a zone), one the power in watts (`watts`, `power`, `power_w`, `w`).
"""

import csv
import math
import statistics
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

TIME_COLUMNS = ("time", "timestamp", "unix", "date", "datetime")
POWER_COLUMNS = ("watts", "power", "power_w", "w")
#: Readings further apart than this many times their usual distance leave a gap.
GAP_PERIODS = 5


class MeterError(ValueError):
    """The file is not a meter's log; the message names file and line."""


@dataclass(frozen=True, slots=True)
class WallMeter:
    """Readings in rising order: Unix seconds, and watts at the wall."""

    times: tuple[float, ...]
    watts: tuple[float, ...]

    def joules(self, started: float, ended: float) -> float | None:
        """Energy between two Unix times; None where the readings do not cover all of it."""
        if len(self.times) < 2 or started < self.times[0] or ended > self.times[-1]:
            return None
        longest = GAP_PERIODS * statistics.median(b - a for a, b in pairwise(self.times))
        total = 0.0
        for (t0, w0), (t1, w1) in pairwise(zip(self.times, self.watts, strict=True)):
            begin, end = max(t0, started), min(t1, ended)
            if begin >= end:
                continue
            if t1 - t0 > longest:
                return None
            slope = (w1 - w0) / (t1 - t0)
            total += (w0 + slope * ((begin + end) / 2 - t0)) * (end - begin)
        return total


def load_wall_meter(file: Path) -> WallMeter:
    """Read a meter's CSV; raises MeterError."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            rows = csv.DictReader(text)
            names = {(name or "").strip().lower(): name for name in rows.fieldnames or ()}
            time_name = next((names[name] for name in TIME_COLUMNS if name in names), None)
            power_name = next((names[name] for name in POWER_COLUMNS if name in names), None)
            for name, wanted in ((time_name, TIME_COLUMNS), (power_name, POWER_COLUMNS)):
                if name is None:
                    raise MeterError(f"{file}: no column is called {', '.join(wanted)}")
            times, watts = [], []
            for row in rows:
                try:
                    times.append(seconds(row[time_name or ""]))
                    watts.append(power(row[power_name or ""]))
                except (TypeError, ValueError) as error:
                    raise MeterError(f"{file}, line {rows.line_num}: {error}") from None
                if len(times) > 1 and times[-1] <= times[-2]:
                    raise MeterError(f"{file}, line {rows.line_num}: time does not go on")
    except OSError as error:
        raise MeterError(f"{file}: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise MeterError(f"{file}: no CSV: {error}") from None
    if len(times) < 2:
        raise MeterError(f"{file}: fewer than two readings")
    return WallMeter(tuple(times), tuple(watts))


def seconds(text: str) -> float:
    """Unix seconds of a time; raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        if moment.tzinfo is None:
            raise ValueError(f"{text!r} names no zone, as in 2026-11-22T10:00:00Z") from None
        value = moment.timestamp()
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no time")
    return value


def power(text: str) -> float:
    """Watts; raises ValueError."""
    value = float(text)
    if not 0 <= value < 1e5:
        raise ValueError(f"{text!r} is no power in watts")
    return value
