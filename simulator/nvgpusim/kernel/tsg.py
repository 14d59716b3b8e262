"""Time slice groups: channels that live and die together [K36 ioctl_tsg.c, tsg_subctx.c]."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from ..abi import Record
from ..ctxsw import Context
from ..gpu_api import SmError
from ..rules import KernelError
from .file import File, handler

if TYPE_CHECKING:
    from .address_space import Vm
    from .channel import ChannelFile
    from .core import Kernel

MAX_VEIDS = 64
TIMESLICE_DEFAULT, TIMESLICE_MIN, TIMESLICE_MAX = 1024, 1000, 50000
SYNC, ASYNC = 0, 1
EVENT_IDS = range(6)


class Tsg:
    """A TSG by reference count: its fd and its channels hold it."""

    def __init__(self, kernel: Kernel) -> None:
        if not kernel.tsg_ids:
            raise KernelError("tsg.none-left")
        self.kernel = kernel
        self.id = kernel.tsg_ids.pop()
        self.refs = 1
        self.channels: list[ChannelFile] = []
        self.subcontexts: dict[int, Vm] = {}
        self.sm_errors: dict[int, SmError] = {}
        self.timeslice = TIMESLICE_DEFAULT
        self.enabled = True
        self.events: list[EventFile] = []
        self.context = Context()

    def put(self) -> None:
        """One holder less; the last one frees the TSG."""
        self.refs -= 1
        if self.refs == 0:
            for vm in self.subcontexts.values():
                vm.put()
            self.kernel.tsg_ids.append(self.id)

    def bind(self, channel: ChannelFile, veid: int) -> None:
        """BIND_CHANNEL_EX; raises KernelError."""
        kernel = self.kernel
        if veid == 0 and 0 not in self.subcontexts and channel.vm is not None:
            self.subcontexts[0] = channel.vm.get()
            kernel.journal.rule("bind.sync")
        if kernel.abi.profile == "r35" and veid not in self.subcontexts and channel.vm is not None:
            self.subcontexts[veid] = channel.vm.get()
        if channel.vm is None or self.subcontexts.get(veid) is not channel.vm:
            raise KernelError("bind.vm", f"VEID {veid}")
        if channel.tsg is not None:
            raise KernelError("bind.twice")
        if self.channels and self.channels[0].runlist != channel.runlist:
            raise KernelError("bind.runlist", f"{channel.runlist}")
        channel.tsg, channel.veid = self, veid
        self.refs += 1
        self.channels.append(channel)

    def unbind(self, channel: ChannelFile) -> None:
        """Take a channel out."""
        self.channels.remove(channel)
        channel.tsg = None
        self.put()

    def enable(self, on: bool) -> None:
        """ENABLE and DISABLE."""
        self.enabled = on
        for channel in self.channels:
            if channel.port is not None:
                channel.port.enabled = on

    def post(self, event_id: int) -> None:
        """Post an event to every fd that waits for it; any thread."""
        for event in list(self.events):
            if event.event_id == event_id:
                event.post()


class EventFile(File):
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
        raise self.refuse("dispatch.unknown")

    def post(self) -> None:
        """Make the fd readable: out-of-band data gives POLLPRI | POLLIN, as the driver does."""
        if not self.posted and self.peer is not None:
            self.posted = True
            with suppress(OSError):  # the client closes it while the GPU's thread posts
                self.peer.send(b"!", socket.MSG_OOB)

    def release(self) -> None:
        """The fd is gone."""
        self.tsg.events.remove(self)
        self.tsg.put()


class TsgFile(File):
    """A TSG fd."""

    kind, letter = "tsg", "T"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.tsg = Tsg(kernel)

    def release(self) -> None:
        """The fd is gone; channels may still hold the TSG."""
        self.tsg.put()

    def check(self) -> None:
        """Every member knows its TSG, subcontexts are alive."""
        for channel in self.tsg.channels:
            assert channel.tsg is self.tsg
            assert channel.vm is not None and channel.vm.refs > 0
        for veid, vm in self.tsg.subcontexts.items():
            assert 0 <= veid < MAX_VEIDS and vm.refs > 0

    def _channel(self, fd: int) -> ChannelFile:
        from .channel import ChannelFile

        channel = self.kernel.file(fd, "channel")
        if not isinstance(channel, ChannelFile):
            raise self.refuse("bind.fd", f"fd {fd}")
        return channel

    @handler("NVGPU_TSG_IOCTL_BIND_CHANNEL")
    def bind_channel(self, raw: bytearray) -> None:
        """Bind on VEID 0."""
        self.tsg.bind(self._channel(struct.unpack("<i", raw)[0]), 0)

    @handler("NVGPU_TSG_IOCTL_BIND_CHANNEL_EX")
    def bind_channel_ex(self, args: Record) -> None:
        """Bind on a VEID."""
        if self.kernel.scheduler_locked:
            raise self.refuse("bind.locked")
        channel = self._channel(args["channel_fd"])
        if args["subcontext_id"] >= MAX_VEIDS:
            raise self.refuse("bind.veid", str(args["subcontext_id"]))
        self.tsg.bind(channel, args["subcontext_id"])

    @handler("NVGPU_TSG_IOCTL_UNBIND_CHANNEL")
    def unbind_channel(self, raw: bytearray) -> None:
        """Unbind; the channel is of no use afterwards."""
        channel = self._channel(struct.unpack("<i", raw)[0])
        if channel.tsg is not self.tsg:
            raise self.refuse("unbind.not-member")
        if channel.busy():
            raise self.refuse("unbind.busy")
        channel.disconnect()
        self.tsg.unbind(channel)
        channel.unserviceable = True
        self.follow("unbind.unserviceable")

    @handler("NVGPU_IOCTL_TSG_ENABLE")
    def enable(self, _: bytearray) -> None:
        """Let the channels run."""
        self.tsg.enable(True)

    @handler("NVGPU_IOCTL_TSG_DISABLE")
    def disable(self, _: bytearray) -> None:
        """Stop the channels."""
        self.tsg.enable(False)

    @handler("NVGPU_IOCTL_TSG_PREEMPT")
    def preempt(self, _: bytearray) -> None:
        """Preemption is invisible to the client."""

    @handler("NVGPU_IOCTL_TSG_EVENT_ID_CTRL")
    def event_id_ctrl(self, args: Record) -> None:
        """A pollable fd for one event."""
        if args["event_id"] not in EVENT_IDS:
            raise self.refuse("event.id", str(args["event_id"]))
        if args["cmd"] != 1:
            raise self.refuse("event.cmd", str(args["cmd"]))
        event = EventFile(self.kernel, self.tsg, args["event_id"])
        try:
            args["event_fd"] = self.kernel.install(event)
        except KernelError:
            event.release()
            raise

    @handler("NVGPU_IOCTL_TSG_SET_TIMESLICE")
    def set_timeslice(self, args: Record) -> None:
        """Microseconds."""
        if not TIMESLICE_MIN <= args["timeslice_us"] <= TIMESLICE_MAX:
            raise self.refuse("timeslice.range", str(args["timeslice_us"]))
        self.tsg.timeslice = args["timeslice_us"]

    @handler("NVGPU_IOCTL_TSG_GET_TIMESLICE")
    def get_timeslice(self, args: Record) -> None:
        """Microseconds."""
        args["timeslice_us"] = self.tsg.timeslice

    @handler("NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE")
    def sm_error(self, args: Record) -> int:
        """The record of one SM, kept since the last exception."""
        if args["sm_id"] >= self.kernel.shape.sms:
            raise self.refuse("sm.id", str(args["sm_id"]))
        record = self.kernel.abi.record("nvgpu_tsg_sm_error_state_record")
        error = self.tsg.sm_errors.get(args["sm_id"], SmError())
        for name, value in vars(error).items():
            record[name] = value
        size = min(args["record_size"], record.struct.size)
        self.follow("profile.sm-record")
        residue = self.kernel.user.write(args["record_mem"], bytes(record.raw[:size]))
        args["record_size"] = size
        return residue

    @handler("NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT")
    def create_subcontext(self, args: Record) -> None:
        """A VEID for an address space."""
        from .address_space import AsFile

        if args["type"] not in (SYNC, ASYNC):
            raise self.refuse("subctx.type", str(args["type"]))
        space = self.kernel.file(args["as_fd"], "as")
        if not isinstance(space, AsFile):
            raise self.refuse("subctx.as", f"fd {args['as_fd']}")
        taken = self.tsg.subcontexts
        free = [v for v in range(1, MAX_VEIDS) if v not in taken] if args["type"] == ASYNC else []
        if not free:
            if args["type"] == ASYNC:
                self.follow("subctx.fallback")
            free = [0] if 0 not in taken else []
        if not free:
            raise self.refuse("subctx.none-left")
        taken[free[0]] = space.vm.get()
        args["veid"] = free[0]

    @handler("NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT")
    def delete_subcontext(self, args: Record) -> None:
        """Give a VEID back."""
        veid = args["veid"]
        if veid not in self.tsg.subcontexts or any(c.veid == veid for c in self.tsg.channels):
            raise self.refuse("subctx.delete", str(veid))
        self.tsg.subcontexts.pop(veid).put()
