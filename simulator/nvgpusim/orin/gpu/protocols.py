"""Parts of the GPU and of a channel that the channel's engines use.

`scheduler.Gpu` is the `Device` and `pbdma.Channel` the `Channel`; the engines import neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...extents import Extents
from ...memory import GpuAddressSpace
from ...options import Options
from ...ptx import Launch
from ...ptx.sanitizer.sanitize import Sanitizer
from ..ctxsw import SecondClient
from ..gpu_api import ChannelPort
from .programs import Program
from .published import Published
from .qmd import Qmd

Steps = Generator[str, None, None]
Work = Steps | tuple[()]
"""Result of a method: steps that may have to wait, or DONE."""
DONE = ()


class Caches:
    """Instruction and constant caches of a GPU: kept until an invalidate, by address."""

    def __init__(self) -> None:
        self.code: dict[tuple[int, int], tuple[list[Program], bytes]] = {}
        self.constants: dict[tuple[int, int], bytes] = {}


class Device(Protocol):
    """The GPU that a channel belongs to. `delay` is in seconds, `tpcs` a count."""

    options: Options
    delay: float
    tpcs: int
    extents: Extents
    watch: Sanitizer | None
    caches: Caches
    rival: SecondClient
    counts: Counter[str]
    current: Launch | None

    def note(self, text: str) -> None:
        """A finding."""

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""

    def draw(self) -> float:
        """Until when to hold something back (time.monotonic), 0.0 for not at all."""
        ...

    def let_second_client_run(self, channel: Channel, waves: list[int]) -> None:
        """A chain of grids has run: the second client takes its turn, at the chain's expense."""

    def block_order(self) -> int:
        """Seed of the order in which blocks start."""
        ...

    def warp_order(self) -> int | None:
        """Seed of a drawn order of warps, None to run them in step."""
        ...

    def first_tpc(self) -> int:
        """TPC of a chunk's first block."""
        ...

    def local_in_use(self, channel: Channel) -> bool:
        """True if a grid of the channel's TSG may be using local memory."""
        ...

    def write_qmd_back(self, channel: Channel, qmd: Qmd) -> None:
        """SKED's cached copy goes back to memory."""


class Channel(Protocol):
    """A channel as its engines see it; `waiting` names what it waits for, "" if nothing."""

    port: ChannelPort
    vm: GpuAddressSpace
    userd: NDArray[np.uint32]
    known_put: int
    current: Published | None
    entry: int
    line: str
    inflight: list[Steps]
    waiting: str
    stop: bool

    @property
    def gpu(self) -> Device:
        """The GPU that serves the channel."""
        ...

    def details(self) -> dict[str, str]:
        """Submitter of the work being executed."""
        ...

    def here(self) -> str:
        """The header that is being executed."""
        ...

    def adversary_delay(self) -> Work:
        """The adversary's delay at this point."""
        ...

    def wait_idle(self) -> Steps:
        """Wait until no grid of this channel runs (WFI)."""
        ...
