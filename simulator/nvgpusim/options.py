"""The options of a run, shared by both sides."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .boards import BOARDS
from .errors import SimError

KEPT = 2
"""Layout of the kept programs. A compile cache holds code whose PTX lies in such a layout."""
PROFILES = ("r35", "r36", "r38", "r39")
PLACES = ("buddy", "low", "high", "random", "windows", "reuse")
L2_POLICIES = ("keep", "evict", "all")
"""Policies of the GPU's L2 with lines (see l2.py)."""
MEMORY_ENDS = ("release", "refuse")
"""Behaviours of nvmap when memory ends (see kernel/board_memory.py)."""
CHECKS = ("race", "init", "sync", "bounds")
"""Faults that `--sanitize` can watch kernels for."""
STRICT_EXIT = 3
"""Exit status of --strict: the program succeeded, the GPU did not."""


CUDA_CHECKS = (*CHECKS, "calls", "leaks")
"""Checks of CUDA programs: kernels, calls, memory that is never freed."""


def parse_checks(text: str, known: tuple[str, ...] = CHECKS) -> tuple[str, ...]:
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


def _option_field(default: Any, text: str, **more: Any) -> Any:
    """A field that is an option of the command: its text, and what it may be (see cli.py)."""
    return field(default=default, metadata={"text": text, **more})


@dataclass(frozen=True)
class Options:
    """Options of `python -m nvgpusim`, in the order and with the words of its --help."""

    profile: str = _option_field(
        "r36", "Struct sizes, numbers and rules of that L4T release.", choices=PROFILES
    )
    board: str = _option_field("agx64", "Orin module: enabled SMs and memory.", choices=BOARDS)
    delay: float = _option_field(
        0.0, "The GPU works up to MS milliseconds late, by --seed.", range=(0, 10_000), metavar="MS"
    )
    order: bool = _option_field(
        False, "A store that no barrier follows may be invisible to the GPU."
    )
    prefetch: bool = _option_field(
        True, "Entries and pushbuffers are read at the doorbell, or when they are executed."
    )
    write_back: bool = _option_field(
        False, "SKED writes its copy of a QMD back some time after the QMD's release."
    )
    l2: str = _option_field(
        "keep",
        "The GPU's L2 keeps lines of CACHEABLE mappings until a flush, evicts some by --seed, or "
        "keeps lines of all mappings.",
        choices=L2_POLICIES,
    )
    memory_end: str = _option_field(
        "release",
        "nvmap's answer when memory ends is the profile's, or that of r35.6.3 and r36.4.7: ENOMEM "
        "while the page cache is full.",
        choices=MEMORY_ENDS,
    )
    page_cache: int = _option_field(
        -1,
        "Memory that files take at the start (-1: three quarters).",
        range=(-1, None),
        metavar="MB",
    )
    warps: bool = _option_field(False, "Warps of a block run in a random order, from --seed.")
    sanitize: tuple[str, ...] = _option_field(
        (), "Watch kernels: race,init,sync,bounds, or all. --strict without it: all.",
        metavar="LIST",
    )  # fmt: skip
    place: str = _option_field("buddy", "Which free block the kernel hands out.", choices=PLACES)
    poison: bool = _option_field(False, "Freed memory is filled with 0xDB.")
    second_client: float = _option_field(
        0.0,
        "Another process always has GPU work; a grid of this one takes MS of simulated time.",
        range=(0, 60_000),
        metavar="MS",
    )
    inject: tuple[str, ...] = _option_field(
        (), "A fault on demand, WHAT[@WHERE][:n=K|every=K|p=P]; several times.", metavar="SPEC"
    )
    seed: int = _option_field(0, "Seed of every random choice above.")
    record: str = _option_field("", "The file that gets the trace.", metavar="FILE")
    report: str = _option_field("", "The file that gets the report.", metavar="FILE")
    strict: bool = _option_field(
        False,
        f"Exit {STRICT_EXIT} when the program succeeded but a GPU error, a note or an ioctl that "
        "is unknown or not modelled occurred; 1 when an --inject never fired.",
    )

    @property
    def watched_checks(self) -> frozenset[str]:
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
    def ram_bytes(self) -> int:
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
