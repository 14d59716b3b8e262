"""Rules of nvgpu that differ by L4T release, each with the place in its source.

K35 is OE4T/linux-nvgpu at l4t-r35.6.0 (3de579438eda), K36 at jetson_36.4.3 (8a0a5345705e); paths
are below drivers/gpu/nvgpu. r38 has public headers only: it answers as r36 where they are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

DIRECT_KIND_CTRL = 0x100
_R36_FLAGS = 0x1 | 0x4 | 0x20 | 0x40 | 0x80 | 0x200 | 0xC00 | 0x1000


@dataclass(frozen=True)
class MapFlags:
    """Flags of MAP_BUFFER_EX: bits outside `known` and the lack of a bit of `needed` are EINVAL."""

    known: int
    needed: int


MAP_FLAGS = {
    # K35 os/linux/ioctl_as.c:111-116 and 200-204 (batch): "direct kind control must be used"
    "r35": MapFlags(_R36_FLAGS | 0x10 | DIRECT_KIND_CTRL, DIRECT_KIND_CTRL),
    # K36 os/linux/vm.c:45-92: a bit that no flag has consumed is EINVAL
    "r36": MapFlags(_R36_FLAGS, 0),
    "r38": MapFlags(_R36_FLAGS, 0),
}
