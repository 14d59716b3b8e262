"""The kernel's messages about the GPU while the board was checked."""

import os
import re

_KMSG = "/dev/kmsg"
# nvgpu's own lines and those of the memory controller and the SMMU behind it.
_OURS = re.compile(r"nvgpu|gk20a|ga10b|nvmap|tegra-mc|mc-err|arm-smmu|gpu@|17000000\.gpu", re.I)
# A process is called by its user's choice; its number says nothing.
_NAMES = re.compile(r"\b(comm|name|process|pid|task)([ :=]+)\S+", re.I)
_MOST_LINES = 2000


def gpu_lines(since_us: int) -> list[str]:
    """Return the GPU's lines of the kernel log since a moment of CLOCK_MONOTONIC, the oldest first.

    Raises OSError where this user may not read the log.
    """
    found: list[str] = []
    fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(fd, 8192).decode(errors="replace")
            except BrokenPipeError:  # overwritten while we read: the next read goes on
                continue
            except BlockingIOError:
                break
            head, _, text = record.partition(";")
            when = int(head.split(",")[2])
            line = text.partition("\n")[0]
            if when >= since_us and _OURS.search(line):
                found.append(_NAMES.sub(r"\1\2<name>", line))
    finally:
        os.close(fd)
    return found[-_MOST_LINES:]
