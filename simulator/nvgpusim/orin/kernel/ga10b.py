"""ga10b: runlists, the TPCs that a board enables, and flags of mappings, which differ by L4T.

Rules have their place in the source: K35 is OE4T/linux-nvgpu at l4t-r35.6.0 (3de579438eda), K36 at
jetson_36.4.3 (8a0a5345705e); paths are below drivers/gpu/nvgpu. r38 and r39 are
forecr/forecr_xavier_kernel's versions of JetPack 7; where their handlers are equal to K36's they
answer as r36.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...options import Options

MAX_GPCS, TPCS_PER_GPC, SMS_PER_TPC = 2, 4, 2
GR_RUNLIST = 0
RUNLISTS = {0: (0, 0), 1: (2, 0), 2: (2, 1)}
"""Active runlists: (engine id, instance); 0 GR, 2 asynchronous copy engines."""
JETPACK7 = ("r38", "r39")
DIRECT_KIND_CTRL = 0x100
_R36_FLAGS = 0x1 | 0x4 | 0x20 | 0x40 | 0x80 | 0x200 | 0xC00 | 0x1000


@dataclass(frozen=True)
class MapFlagRules:
    """Flags of MAP_BUFFER_EX: bits outside `known` and the lack of a bit of `needed` are EINVAL."""

    known: int
    needed: int


MAP_FLAGS = {
    # K35 os/linux/ioctl_as.c:111-116 and 200-204 (batch): "direct kind control must be used"
    "r35": MapFlagRules(_R36_FLAGS | 0x10 | DIRECT_KIND_CTRL, DIRECT_KIND_CTRL),
    # K36 os/linux/vm.c:45-92: a bit that no flag has consumed is EINVAL
    "r36": MapFlagRules(_R36_FLAGS, 0),
    # nvgpu_vm_translate_linux_flags of os/linux/vm.c at 8f685506aa57 consumes the same bits
    **dict.fromkeys(JETPACK7, MapFlagRules(_R36_FLAGS, 0)),
}


class GpuShape:
    """The processors that the board enables: TPCs of the 2 x 4, and SMs."""

    def __init__(self, options: Options) -> None:
        low = min(options.tpcs, TPCS_PER_GPC)
        counts = [low, options.tpcs - low]
        self.tpc_masks = [(1 << n) - 1 for n in counts]
        self.gpc_mask = sum(1 << i for i, n in enumerate(counts) if n)
        self.sms = options.sms
