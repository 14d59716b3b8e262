"""Time slice groups: channels that live and die together [K36 ioctl_tsg.c, tsg_subctx.c]."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from ..abi import StructBytes
from ..gpu_api import SmErrorRecord
from ..rules import KernelError
from .address_space import AsFile, Vm
from .channel import ChannelFile
from .device_file import DeviceFile, ioctl_handler
from .gpu_classes import GrContext

if TYPE_CHECKING:
    from .core import Kernel

MAX_VEIDS = 64
MAX_CHANNELS = 128
"""ram_rl_entry_tsg_length_max of ga10b."""
INTERLEAVE_LEVELS = range(3)
TIMESLICE_DEFAULT, TIMESLICE_MIN, TIMESLICE_MAX = 1024, 1000, 50000
SYNC, ASYNC = 0, 1
EVENT_IDS = range(6)


class Subcontext:
    """The channels of one VEID that are in a TSG, and the space that the first of them had."""

    def __init__(self, veid: int, vm: Vm | None) -> None:
        self.veid, self.vm = veid, vm
        self.channels: list[ChannelFile] = []


class Tsg:
    """A TSG by reference count: its fd and its channels hold it.

    `spaces` are the address spaces of the VEIDs that were given out (`sync`: VEID 0 was, `taken`:
    the others); `subcontexts` are the VEIDs that channels are in, in the order of their first one.
    """

    def __init__(self, kernel: Kernel) -> None:
        if not kernel.tsg_ids:
            raise KernelError("tsg.none-left")
        self.kernel = kernel
        self.id = kernel.tsg_ids.pop()
        self.refs = 1
        self.runlist: int | None = None
        self.channels: list[ChannelFile] = []
        self.spaces: dict[int, Vm | None] = {}
        self.sync = False
        self.taken: set[int] = set()
        self.subcontexts: list[Subcontext] = []
        self.context = GrContext(self)
        self.sm_errors: dict[int, SmErrorRecord] = {}
        self.timeslice = TIMESLICE_DEFAULT
        self.interleave = 0
        self.enabled = True
        self.events: list[EventFile] = []

    @property
    def is_r35(self) -> bool:
        """True if this is the driver without subcontexts of its own."""
        return self.kernel.abi.profile == "r35"

    def drop_holder(self) -> None:
        """One holder less; the last one frees the TSG."""
        self.refs -= 1
        if self.refs == 0:
            self.kernel.tsg_ids.append(self.id)

    def give_veid(self, kind: int, vm: Vm) -> int:
        """CREATE_SUBCONTEXT: a VEID; raises KernelError."""
        free = [v for v in range(1, MAX_VEIDS) if v not in self.taken] if kind == ASYNC else []
        if free:
            self.taken.add(free[0])
        else:
            if kind == ASYNC:
                self.kernel.journal.count_rule("subctx.fallback")
            if self.sync:
                raise KernelError("subctx.none-left")
            self.sync = True
        veid = free[0] if free else 0
        if self.spaces.get(veid) is None:
            self.spaces[veid] = vm
        return veid

    def take_veid_back(self, veid: int) -> None:
        """Free a VEID; nothing when it is free already."""
        if veid == 0 and self.sync:
            self.sync, self.spaces[0] = False, None
        elif veid in self.taken:
            self.taken.remove(veid)
            self.spaces[veid] = None

    def set_or_check_address_space(self, channel: ChannelFile) -> None:
        """Before each bind from r36 on; VEID 0 takes its first channel's. Raises KernelError."""
        if channel.veid == 0 and self.spaces.get(0) is None:
            if self.sync:
                raise KernelError("bind.no-sync")
            self.sync, self.spaces[0] = True, channel.vm
            self.kernel.journal.count_rule("bind.sync")
        if channel.vm is not self.spaces.get(channel.veid):
            raise KernelError("bind.vm", f"VEID {channel.veid}")

    def bind_channel(self, channel: ChannelFile) -> None:
        """Take a channel in on its VEID; raises KernelError."""
        if channel.tsg is not None:
            raise KernelError("bind.twice")
        if len(self.channels) == MAX_CHANNELS:
            raise KernelError("bind.full")
        if channel.veid:
            channel.runqueue = 1
        if self.runlist is None:
            self.runlist = channel.runlist
        if self.runlist != channel.runlist:
            raise KernelError("bind.runlist", f"{channel.runlist}")
        if not self.is_r35:
            self._join_subcontext(channel)
        channel.tsg, channel.unserviceable = self, False
        self.refs += 1
        self.channels.append(channel)

    def _join_subcontext(self, channel: ChannelFile) -> None:
        found = next((s for s in self.subcontexts if s.veid == channel.veid), None)
        if found is None:
            found = Subcontext(channel.veid, channel.vm)
            self.subcontexts.append(found)
        elif found.vm is not channel.vm:
            raise KernelError("bind.subctx-vm", f"VEID {channel.veid}")
        channel.subcontext = found
        found.channels.append(channel)

    def unbind_channel(self, channel: ChannelFile, closing: bool = False) -> None:
        """Take a channel out; the last one of a VEID gives it back when its fd is closed."""
        self.channels.remove(channel)
        channel.tsg, left = None, channel.subcontext
        if left is not None:
            left.channels.remove(channel)
            if not left.channels:
                if closing:
                    self.take_veid_back(channel.veid)
                self.subcontexts.remove(left)
            channel.subcontext = None
        self.drop_holder()

    def has_channel_of_class(self, classes: frozenset[int], veid0: bool, runqueue0: bool) -> bool:
        """True if a channel with one of `classes` is on VEID 0 (or another), run queue 0 (or 1)."""
        return any(
            channel.obj_class in classes and (channel.runqueue == 0) == runqueue0
            for subcontext in self.subcontexts
            if (subcontext.veid == 0) == veid0
            for channel in subcontext.channels
        )

    def set_enabled(self, on: bool) -> None:
        """ENABLE and DISABLE."""
        self.enabled = on
        for channel in self.channels:
            if channel.port is not None:
                channel.port.enabled = on

    def post_event(self, event_id: int) -> None:
        """Post an event to every fd that waits for it; any thread."""
        for event in list(self.events):
            if event.event_id == event_id:
                event.make_readable()


class EventFile(DeviceFile):
    """An fd of EVENT_ID_CTRL: poll shows a posted event once."""

    kind, letter = "event", "E"

    def __init__(self, kernel: Kernel, tsg: Tsg, event_id: int) -> None:
        super().__init__(kernel)
        self.tsg, self.event_id = tsg, event_id
        tsg.refs += 1
        tsg.events.append(self)
        self.posted = False

    def ioctl(self, request: int, arg: int) -> int:
        """Event fds have no ioctls."""
        raise self.refusal("dispatch.unknown")

    def make_readable(self) -> None:
        """Make the fd readable: out-of-band data gives POLLPRI | POLLIN, as the driver does."""
        if not self.posted and self.peer is not None:
            self.posted = True
            with suppress(OSError):  # the client closes it while the GPU's thread posts
                self.peer.send(b"!", socket.MSG_OOB)

    def release(self) -> None:
        """The fd is gone."""
        self.tsg.events.remove(self)
        self.tsg.drop_holder()


class TsgFile(DeviceFile):
    """A TSG fd."""

    kind, letter = "tsg", "T"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.tsg = Tsg(kernel)

    def release(self) -> None:
        """The fd is gone; channels may still hold the TSG."""
        self.tsg.drop_holder()

    def check_invariants(self) -> None:
        """Every member knows its TSG, subcontexts are alive."""
        tsg = self.tsg
        for channel in tsg.channels:
            assert channel.tsg is tsg
            assert channel.vm is None or channel.vm.refs > 0
        for subcontext in tsg.subcontexts:
            assert subcontext.channels
            assert all(c.tsg is tsg and c.subcontext is subcontext for c in subcontext.channels)
        assert all(0 < veid < MAX_VEIDS for veid in tsg.taken)

    def _require_channel(self, fd: int) -> ChannelFile:
        channel = self.kernel.find_file_by_fd_and_kind(fd, ChannelFile)
        if channel is None:
            raise self.refusal("bind.fd", f"fd {fd}")
        return channel

    @ioctl_handler("NVGPU_TSG_IOCTL_BIND_CHANNEL")
    def bind_channel(self, raw: bytearray) -> None:
        """Bind on the VEID that a BIND_CHANNEL_EX asked for last, else 0.

        A refusal for the address space keeps a reference of the channel: its close waits for ever.
        """
        channel = self._require_channel(struct.unpack("<i", raw)[0])
        if not self.tsg.is_r35:
            try:
                self.tsg.set_or_check_address_space(channel)
            except KernelError:
                channel.kept = True
                raise
        self.tsg.bind_channel(channel)

    @ioctl_handler("NVGPU_TSG_IOCTL_BIND_CHANNEL_EX")
    def bind_channel_ex(self, args: StructBytes) -> None:
        """Bind on a VEID."""
        if self.kernel.scheduler_locked:
            raise self.refusal("bind.locked")
        channel = self._require_channel(args["channel_fd"])
        if args["subcontext_id"] >= MAX_VEIDS:
            raise self.refusal("bind.veid", str(args["subcontext_id"]))
        channel.veid = args["subcontext_id"]  # kept, and its run queue, when the rest is refused
        if channel.veid:
            channel.runqueue = 1
        if not self.tsg.is_r35:
            self.tsg.set_or_check_address_space(channel)
        self.tsg.bind_channel(channel)

    @ioctl_handler("NVGPU_TSG_IOCTL_UNBIND_CHANNEL")
    def unbind_channel(self, raw: bytearray) -> None:
        """Unbind; the channel is of no use afterwards."""
        channel = self._require_channel(struct.unpack("<i", raw)[0])
        if channel.tsg is not self.tsg:
            raise self.refusal("unbind.not-member")
        if channel.is_busy_after_wait():
            raise self.refusal("unbind.busy")
        channel.leave_runlist()
        self.tsg.unbind_channel(channel)
        channel.unserviceable = True
        self.note_rule("unbind.unserviceable")

    @ioctl_handler("NVGPU_IOCTL_TSG_ENABLE")
    def enable(self, _: bytearray) -> None:
        """Let the channels run."""
        self.tsg.set_enabled(True)

    @ioctl_handler("NVGPU_IOCTL_TSG_DISABLE")
    def disable(self, _: bytearray) -> None:
        """Stop the channels."""
        self.tsg.set_enabled(False)

    @ioctl_handler("NVGPU_IOCTL_TSG_PREEMPT")
    def ignore_preempt(self, _: bytearray) -> None:
        """Preemption is invisible to the client."""

    @ioctl_handler("NVGPU_IOCTL_TSG_EVENT_ID_CTRL")
    def open_event_fd(self, args: StructBytes) -> None:
        """A pollable fd for one event."""
        if args["event_id"] not in EVENT_IDS:
            raise self.refusal("event.id", str(args["event_id"]))
        if args["cmd"] != 1:
            raise self.refusal("event.cmd", str(args["cmd"]))
        if self.tsg.is_r35 and any(e.event_id == args["event_id"] for e in self.tsg.events):
            raise self.refusal("event.again", str(args["event_id"]))
        event = EventFile(self.kernel, self.tsg, args["event_id"])
        try:
            args["event_fd"] = self.kernel.give_client_fd(event)
        except KernelError:
            event.release()
            raise

    @ioctl_handler("NVGPU_IOCTL_TSG_SET_TIMESLICE")
    def set_timeslice(self, args: StructBytes) -> None:
        """Microseconds."""
        if self.kernel.scheduler_locked:
            raise self.refusal("bind.locked")
        if not TIMESLICE_MIN <= args["timeslice_us"] <= TIMESLICE_MAX:
            raise self.refusal("timeslice.range", str(args["timeslice_us"]))
        self.tsg.timeslice = args["timeslice_us"]

    @ioctl_handler("NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE")
    def set_runlist_interleave(self, args: StructBytes) -> None:
        """Set the number of times that the TSG stands on its runlist: low, medium, high."""
        if self.kernel.scheduler_locked:
            raise self.refusal("bind.locked")
        if args["level"] not in INTERLEAVE_LEVELS:
            raise self.refusal("interleave.level", str(args["level"]))
        self.tsg.interleave = args["level"]

    @ioctl_handler("NVGPU_IOCTL_TSG_GET_TIMESLICE")
    def get_timeslice(self, args: StructBytes) -> None:
        """Microseconds."""
        args["timeslice_us"] = self.tsg.timeslice

    @ioctl_handler("NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE")
    def read_sm_error(self, args: StructBytes) -> int:
        """The record of one SM, kept since the last exception."""
        if args["sm_id"] >= self.kernel.shape.sms:
            raise self.refusal("sm.id", str(args["sm_id"]))
        record = self.kernel.abi.make_struct("nvgpu_tsg_sm_error_state_record")
        error = self.tsg.sm_errors.get(args["sm_id"], SmErrorRecord())
        for name, value in vars(error).items():
            record[name] = value
        size = min(args["record_size"], record.struct.size)
        self.note_rule("profile.sm-record")
        residue = self.kernel.user.copy_to_user(args["record_mem"], bytes(record.raw[:size]))
        args["record_size"] = size
        return residue

    @ioctl_handler("NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT")
    def create_subcontext(self, args: StructBytes) -> None:
        """A VEID for an address space."""
        if args["type"] not in (SYNC, ASYNC):
            raise self.refusal("subctx.type", str(args["type"]))
        space = self.kernel.find_file_by_fd_and_kind(args["as_fd"], AsFile)
        if space is None:
            raise self.refusal("subctx.as", f"fd {args['as_fd']}")
        args["veid"] = self.tsg.give_veid(args["type"], space.vm)

    @ioctl_handler("NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT")
    def delete_subcontext(self, args: StructBytes) -> None:
        """Give a VEID back."""
        veid, tsg = args["veid"], self.tsg
        if veid >= MAX_VEIDS or any(s.veid == veid for s in tsg.subcontexts):
            raise self.refusal("subctx.delete", str(veid))
        if veid not in tsg.taken and not (veid == 0 and tsg.sync):
            self.note_rule("subctx.delete-free")
        tsg.take_veid_back(veid)
