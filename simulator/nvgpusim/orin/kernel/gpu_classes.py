"""Classes and preemption modes: what ALLOC_OBJ_CTX and SET_PREEMPTION_MODE check.

[K36 hal/class/class_ga10b.c and the older classes it falls back to, common/gr/gr_setup.c,
common/gr/obj_ctx.c, common/gr/ctx.c, common/fifo/tsg.c]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..context_switch import CILP, WFI, TsgPreemption
from ..rules import KernelError

if TYPE_CHECKING:
    from .channel import ChannelFile
    from .tsg import Tsg

COMPUTE = frozenset({0xC7C0, 0xC5C0, 0xC3C0})
"""is_valid_compute: Ampere B, Turing, Volta."""
GRAPHICS = frozenset({0xC797, 0xC597, 0xC397, 0xC097, 0xB197})
"""is_valid_gfx: Ampere B, Turing, Volta, Pascal, Maxwell B."""
NVENC = 0xC4B7
"""TURING_NVENC_A, from r36 on."""
CLASSES = COMPUTE | GRAPHICS | {
    *(0xC637, 0xC7B5, 0xC76F, 0xC46F, 0xC5B5, NVENC, 0xC3B5, 0xC36F),
    *(0xC0C0, 0xC0B5, 0xC06F, 0xB1C0, 0xB0B5, 0xB06F, 0xA0B5, 0xA140, 0x902D),
}  # fmt: skip
"""is_valid: GA100's 0xC6C0, 0xC6B5 and 0xC56F are not among them."""
GRAPHICS_MODES, COMPUTE_MODES = 3, 7
"""get_supported_preemption_modes: WFI | GFXP, and WFI | CTA | CILP."""
GFXP = 2
FLAG_GFXP, FLAG_CILP = 1 << 1, 1 << 2
"""NVGPU_ALLOC_OBJ_FLAGS_*."""


def is_known_class(number: int, profile: str) -> bool:
    """True if the driver of a release takes the class."""
    return number in CLASSES and not (profile == "r35" and number == NVENC)


def raise_if_wrong_veid_or_queue(channel: ChannelFile, tsg: Tsg) -> None:
    """Graphics stays on VEID 0 and run queue 0, and apart from asynchronous compute there.

    [nvgpu_tsg_validate_class_veid_pbdma, r36]; raises KernelError.
    """
    number, veid, queue = channel.obj_class, channel.veid, channel.runqueue
    if number in GRAPHICS and (queue or veid):
        raise KernelError("obj.graphics-async", f"{number:#x} on VEID {veid}, run queue {queue}")
    beside = tsg.has_channel_of_class(GRAPHICS, veid0=True, runqueue0=True)
    if number in COMPUTE and beside and (veid == 0) == bool(queue):
        raise KernelError("obj.compute-queue", f"{number:#x} on VEID {veid}, run queue {queue}")
    if number in GRAPHICS and (
        tsg.has_channel_of_class(COMPUTE, veid0=True, runqueue0=False)
        or tsg.has_channel_of_class(COMPUTE, veid0=False, runqueue0=True)
    ):
        raise KernelError("obj.compute-queue", f"{number:#x} beside asynchronous compute")


class GrContext(TsgPreemption):
    """The graphics context of a TSG: its preemption modes, and the spaces it is mapped in."""

    def __init__(self, tsg: Tsg) -> None:
        super().__init__()
        self.tsg = tsg
        self.graphics = 0
        self.made = False
        self.mapped: set[object] = set()

    def set_up_for_class(self, channel: ChannelFile, flags: int) -> None:
        """ALLOC_OBJ_CTX: the first class of the TSG makes the context; raises KernelError."""
        if channel.vm is not None:
            self.mapped.add(channel.vm)
        first, self.made = not self.made, True
        if channel.obj_class not in COMPUTE | GRAPHICS or (self.tsg.is_r35 and not first):
            return
        defaults = self.tsg.kernel.default_modes if first else (0, 0)
        graphics = GFXP if flags & FLAG_GFXP else defaults[0]
        compute = CILP if flags & FLAG_CILP else defaults[1]
        try:
            self._check_and_set_modes(channel, graphics, compute)
        except KernelError:
            self.made = not first or self.tsg.is_r35
            raise

    def set_preemption_modes(self, channel: ChannelFile, graphics: int, compute: int) -> None:
        """SET_PREEMPTION_MODE; raises KernelError."""
        changed = graphics not in (0, self.graphics) or compute not in (0, self.compute)
        self._check_and_set_modes(channel, graphics, compute)
        if changed and not self.tsg.is_r35 and channel.vm not in self.mapped:
            raise KernelError("preempt.no-context")

    def _check_and_set_modes(self, channel: ChannelFile, graphics: int, compute: int) -> None:
        """Set what is not set already; raises KernelError."""
        graphics = 0 if graphics == self.graphics else graphics
        compute = 0 if compute == self.compute else compute
        if not graphics and not compute:
            return
        named = f"{graphics} and {compute}"
        if (graphics and not graphics & GRAPHICS_MODES) or (
            compute and not compute & COMPUTE_MODES
        ):
            raise KernelError("preempt.mode", named)
        if 0 < graphics < self.graphics or 0 < compute < self.compute:
            raise KernelError("preempt.lower", f"{named} after {self.graphics} and {self.compute}")
        if graphics == GFXP and compute == CILP:
            raise KernelError("preempt.pair", named)
        if not self.tsg.is_r35 and (
            channel.obj_class in GRAPHICS or (channel.obj_class in COMPUTE and compute == CILP)
        ):
            self._check_cilp(channel)
        if graphics in (WFI, GFXP):
            self.graphics = graphics
        if channel.obj_class not in COMPUTE | GRAPHICS:
            raise KernelError("preempt.class", f"{channel.obj_class:#x}")
        self.compute = compute

    def _check_cilp(self, channel: ChannelFile) -> None:
        """Compute beside graphics does not go with CILP [nvgpu_tsg_validate_cilp_config]."""
        tsg = self.tsg
        beside = tsg.has_channel_of_class(COMPUTE, veid0=False, runqueue0=False)
        graphics = tsg.has_channel_of_class(GRAPHICS, veid0=True, runqueue0=True)
        if channel.obj_class in COMPUTE and graphics and (channel.veid or beside):
            raise KernelError("preempt.cilp", "compute beside graphics")
        if self.compute == CILP and beside and channel.obj_class in GRAPHICS:
            raise KernelError("preempt.cilp", "graphics beside asynchronous compute")
