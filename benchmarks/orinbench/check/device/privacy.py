"""Nothing of a report says whose board it is: names, addresses, numbers and paths go."""

import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Files whose whole content is a number of one machine.
_NUMBER_FILES = (
    "/proc/device-tree/serial-number",
    "/etc/machine-id",
    "/sys/class/dmi/id/product_serial",
    "/sys/class/dmi/id/product_uuid",
)
# Names of hosts and users that name nobody.
_COMMON = set(
    """
    root nixos localhost localdomain user users admin nobody home orin jetson tegra nvidia
    ubuntu debian linux tinygrad default
""".split()
)
_PATTERNS = (
    (re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b"), "<mac>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"), "<mail>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<ip>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b"), "<ip>"),
    (re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\bGPU-[0-9a-fA-F-]{8,}"), "<uuid>"),
)
# Absolute paths but those of the kernel's own trees, which are the same on every board.
_PATH = re.compile(r"(?<![\w.<>/:])~?/(?!dev/|sys/|proc/)[\w.+@%~-][^\s'\",;:)\]]*")
_SHORTEST = 3


class Scrubber:
    """Replaces what is private in any JSON value; `secrets` are further words of this machine."""

    def __init__(self, secrets: Iterable[str]) -> None:
        words = {word.strip("\0 \n") for word in secrets}
        kept = sorted(
            (w for w in words if len(w) >= _SHORTEST and w.lower() not in _COMMON),
            key=lambda word: (-len(word), word),
        )
        self._secrets = (
            re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in kept), re.IGNORECASE)
            if kept
            else None
        )

    def scrubbed_text(self, text: str) -> str:
        """Return a text without what is private."""
        text = _PATH.sub("<path>", text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return self._secrets.sub("<private>", text) if self._secrets else text

    def __call__(self, value: Any) -> Any:
        """Return a JSON value without what is private, keys included."""
        if isinstance(value, str):
            return self.scrubbed_text(value)
        if isinstance(value, dict):
            return {self.scrubbed_text(str(key)): self(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        return value


def machine_secrets() -> set[str]:
    """Return the words that tell this machine and its users from others."""
    host = os.uname().nodename
    found = {host, host.partition(".")[0], Path.home().name, str(Path.home())}
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "HOSTNAME")}
    for entry in pwd.getpwall():
        if entry.pw_uid >= 1000 or entry.pw_uid == os.getuid():
            found |= {entry.pw_name, *re.split(r"[,\s]+", entry.pw_gecos)}
    for name in _NUMBER_FILES:
        try:
            found.add(Path(name).read_text(errors="replace"))
        except OSError:
            continue
    return found
