"""The options of a run, shared by both sides."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import SimError

KEPT = 2
"""Layout of the kept programs. A compile cache holds code whose PTX lies in such a layout."""
PROFILES = ("r35", "r36", "r38", "r39")
PLACES = ("buddy", "low", "high", "random", "windows", "reuse")
L2_POLICIES = ("keep", "evict", "all")
"""Policies of the GPU's L2 with lines (see l2.py)."""
MEMORY_ENDS = ("release", "refuse")
"""Behaviours of nvmap when memory ends (see kernel/available.py)."""
CHECKS = ("race", "init", "sync", "bounds")
"""Faults that `--sanitize` can watch kernels for."""
BOARDS: dict[str, tuple[int, int]] = {
    "agx64": (8, 64),
    "agx32": (7, 32),
    "nx16": (4, 16),
    "nano8": (4, 8),
    "nano4": (2, 4),
}
"""Jetson Orin modules: enabled TPCs (of 2 GPC x 4), GiB of memory [NVIDIA product data]."""


CUDA_CHECKS = (*CHECKS, "calls", "leaks")
"""Checks of CUDA programs: kernels, calls, memory that is never freed."""


def checks(text: str, known: tuple[str, ...] = CHECKS) -> tuple[str, ...]:
    """The list of --sanitize; raises SimError for a name that is none."""
    names = tuple(filter(None, text.split(",")))
    if names == ("all",):
        return known
    for name in names:
        if name not in known:
            raise SimError(f"--sanitize {name}: expected some of {','.join(known)}, or all")
    return names


def cache_directory() -> Path:
    """Folder of the pairs of cubin and PTX kept between processes."""
    given = os.environ.get("NVGPUSIM_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "nvgpusim"


@dataclass(frozen=True)
class Options:
    """Options of `python -m nvgpusim`.

    `delay` bounds, in milliseconds, how late the consumer may run (0: at once); `order` delivers
    write-combined stores late unless a barrier stood between; without `prefetch`, entries and
    pushbuffers are read when they are executed, not at the doorbell; with `write_back`, SKED writes
    its copy of a QMD back some time after the QMD's release; `l2` is what the GPU's cache does with
    lines of CACHEABLE mappings (see l2.py); `memory_end` "refuse" is nvmap
    since October 2025; `page_cache` is what files take of memory, in MB (-1: three quarters);
    `warps` draws the order of warps;
    `sanitize` lists what kernels are watched for (none with `strict`: everything); `place` is the
    allocation policy; `poison` fills freed memory; `inject` lists faults (see inject.py); all
    choices are drawn from `seed`. `second_client` is the simulated time of a grid, in
    milliseconds, while another process wants the GPU all the time (0: no other process).
    """

    profile: str = "r36"
    board: str = "agx64"
    delay: float = 0.0
    order: bool = False
    prefetch: bool = True
    write_back: bool = False
    l2: str = "keep"
    place: str = "buddy"
    poison: bool = False
    memory_end: str = "release"
    page_cache: int = -1
    inject: tuple[str, ...] = field(default=())
    seed: int = 0
    record: str = ""
    report: str = ""
    strict: bool = False
    second_client: float = 0.0
    warps: bool = False
    sanitize: tuple[str, ...] = field(default=())

    @property
    def checks(self) -> frozenset[str]:
        """Faults that kernels are watched for."""
        return frozenset(self.sanitize or (CHECKS if self.strict else ()))

    @property
    def tpcs(self) -> int:
        """Enabled TPCs of the board; two SMs each."""
        return BOARDS[self.board][0]

    @property
    def sms(self) -> int:
        """SMs of the board."""
        return 2 * self.tpcs

    @property
    def ram(self) -> int:
        """Bytes of memory of the board."""
        return BOARDS[self.board][1] << 30

    def to_json(self) -> str:
        """One line that :meth:`from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of :meth:`to_json`."""
        values = json.loads(text)
        values["inject"] = tuple(values["inject"])
        values["sanitize"] = tuple(values.get("sanitize", ()))
        return cls(**values)
