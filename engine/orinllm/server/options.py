"""What `orinllm serve` is told on its command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineOptions:
    """How a model is loaded and shared. memory: share of the free memory, 0 to 1."""

    model: Path
    device: str | None = None
    general: bool = False
    context: int | None = None
    slots: int | None = None
    memory: float = 0.7
    queue: int = 64
    deterministic: bool = False
    template: Path | None = None
    kv: str = "f16"  # a name of KEY_TYPES


@dataclass(frozen=True)
class HttpOptions:
    """Who may ask, and where. grace: seconds that answers get to end when the server is stopped."""

    host: str = "127.0.0.1"
    port: int = 8000
    alias: str | None = None
    keys: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    grace: float = 30.0
