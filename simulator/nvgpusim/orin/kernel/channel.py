"""Channels: from OPEN_CHANNEL to a port on the runlist, and their death [K36 ioctl_channel.c]."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...memory import PAGE, DmaBuf, Mapping
from ..abi import StructBytes
from ..context_switch import SwitchTimeBudget
from ..gpu_api import NOTIFIER_RESET, ChannelPort, FaultReport
from ..rules import KernelError
from .device_file import DeviceFile, ioctl_handler
from .ga10b import GR_RUNLIST, RUNLISTS
from .gpu_classes import is_known_class, raise_if_wrong_veid_or_queue

if TYPE_CHECKING:
    from .address_space import Vm
    from .core import Kernel
    from .tsg import Subcontext, Tsg

VPR, DETERMINISTIC, USERMODE = 1, 2, 8
ENTRY = 8
"""GPFIFO_ENTRY_SIZE."""
NOTIFIER_SIZE, NOTIFIER_SET = 16, 0xFFFF
WAITED = 0xDEADBEEF
"""info32 that WAIT for a notifier writes."""
USERD_GP_GET, USERD_GP_PUT = 0x88, 0x8C
SETTLE = 0.5
"""Seconds that the consumer thread gets for the step that it is in, on a busy machine."""
WDT_DISABLE, WDT_ENABLE = 1, 2


class ChannelFile(DeviceFile):
    """A channel fd."""

    kind, letter = "channel", "H"

    def __init__(self, kernel: Kernel, runlist: int) -> None:
        super().__init__(kernel)
        self.runlist = GR_RUNLIST if runlist == -1 else runlist
        self.id = -1
        if self.runlist not in RUNLISTS:
            raise self.refusal("channel.runlist", str(runlist))
        if not kernel.channel_ids:
            raise self.refusal("channel.none-left")
        self.id = kernel.channel_ids.pop()
        self.vm: Vm | None = None
        self.tsg: Tsg | None = None
        self.subcontext: Subcontext | None = None
        self.veid = self.runqueue = self.obj_class = 0
        self.watchdog = True
        self.deterministic = False
        self.kept = False
        self.port: ChannelPort | None = None
        self.gpfifo: Mapping | None = None
        self.userd: DmaBuf | None = None
        self.notifier: tuple[DmaBuf, int] | None = None
        self.unserviceable = True  # until a TSG takes it
        self.gone = False
        self.classes: set[int] = set()
        self.syncpoint: int | None = None
        self.budget = SwitchTimeBudget()

    def check_before_ioctl(self, name: str) -> None:
        """A channel without references refuses everything."""
        if self.gone:
            raise self.refusal("channel.gone")

    def is_busy_after_wait(self) -> bool:
        """True if the ring holds entries that the hardware does not take within SETTLE.

        GPGet moves after the entry's last semaphore release, so a client that has waited for that
        may be here first.
        """
        end = time.monotonic() + SETTLE
        while self.port is not None and self.port.alive:
            get, put = struct.unpack_from("<II", self.port.userd, USERD_GP_GET)
            if get == put:
                return False
            if time.monotonic() > end:
                return True
            time.sleep(1e-3)
        return False

    def leave_runlist(self) -> None:
        """Off the runlist: nothing of the channel runs afterwards."""
        if self.port is not None:
            self.port.alive = False
            self.kernel.ports.pop(self.id, None)
            self.kernel.usermode.forget_channel(self.id)
            if self.kernel.executor is not None:
                self.kernel.executor.detach_channel(self.id)
            self.port = None

    def on_tsg_killed(self, code: int) -> None:
        """The TSG was killed: unserviceable, and the notifier written if it is empty."""
        self.unserviceable = True
        if self.notifier is not None:
            buf, offset = self.notifier
            if struct.unpack_from("<H", buf.memory_view, offset + 14)[0] != NOTIFIER_SET:
                now = time.time_ns()
                struct.pack_into(
                    "<IIIHH", buf.memory_view, offset, now & 0xFFFFFFFF, now >> 32, code, 0, 0
                )
                struct.pack_into("<H", buf.memory_view, offset + 14, NOTIFIER_SET)
            self.note_rule("notifier.first")

    def release(self) -> None:
        """The fd is gone: preempt, unbind, free."""
        if self.id < 0:
            return
        if self.is_busy_after_wait():
            self.kernel.journal.add_note(f"channel {self.id} was closed with work in its ring")
        if self.kept:
            self.kernel.journal.add_note(
                f"the close of channel {self.id} never returns on a board: a refused "
                f"TSG BIND_CHANNEL has kept a reference; {self.line}"
            )
        self.gone = True
        self.leave_runlist()
        if self.tsg is not None:
            self.tsg.unbind_channel(self, closing=True)
        if self.gpfifo is not None and self.vm is not None:
            self.vm.unmap_kernel_mapping(self.gpfifo)
        if self.vm is not None:
            self.vm.drop_holder()
        for buf in (self.userd, self.notifier[0] if self.notifier else None):
            if buf is not None:
                buf.drop_reference("kernel")
        if self.syncpoint is not None:
            self.kernel.syncpoints.append(self.syncpoint)
        self.kernel.channel_ids.append(self.id)

    def check_invariants(self) -> None:
        """A set-up channel is bound, its ring mapped; ids are not shared."""
        assert self.id not in self.kernel.channel_ids
        if self.port is not None:
            assert self.vm is not None and self.gpfifo is not None and self.tsg is not None
            assert self.vm.pages.mapping_at(self.gpfifo.va) is self.gpfifo
            assert self.kernel.ports[self.id] is self.port

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_WDT")
    def set_watchdog(self, args: StructBytes) -> None:
        """Enable or disable the watchdog."""
        status = args["wdt_status"] & 3
        if self.deterministic and status != WDT_DISABLE:
            raise self.refusal("wdt.deterministic")
        if status not in (WDT_DISABLE, WDT_ENABLE):
            raise self.refusal("wdt.status", f"{args['wdt_status']:#x}")
        self.watchdog = status == WDT_ENABLE

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SETUP_BIND")
    def setup_bind(self, args: StructBytes) -> None:
        """Checks in the kernel's order, then onto the runlist."""
        kernel, entries = self.kernel, args["num_gpfifo_entries"]
        self._check_setup(args)
        ring, mapping = self._map_ring(args)
        assert self.vm is not None and self.tsg is not None
        try:
            userd = kernel.require_dmabuf(
                args["userd_dmabuf_fd"], "setup.userd-badfd", "setup.userd-fd"
            )
            if not userd.is_allocated:
                raise self.refusal("setup.userd-fd", "its handle was never ALLOCed")
        except KernelError:
            self.vm.unmap_kernel_mapping(mapping)
            raise
        self.gpfifo, self.userd, self.deterministic = mapping, userd, True
        userd.add_reference("kernel")
        if any(userd.memory_view[USERD_GP_GET : USERD_GP_PUT + 4]):
            kernel.journal.add_note(f"USERD of channel {self.id} is not zeroed; {self.line}")
        self.note_rule("setup.userd-as-is")
        self.note_rule("profile.setup-bind")
        token = self.id | self.runlist << 16
        self.port = ChannelPort(
            id=self.id,
            token=token,
            tsg_id=self.tsg.id,
            runlist=self.runlist,
            veid=self.veid,
            vm=self.vm.pages,
            entries=entries,
            ring=ring.memory_view.toreadonly(),
            userd=userd.memory_view,
            fail=self._on_gpu_fault,
            post_event=self._on_gpu_event,
            gpfifo_va=mapping.va,
            classes=self.classes,
            enabled=self.tsg.enabled,
            line=self.line,
            context=self.tsg.context,
            budget=self.budget,
        )
        kernel.ports[self.id] = self.port
        if kernel.executor is None and kernel.make_executor is not None:
            kernel.executor = kernel.make_executor(kernel)
        if kernel.executor is not None:
            kernel.executor.attach_channel(self.port)
        args["work_submit_token"] = token
        if "hw_channel_id" in args:
            args["hw_channel_id"] = self.id

    def _check_setup(self, args: StructBytes) -> None:
        """The checks of SETUP_BIND that need no buffer."""
        entries, flags = args["num_gpfifo_entries"], args["flags"]
        if entries < (2 if flags & USERMODE else 4):
            raise self.refusal("setup.few", str(entries))
        if entries & (entries - 1):
            raise self.refusal("setup.pow2", str(entries))
        if entries > 0xFFFFFFFF // ENTRY:
            raise self.refusal("setup.many", str(entries))
        if self.vm is None or self.tsg is None:
            raise self.refusal("setup.unbound", "no AS" if self.vm is None else "no TSG")
        if self.gpfifo is not None:
            raise self.refusal("setup.twice")
        if flags & DETERMINISTIC and self.watchdog:
            raise self.refusal("setup.watchdog")
        if flags & USERMODE and not flags & DETERMINISTIC:
            raise self.refusal("setup.usermode")
        if flags & VPR:
            raise self.refusal("setup.vpr")
        if not flags & USERMODE:
            raise self.refusal("setup.kernel-mode", "the model has usermode channels only")
        if not args["gpfifo_dmabuf_fd"] or not args["userd_dmabuf_fd"]:
            raise self.refusal("setup.fd-zero")
        if args["gpfifo_dmabuf_offset"] or args["userd_dmabuf_offset"]:
            raise self.refusal("setup.offset")
        if self.subcontext is not None and self.subcontext.vm is None:
            self.kernel.journal.add_note(
                f"SETUP_BIND of channel {self.id} ends in a kernel oops on a board: the channel "
                f"was bound to its TSG before it had an address space; {self.line}"
            )
            raise self.refusal("setup.oops", f"VEID {self.veid}")

    def _map_ring(self, args: StructBytes) -> tuple[DmaBuf, Mapping]:
        """The client's ring, mapped in the kernel region."""
        entries, kernel = args["num_gpfifo_entries"], self.kernel
        ring = kernel.require_dmabuf(
            args["gpfifo_dmabuf_fd"], "setup.gpfifo-badfd", "setup.gpfifo-fd"
        )
        if ring.size < max(PAGE, entries * ENTRY) or not ring.is_allocated:
            raise self.refusal("setup.gpfifo-small", f"{ring.size:#x} for {entries} entries")
        assert self.vm is not None
        mapping = self.vm.map_in_kernel_region_if_room(ring, ring.size)
        if mapping is None:
            raise self.refusal("setup.no-room", f"{ring.size:#x}")
        if mapping.end > 1 << 40:
            kernel.journal.add_note(
                f"the ring of channel {self.id} lies at {mapping.va:#x}: the hardware's 40-bit "
                f"field holds {mapping.va & (1 << 40) - 1:#x}"
            )
        return ring, mapping

    def _on_gpu_fault(self, report: FaultReport) -> None:
        if self.port is not None:
            self.kernel.kill_tsg_for_fault(self.port, report)

    def _on_gpu_event(self, event_id: int) -> None:
        if self.tsg is not None:
            self.tsg.post_event(event_id)

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX")
    def alloc_obj_ctx(self, args: StructBytes) -> None:
        """Allow a class on the channel."""
        number, profile = args["class_num"], self.kernel.abi.profile
        if self.vm is None or self.tsg is None:
            raise self.refusal("obj.unbound", "no TSG" if self.tsg is None else "no AS")
        if not is_known_class(number, profile):
            raise self.refusal("obj.class", f"{number:#x}")
        self.obj_class = number  # kept when the rest is refused
        if profile != "r35":
            raise_if_wrong_veid_or_queue(self, self.tsg)
        self.tsg.context.set_up_for_class(self, args["flags"])
        self.classes.add(number)
        args["obj_id"] = 0

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER")
    def set_error_notifier(self, args: StructBytes) -> None:
        """Set the memory for the first error; the old one is given up even when this fails."""
        found = self.kernel.find_device_or_dmabuf(args["mem"]) if args["mem"] else None
        if args["mem"] and self.notifier is not None:
            self.notifier[0].drop_reference("kernel")
            self.notifier = None
        if not isinstance(found, DmaBuf) or not found.is_allocated:
            raise self.refusal("notifier.mem", f"fd {args['mem']}")
        if args["offset"] + NOTIFIER_SIZE > found.size:
            raise self.refusal("notifier.offset", f"{args['offset']:#x} in {found.size:#x}")
        found.add_reference("kernel")
        found.memory_view[args["offset"] : args["offset"] + NOTIFIER_SIZE] = bytes(NOTIFIER_SIZE)
        self.notifier = (found, args["offset"])
        self.note_rule("notifier.zeroed")

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT")
    def get_timedout(self, args: StructBytes) -> None:
        """1 once the channel is dead."""
        args["value"] = int(self.unserviceable)
        if self.unserviceable:
            self.note_rule("timedout.set")

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SET_TIMEOUT", "NVGPU_IOCTL_CHANNEL_SET_TIMEOUT_EX")
    def set_timeout(self, args: StructBytes) -> None:
        """Limit of the channel's context switch timeouts, stored without a look. _EX has a flag
        that silences the kernel's log."""
        self.budget.limit_ms = args["timeout"]

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SET_NVMAP_FD")
    def ignore_nvmap_fd(self, args: StructBytes) -> None:
        """A no-op."""
        self.note_rule("nvmap-fd.noop")

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE")
    def set_preemption_mode(self, args: StructBytes) -> None:
        """Modes of the TSG's context: never lower than before, and for a class that has them."""
        if not self.obj_class:
            raise self.refusal("preempt.no-class")
        if self.tsg is None:
            raise self.refusal("preempt.no-tsg")
        self.tsg.context.set_preemption_modes(
            self, args["graphics_preempt_mode"], args["compute_preempt_mode"]
        )

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT")
    def get_user_syncpoint(self, args: StructBytes) -> None:
        """One syncpoint per channel."""
        if self.syncpoint is None:
            if not self.kernel.syncpoints:
                raise self.refusal("syncpt.none-left")
            self.syncpoint = self.kernel.syncpoints.pop()
        else:
            self.note_rule("syncpt.same")
        args["syncpoint_id"], args["syncpoint_max"], args["gpu_va"] = self.syncpoint, 0, 0

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_ENABLE")
    def enable(self, _: bytearray) -> None:
        """Let this channel run."""
        if self.port is not None:
            self.port.enabled = True

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_DISABLE")
    def disable(self, _: bytearray) -> None:
        """Stop this channel."""
        if self.port is not None:
            self.port.enabled = False

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_PREEMPT")
    def ignore_preempt(self, _: bytearray) -> None:
        """Preemption is invisible to the client; from r36 on it goes through the TSG."""
        if self.tsg is None and self.kernel.abi.profile != "r35":
            raise self.refusal("channel.no-tsg")

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_RESCHEDULE_RUNLIST")
    def refuse_reschedule_runlist(self, _: bytearray) -> None:
        """Refused: the model's client is an ordinary user."""
        raise self.refusal("reschedule.privilege")

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_FORCE_RESET")
    def force_reset(self, _: bytearray) -> None:
        """Notifier 43 for the whole TSG; nothing for a channel without one."""
        self.note_rule("reset.forced")
        report = FaultReport(NOTIFIER_RESET, "FORCE_RESET by the client", {"ioctl": "FORCE_RESET"})
        if self.port is not None:
            self.kernel.kill_tsg_for_fault(self.port, report)
        elif self.tsg is not None:
            for channel in self.tsg.channels:
                channel.on_tsg_killed(NOTIFIER_RESET)

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_WAIT")
    def wait_for_notifier_or_semaphore(self, args: StructBytes) -> None:
        """Kernel-side wait for a notifier or semaphore in a dmabuf."""
        if self.unserviceable:
            raise self.refusal("wait.dead")
        semaphore, offset = args["type"] == 1, args["condition.notifier.offset"]
        if args["type"] not in (0, 1):
            raise self.refusal("wait.type", str(args["type"]))
        if semaphore and offset % 4:
            raise self.refusal("wait.offset", f"{offset:#x}")
        found = self.kernel.find_device_or_dmabuf(args["condition.notifier.dmabuf_fd"])
        size = 4 if semaphore else NOTIFIER_SIZE
        if not isinstance(found, DmaBuf) or not found.is_allocated or offset + size > found.size:
            raise self.refusal("wait.notifier")
        want = args["condition.semaphore.payload"]

        def reached() -> bool:
            if semaphore:
                return bool(struct.unpack_from("<I", found.memory_view, offset)[0] == want)
            return bool(struct.unpack_from("<H", found.memory_view, offset + 14)[0] == 0)

        self._wait_until(args["timeout"], reached, "wait.dead" if semaphore else "wait.expired")
        if not semaphore:
            if not reached():  # the channel died; a semaphore's wait is then a success
                raise self.refusal("wait.dead")
            now = time.time_ns() & (1 << 64) - 1
            struct.pack_into("<QIH", found.memory_view, offset, now, WAITED, self.id & 0xFFFF)

    def _wait_until(self, timeout: int, reached: Callable[[], bool], expired: str) -> None:
        """Wait for `timeout` ms (0: for ever) or for the channel's death; raises KernelError."""
        until = time.monotonic() + timeout / 1000
        while not reached() and not self.unserviceable:
            if timeout and time.monotonic() >= until:
                raise self.refusal(expired, "timed out")
            self.kernel.lock.release()
            try:
                time.sleep(0.001)
            finally:
                self.kernel.lock.acquire()

    @ioctl_handler("NVGPU_IOCTL_CHANNEL_SUBMIT_GPFIFO")
    def refuse_submit_gpfifo(self, args: StructBytes) -> None:
        """Refused: the channel submits from user mode."""
        if self.unserviceable:
            raise self.refusal("wait.dead")
        raise self.refusal("submit.usermode")
