"""Sanitizer of a GPU: its checks, and the records of the memories that its launches share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...allocated_pieces import AllocatedPiece, AllocatedPieces
from ...memory import GpuAddressSpace
from ..parser.kernel_facts import KernelFacts
from ..state import ChunkState, GridLaunch, TranslatedKernel
from .fenced_writes import FencedWrites
from .records import TICK, AccessRecords
from .shadow import ChunkShadow


@dataclass(eq=False)
class Sanitizer:
    """The checks of all launches of a GPU; `now`: the moment of the launch's submission.

    `everything`: reads of buffers that nothing writes are recorded, too.
    """

    checks: frozenset[str]
    allocated: AllocatedPieces = field(default_factory=AllocatedPieces)
    tick: int = 1
    now: int | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        self.memories: WeakKeyDictionary[Any, dict[int, AccessRecords]] = WeakKeyDictionary()
        self.releases = FencedWrites()
        self.known: dict[int, tuple[TranslatedKernel, KernelFacts]] = {}

    def on_launch_begin(self, launch: GridLaunch) -> None:
        """A launch starts: everything before it is ordered before it."""
        if self.tick >> (62 - TICK):
            self.memories.clear()
            self.tick = 1
        self.tick += 1
        self.launch = launch
        self.start = np.uint64(self.tick << TICK)
        self.releases.clear()
        self.grain = launch.code.granules.get("global", 4)
        self.written: set[int] | None = None
        if id(launch.code) not in self.known:
            self.known[id(launch.code)] = (
                launch.code, KernelFacts(launch.code.kernel, launch.code.sites)
            )  # fmt: skip
        self.facts = self.known[id(launch.code)][1]
        names = self.facts.written
        if names is not None and not self.everything:
            self.written = set()
            bank = launch.banks.get(0, b"")
            for name in names:
                at = launch.param_base + launch.code.kernel.params[name].offset
                mapping = self.mapping_at(int.from_bytes(bank[at : at + 8], "little"))
                if mapping is not None:
                    self.written.add(id(mapping.buf))

    def mapping_at(self, va: int) -> Any:
        """The mapping that holds an address, None for none."""
        vm = self.launch.vm
        return vm.mapping_at(va) if isinstance(vm, GpuAddressSpace) else None

    def piece_at(self, va: int) -> AllocatedPiece | None:
        """The piece that held `va` when the launch was submitted."""
        return self.allocated.piece_at(va, self.now)

    def make_shadow(self, st: ChunkState) -> ChunkShadow:
        """The records of a chunk's own memories."""
        return ChunkShadow(self, st)

    def records_of_mapping(self, mapping: Any) -> AccessRecords:
        """The records of a buffer."""
        of = self.memories.setdefault(mapping.buf, {})
        if self.grain not in of:
            of[self.grain] = AccessRecords.make_untouched(mapping.buf.size // self.grain)
        return of[self.grain]
