"""Interface between the kernel side and the execution side.

The kernel side makes a :class:`ChannelPort` at SETUP_BIND and hands it to the :class:`Executor`;
the executor consumes the ring behind it on its own thread and calls back through the port.
`fail` and `post_event` take no lock that is held while the executor is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .context_switch import SwitchTimeBudget, TsgPreemption

if TYPE_CHECKING:
    from ..memory import GpuAddressSpace

NOTIFIER_IDLE_TIMEOUT = 8
"""NVGPU_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT: context switch or preemption timed out."""
NOTIFIER_GR_EXCEPTION = 13
"""NVGPU_CHANNEL_GR_EXCEPTION: SM or SKED exception, class error."""
NOTIFIER_ILLEGAL_NOTIFY = 25
"""NVGPU_CHANNEL_GR_ILLEGAL_NOTIFY: illegal method or notify."""
NOTIFIER_MMU_FAULT = 31
"""NVGPU_CHANNEL_FIFO_ERROR_MMU_ERR_FLT."""
NOTIFIER_PBDMA = 32
"""NVGPU_CHANNEL_PBDMA_ERROR: bad GPFIFO entry, header or semaphore."""
NOTIFIER_RESET = 43
"""NVGPU_CHANNEL_RESETCHANNEL_VERIF_ERROR: FORCE_RESET ioctl."""
NOTIFIER_GAP = 0xFFFF
"""No code of nvgpu: the simulator cannot run what the client asked for, which may be right."""

EVENT_BLOCKING_SYNC = 2
"""NVGPU_EVENT_ID_BLOCKING_SYNC: posted on a non-stalling interrupt."""


@dataclass(frozen=True)
class SmErrorRecord:
    """One record of READ_SINGLE_SM_ERROR_STATE; `warp_esr_pc` is the entry of the kernel."""

    global_esr: int = 0
    warp_esr: int = 0
    warp_esr_pc: int = 0
    global_esr_report_mask: int = 0
    warp_esr_report_mask: int = 0


@dataclass(frozen=True)
class FaultReport:
    """A fatal hardware error, as the driver sees it and as the simulator explains it.

    `code` is the notifier's info32, `title` one line, `details` the offender by name (entry, QMD
    field, kernel, thread, address, Python line …), `sm` the error records by SM id.
    """

    code: int
    title: str
    details: dict[str, str] = field(default_factory=dict)
    sm: dict[int, SmErrorRecord] = field(default_factory=dict)


@dataclass(eq=False)
class ChannelPort:
    """A channel that SETUP_BIND has put on the runlist.

    `ring` is the whole GPFIFO dmabuf (`entries` of 8 bytes are used), `userd` the USERD dmabuf:
    GPGet u32 at 0x88 (written by the executor), GPPut u32 at 0x8C (written by the client).
    `gpfifo_va` is where the kernel mapped the ring; the field of the hardware has 40 bits.
    `enabled` is false between the DISABLE and ENABLE ioctls; `alive` turns false for ever when
    the TSG dies. `submit_line` is the client's Python line seen at the last doorbell. `context` is
    what a context switch does to the TSG, `budget` how long it may take.
    """

    id: int
    token: int
    tsg_id: int
    runlist: int
    veid: int
    vm: GpuAddressSpace
    entries: int
    ring: memoryview
    userd: memoryview
    fail: Callable[[FaultReport], None]
    post_event: Callable[[int], None]
    gpfifo_va: int = 0
    classes: set[int] = field(default_factory=set)
    alive: bool = True
    enabled: bool = True
    submit_line: str = ""
    line: str = ""
    context: TsgPreemption = field(default_factory=TsgPreemption)
    budget: SwitchTimeBudget = field(default_factory=SwitchTimeBudget)


class Executor(Protocol):
    """The execution side; every method may be called from any thread."""

    def attach_channel(self, port: ChannelPort) -> None:
        """A channel is on the runlist."""

    def detach_channel(self, channel_id: int) -> None:
        """The channel was disabled, preempted and closed: nothing of it runs after the return."""

    def ring_doorbell(self, token: int) -> None:
        """`token` was stored at 0x90 of the usermode page; must not block."""

    def on_barrier(self) -> None:
        """The client executed a memory barrier."""

    def is_idle(self) -> bool:
        """True if no live channel has work that could make progress."""

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until idle; raises TimeoutError after `timeout` seconds."""

    def stop_threads(self) -> None:
        """Stop the threads; called once at exit."""

    def statistics(self) -> dict[str, int]:
        """Counters for the report: launches, bytes moved, methods, instructions …"""
