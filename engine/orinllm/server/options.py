"""Options of a server, as dataclasses; their flags are in command/options.py.

The command reads defaults here while it starts, so nothing here takes long to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orinllm.errors import BadInput

if TYPE_CHECKING:
    from orinllm.choose.pooling import Pooling


@dataclass(frozen=True)
class EngineOptions:
    """The options for loading and sharing a model.

    memory: share of the free memory, 0 to 1. pooling: of embeddings; None: the file's, or the mean.
    lookup, draft: what guesses tokens while one answer runs alone. mmproj: how the model sees.
    image_hosts: hosts, in small letters, of which pictures are fetched.
    """

    model: Path
    device: str | None = None
    general: bool = False
    context: int | None = None
    slots: int | None = None
    memory: float = 0.7
    queue: int = 64
    deterministic: bool = False
    template: Path | None = None
    pooling: Pooling | None = None
    kv: str = "f16"  # a name of KEY_TYPES
    lookup: bool = False
    draft: Path | str | None = None  # a file, or MTP
    mmproj: Path | None = None
    image_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpOptions:
    """Address of the server, and clients that may ask it.

    grace: seconds that answers get to end when the server is stopped.
    strict: fields that have no effect are errors. key_file: where the keys are read again.
    """

    host: str
    port: int
    alias: str | None = None
    keys: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    grace: float = 30.0
    strict: bool = False
    key_file: Path | None = None


def checked_grace(value: float) -> float:
    """Return the value of --grace; a day is longer than any answer."""
    if not 0 <= value <= 86400:
        raise BadInput(f"--grace {value:g}: seconds from 0 to 86400 were expected")
    return value


def parse_share(text: str) -> float:
    """Return a share such as 70% as a number from 0 to 1."""
    try:
        part = float(text.removesuffix("%")) / 100
    except ValueError:
        part = 0.0
    if not text.endswith("%") or not 0 < part <= 1:
        raise BadInput(f"--memory {text}: a share such as 70% was expected, above 0% up to 100%")
    return part
