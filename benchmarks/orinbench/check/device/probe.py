"""One program for the board's GPU, in a process of its own: `probe OUT NAME SIZE CHOICE`.

What it finds is one JSON object in the file OUT; from an exception that is `failed`, and the
exit status is 1. It runs on the device that DEV names.
"""

import json
import sys
from pathlib import Path

from orinbench.check.device import gpu_probe, performance_probe
from orinbench.check.device.gpu import Work

PROBES = {
    program.__name__: program
    for module in (gpu_probe, performance_probe)
    for program in module.PROGRAMS
}


def main(out: str, name: str, size: str, choice: str) -> int:
    """Run a program and write what it found; returns the exit status."""
    try:
        performance_probe.take_choice(choice)
        found = PROBES[name](Work(size, choice))
    except Exception as error:  # of a device that does not open, of a kernel that faults
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    Path(out).write_text(json.dumps(found))
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
