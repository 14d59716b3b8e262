"""Rules of nvgpu that differ by L4T release, each with the place in its source.

K35 is OE4T/linux-nvgpu at l4t-r35.6.0 (3de579438eda), K36 at jetson_36.4.3 (8a0a5345705e); paths
are below drivers/gpu/nvgpu. r38 and r39 are forecr/forecr_xavier_kernel's versions of JetPack 7;
where their handlers are equal to K36's they answer as r36.
"""

from __future__ import annotations

from dataclasses import dataclass

JETPACK7 = ("r38", "r39")
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
    # nvgpu_vm_translate_linux_flags of os/linux/vm.c at 8f685506aa57 consumes the same bits
    **dict.fromkeys(JETPACK7, MapFlags(_R36_FLAGS, 0)),
}
