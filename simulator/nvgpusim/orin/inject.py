"""Faults on demand: `--inject WHAT[@WHERE][:WHEN]`.

WHAT is an errno name (ENOMEM, EINTR, EBUSY, EFAULT …) for system calls, or `lost-doorbell`,
`channel-error[=CODE]`, `timeout` for doorbells. WHERE is a pattern over the ioctl names of the
report (`NVMAP_GET_FD`, `AS_*`, `MMAP`, `OPEN_CTRL`; the driver's prefix may be left out). WHEN is
`n=K` (the K-th match only; the default is n=1), `every=K` or `p=P`, drawn from --seed.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import SimError
from ..locks import GcPausingLock
from ..options import PROFILES
from .abi import abi_of_profile
from .gpu_api import NOTIFIER_IDLE_TIMEOUT, NOTIFIER_MMU_FAULT

_SPEC = re.compile(
    r"(?P<what>[A-Za-z-]+)(=(?P<code>\d+))?(@(?P<where>[\w*?]+))?"
    r"(:(?P<how>n|every|p)=(?P<value>[\d.]+))?"
)
_DOORBELL = ("lost-doorbell", "channel-error", "timeout")


def _name_matches(name: str, where: str) -> bool:
    """True if WHERE names this call, with or without its prefix."""
    return fnmatchcase(name, where) or fnmatchcase(name.partition("_")[2], where)


@functools.cache
def _all_call_names() -> frozenset[str]:
    """Every name that a call can have."""
    ioctls = {i.short_name for p in PROFILES for i in abi_of_profile(p).ioctls.values()}
    opens = {f"OPEN_{kind}" for kind in ("CTRL", "AS", "TSG", "CHANNEL", "NVMAP")}
    return frozenset(ioctls | opens | {"MMAP"})


@dataclass
class Injection:
    """One parsed `--inject`."""

    what: str
    code: int
    where: str
    how: str
    value: float
    text: str = ""
    seen: int = 0
    fired: int = 0

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Read a specification; raises SimError with what would be right."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise SimError(
                f"--inject {text!r}: expected WHAT[@WHERE][:n=K|every=K|p=P], as in ENOMEM@*:p=0.01"
            )
        what, where = match["what"], match["where"] or "*"
        if what not in _DOORBELL and not hasattr(errno, what):
            names = ", ".join(("an errno name", *_DOORBELL))
            raise SimError(f"--inject {text!r}: unknown fault {what!r}; expected {names}")
        if what in _DOORBELL and match["where"]:
            raise SimError(f"--inject {text!r}: {what} happens at doorbells and takes no @WHERE")
        how = match["how"] or "n"
        try:
            value = float(match["value"] or 1)
        except ValueError:
            raise SimError(f"--inject {text!r}: {match['value']!r} is not a number") from None
        if (how == "p" and not 0 <= value <= 1) or (how != "p" and value < 1):
            raise SimError(f"--inject {text!r}: p is 0..1, n and every are at least 1")
        if not any(_name_matches(name, where) for name in _all_call_names()):
            raise SimError(f"--inject {text!r}: no call is named {where}; see nvgpusim report")
        default = NOTIFIER_IDLE_TIMEOUT if what == "timeout" else NOTIFIER_MMU_FAULT
        return cls(what, int(match["code"] or default), where, how, value, text)

    def fires_on_match(self, rng: random.Random) -> bool:
        """Count one match and say whether it fails."""
        self.seen += 1
        match self.how:
            case "n":
                fires = self.seen == int(self.value)
            case "every":
                fires = self.seen % int(self.value) == 0
            case _:
                fires = rng.random() < self.value
        self.fired += fires
        return fires


class Injector:
    """All injections of a run."""

    def __init__(self, specs: tuple[str, ...], seed: int) -> None:
        self.injections = [Injection.parse(text) for text in specs]
        self._rng = random.Random(f"inject {seed}")
        self._lock = GcPausingLock()
        self.log: list[str] = []

    def raise_if_due(self, name: str) -> None:
        """Raise OSError when an injection is due at the call `name`."""
        with self._lock:
            for injection in self.injections:
                if injection.what in _DOORBELL or not _name_matches(name, injection.where):
                    continue
                if injection.fires_on_match(self._rng):
                    number = int(getattr(errno, injection.what))
                    self.log.append(f"{injection.what} at {name}, match {injection.seen}")
                    raise OSError(number, os.strerror(number))

    def next_doorbell_fault(self) -> tuple[str, int] | None:
        """The fault that is due at the next doorbell: (action, notifier code), or None."""
        with self._lock:
            for injection in self.injections:
                if injection.what in _DOORBELL and injection.fires_on_match(self._rng):
                    self.log.append(f"{injection.what} at doorbell {injection.seen}")
                    return injection.what, injection.code
            return None


__all__ = ["Injection", "Injector"]
