"""One figure that only tegrastats has: the load of the memory controller.

The firmware's activity counter has a scale of its own, so the percentage comes from tegrastats, and
only when it runs as root. Everything else is read from sysfs.
"""

import re
import subprocess
import threading
import time

from orinboard.files import Files
from orinboard.readings import Readings

#: `EMC_FREQ 14%@2133`; a user sees no such field.
EMC = re.compile(r"\bEMC_FREQ (\d+)%")
INTERVAL_SECONDS = 1.0
#: A line older than this many intervals says nothing about now.
STALE_INTERVALS = 5


def emc_load(line: str) -> float | None:
    """The load as a ratio; None where the line has none."""
    found = EMC.search(line)
    return int(found[1]) / 100 if found else None


class Tegrastats:
    """Runs tegrastats and keeps its newest line. Raises OSError when it cannot be run."""

    def __init__(self, binary: str, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        self._process = subprocess.Popen(
            [binary, "--interval", str(round(interval * 1000))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._newest: tuple[float, str] | None = None
        self._thread = threading.Thread(target=self._listen, name="tegrastats", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._newest = (time.monotonic(), line)

    def read(self, files: Files) -> Readings:
        """The load, unless the newest line is too old or tegrastats has ended."""
        newest = self._newest
        if newest and time.monotonic() - newest[0] < STALE_INTERVALS * self._interval:
            return Readings(emc_load=emc_load(newest[1]))
        if newest or self._process.poll() is not None:
            files.errors.append("ESTALE")
        return Readings()

    def close(self) -> None:
        """End tegrastats."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        if self._process.stdout:
            self._process.stdout.close()
