"""`nvgpusim replay`: drive the model with a trace and list where it answers differently.

Descriptors, nvmap handles and (unless asked) GPU addresses are names that each side chooses for
itself: they are translated, not compared. Pointers and times are not compared either.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SimError
from ..options import PROFILES, Options
from .abi import Abi, FieldLayout, Ioctl, StructBytes, ioc_nr, ioc_type
from .call_trace import BUFFERS, VERSION
from .kernel import Kernel
from .kernel.core import NODES

# Members by what they mean: f descriptor, h handle, v GPU address, p pointer, t time, k token;
# capitals are outputs.
_ROLES: dict[str, dict[str, str]] = {
    "NVGPU_GPU_IOCTL_GET_CHARACTERISTICS": {"gpu_characteristics_buf_addr": "p"},
    "NVGPU_GPU_IOCTL_ALLOC_AS": {"as_fd": "F"},
    "NVGPU_GPU_IOCTL_OPEN_TSG": {"tsg_fd": "F"},
    "NVGPU_GPU_IOCTL_OPEN_CHANNEL": {"channel_fd": "F"},
    "NVGPU_GPU_IOCTL_GET_TPC_MASKS": {"mask_buf_addr": "p"},
    "NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS": {"mask_buf_addr": "p"},
    "NVGPU_GPU_IOCTL_GET_ENGINE_INFO": {"engine_info_buf_addr": "p"},
    "NVGPU_GPU_IOCTL_GET_GPU_TIME": {"gpu_timestamp": "t"},
    "NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO": {"samples": "t"},
    "NVGPU_AS_IOCTL_BIND_CHANNEL": {"channel_fd": "f"},
    "NVGPU_AS_IOCTL_MAP_BUFFER_EX": {"dmabuf_fd": "f", "offset": "vV"},
    "NVGPU_AS_IOCTL_UNMAP_BUFFER": {"offset": "v"},
    "NVGPU_AS_IOCTL_ALLOC_SPACE": {"o_a.offset": "vV"},
    "NVGPU_AS_IOCTL_FREE_SPACE": {"offset": "v"},
    "NVGPU_AS_IOCTL_GET_VA_REGIONS": {"buf_addr": "p"},
    "NVGPU_AS_IOCTL_GET_SYNC_RO_MAP": {"base_gpuva": "V"},
    "NVGPU_TSG_IOCTL_BIND_CHANNEL": {"": "f"},
    "NVGPU_TSG_IOCTL_UNBIND_CHANNEL": {"": "f"},
    "NVGPU_TSG_IOCTL_BIND_CHANNEL_EX": {"channel_fd": "f"},
    "NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT": {"as_fd": "f"},
    "NVGPU_IOCTL_TSG_EVENT_ID_CTRL": {"event_fd": "F"},
    "NVGPU_TSG_IOCTL_READ_SINGLE_SM_ERROR_STATE": {"record_mem": "p"},
    "NVGPU_IOCTL_CHANNEL_SETUP_BIND": {
        "userd_dmabuf_fd": "f",
        "gpfifo_dmabuf_fd": "f",
        "work_submit_token": "t",
        "hw_channel_id": "t",
    },
    "NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER": {"mem": "f"},
    "NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT": dict.fromkeys(
        ("gpu_va", "syncpoint_id", "syncpoint_max"), "t"
    ),
    "NVMAP_IOC_CREATE": {"handle": "H"},
    "NVMAP_IOC_CREATE_64": {"handle64": "H"},
    "NVMAP_IOC_ALLOC": {"handle": "h"},
    "NVMAP_IOC_GET_FD": {"handle": "h", "fd": "F"},
    "NVMAP_IOC_FROM_FD": {"fd": "f", "handle": "H"},
    "NVMAP_IOC_FROM_VA": {"va": "p", "handle": "H"},
    "NVMAP_IOC_PARAM": {"handle": "h"},
    "NVMAP_IOC_CACHE": {"handle": "h", "addr": "p"},
    "NVMAP_IOC_DUP_HANDLE": {"handle": "h", "dup_handle": "H"},
    "NVMAP_IOC_PARAMETERS": {"handle": "h", "serial_id": "t"},
}  # fmt: skip
_SECOND = {"G5": "nvgpu_gpu_characteristics", "A8": "nvgpu_as_va_region"}
_TIMES = {"rev", "device_instance_id", "per_device_identifier", "gpu_instance_id"}
"""Members of second buffers that belong to one board and not to the model."""


@dataclass
class TraceReplay:
    """A trace, the model that it drives, and the names that both sides use."""

    events: list[dict[str, Any]]
    kernel: Kernel
    addresses: bool
    source: str
    fds: dict[int, int] = field(default_factory=dict)
    handles: dict[int, int] = field(default_factory=dict)
    vas: dict[int, int] = field(default_factory=dict)
    played: int = 0
    skipped: int = 0
    differences: int = 0

    @classmethod
    def load(cls, path: Path, profile: str | None, board: str, addresses: bool) -> TraceReplay:
        """Read a trace; raises SimError when it is not one of this version."""
        try:
            lines = path.read_text(encoding="ascii").splitlines()
            head, *events = [json.loads(line) for line in lines if line.strip()]
        except OSError as error:
            raise SimError(f"{path}: {error.strerror}; expected a trace file") from error
        except ValueError:
            raise SimError(f"{path}: not a trace: expected lines of JSON, from --record") from None
        if not isinstance(head, dict) or "nvgpu-trace" not in head:
            raise SimError(f"{path}: not a trace: its first line has no nvgpu-trace")
        if head["nvgpu-trace"] != VERSION:
            found = head["nvgpu-trace"]
            raise SimError(f"{path}: a trace of version {found}; this simulator reads {VERSION}")
        chosen = profile or head.get("profile", "")
        if chosen not in PROFILES:
            raise SimError(f"{path}: profile {chosen!r} is not modelled; give --profile r36")
        kernel = Kernel(Options(profile=chosen, board=board))
        return cls(events, kernel, addresses, str(head.get("source")))

    def summary_line(self) -> str:
        """One line at the end."""
        return (
            f"{self.played} events of a {self.source} trace replayed on {self.kernel.abi.profile}, "
            f"{self.skipped} skipped, {self.differences} differences"
        )

    def iter_difference_lines(self) -> Iterator[str]:
        """Play all events; yields a line for each difference."""
        for number, event in enumerate(self.events, 2):
            handler = getattr(self, f"_replay_{event.get('op')}_differences", None)
            if handler is None:
                self.skipped += 1
                continue
            self.played += 1
            try:
                for line in handler(event):
                    self.differences += 1
                    yield f"line {number}: {line}"
            except (KeyError, ValueError, TypeError) as error:
                raise SimError(f"line {number} of the trace is damaged: {error!r}") from error
        for fd in self.fds.values():
            with suppress(OSError):
                os.close(fd)
        self.kernel.release_closed_files()

    def _replay_open_differences(self, event: dict[str, Any]) -> Iterator[str]:
        if event["path"] not in NODES:
            self.skipped += 1
            return
        try:
            self.fds[event.get("fd", -1)] = self.kernel.open(event["path"])
            got = 0
        except OSError as error:
            got = error.errno or 0
        if got != event["errno"]:
            yield f"open {event['path']}: errno {got}, trace {event['errno']}"

    def _replay_close_differences(self, event: dict[str, Any]) -> Iterator[str]:
        fd = self.fds.pop(event["fd"], None)
        if fd is not None:
            found = self.kernel.find_device_or_dmabuf(fd)
            os.close(fd)
            self.kernel.release_closed_files()
            if found is not None and not hasattr(found, "kind"):
                self.kernel.nvmap.on_fd_closed(found)
        yield from ()

    def _replay_mmap_differences(self, event: dict[str, Any]) -> Iterator[str]:
        fd, number = self.fds.get(event["fd"], -1), 0
        try:
            got = self.kernel.fd_to_map(fd, event["length"], event["offset"])
            if got is not None and not event["errno"]:
                self.kernel.on_mapped(event["address"], event["length"], got[1])
        except OSError as error:
            number = error.errno or 0
        if number != event["errno"]:
            yield f"mmap of fd {event['fd']}: errno {number}, trace {event['errno']}"

    def _replay_munmap_differences(self, event: dict[str, Any]) -> Iterator[str]:
        self.kernel.on_unmapped(event["address"], event["length"])
        yield from ()

    def _replay_ioctl_differences(self, event: dict[str, Any]) -> Iterator[str]:
        request, tables = int(event["req"], 16), self.kernel.abi
        known = tables.by_number.get(request)
        fd = self.fds.get(event["fd"])
        if fd is None:
            self.skipped += 1
            return
        name = tables.ioctl_name(request)
        roles = _ROLES.get(known.name, {}) if known else {}
        if "in" not in event:
            value = self.handles.get(event["arg"], event["arg"])
            answer = self._ioctl_result_and_errno(fd, request, value)
            yield from self._result_differences(event, name, *answer)
            return
        given = bytearray.fromhex(event["in"])
        record = _struct_or_none(tables, known, given)
        for member, role in roles.items():
            if record is not None and member in record and role[0] in "fhv":
                record[member] = self._model_value(role[0], record[member])
            elif not member and role == "f":
                value = self.fds.get(int.from_bytes(given, "little"), 0xFFFF)
                given[:] = value.to_bytes(4, "little")
        second, pointer = self._add_second_buffer(event, request, given)
        raw = (ctypes.c_ubyte * max(len(given), 1)).from_buffer(given or bytearray(1))
        result, number = self._ioctl_result_and_errno(fd, request, ctypes.addressof(raw))
        differs = list(self._result_differences(event, name, result, number))
        yield from differs
        if not differs and not number and record is not None:
            yield from self._output_differences(event, tables, known, record, roles, name)
            if second is not None:
                theirs = bytes.fromhex(event["bufs"][str(pointer)])
                yield from self._buffer_differences(request, tables, theirs, bytes(second), name)

    def _ioctl_result_and_errno(self, fd: int, request: int, arg: int) -> tuple[int, int]:
        try:
            return self.kernel.ioctl(fd, request, arg), 0
        except OSError as error:
            return -1, error.errno or 0

    def _result_differences(
        self, event: dict[str, Any], name: str, result: int, number: int
    ) -> Iterator[str]:
        if (result, number) != (event["ret"], event["errno"]):
            mine = os.strerror(number) if number else str(result)
            theirs = os.strerror(event["errno"]) if event["errno"] else str(event["ret"])
            yield f"{name}: model {mine}, trace {theirs}"

    def _model_value(self, role: str, value: int) -> int:
        table = {"f": self.fds, "h": self.handles, "v": self.vas}[role]
        return table.get(value, value)

    def _add_second_buffer(
        self, event: dict[str, Any], request: int, given: bytearray
    ) -> tuple[Any, int]:
        where = BUFFERS.get((ioc_type(request), ioc_nr(request)))
        if where is None or "bufs" not in event:
            return None, 0
        size = len(event["bufs"][str(where[0])]) // 2
        space = (ctypes.c_ubyte * max(size, 1))()
        given[where[0] : where[0] + 8] = ctypes.addressof(space).to_bytes(8, "little")
        return space, where[0]

    def _output_differences(
        self,
        event: dict[str, Any],
        tables: Abi,
        known: Ioctl | None,
        record: StructBytes,
        roles: dict[str, str],
        name: str,
    ) -> Iterator[str]:
        theirs = _struct_or_none(tables, known, bytearray.fromhex(event["out"]))
        if theirs is None:
            return
        named = [record.struct.fields[m] for m in roles if m in record]
        for member, mine in record.integer_members().items():
            role, value, place = roles.get(member, ""), theirs[member], record.struct.fields[member]
            last = role[-1:]
            if last == "F":
                self.fds[value & 0xFFFFFFFF] = mine
            elif last == "H":
                self.handles[value & 0xFFFFFFFF] = mine & 0xFFFFFFFF
            elif last == "V":
                self.vas[value] = mine
                if self.addresses and value != mine:
                    yield f"{name}.{member}: model {mine:#x}, trace {value:#x}"
            elif not role and value != mine and not any(_fields_overlap(place, n) for n in named):
                yield f"{name}.{member}: model {mine:#x}, trace {value:#x}"

    def _buffer_differences(
        self, request: int, tables: Abi, theirs: bytes, mine: bytes, name: str
    ) -> Iterator[str]:
        kind = _SECOND.get(f"{ioc_type(request)}{ioc_nr(request)}")
        if kind is None:
            if theirs != mine[: len(theirs)]:
                yield f"{name} buffer: model {mine.hex()}, trace {theirs.hex()}"
            return
        size = tables.structs[kind].size
        a, b = (tables.make_struct(kind, x[:size].ljust(size, b"\0")) for x in (mine, theirs))
        for member, value in a.integer_members().items():
            if member not in _TIMES and value != b[member]:
                yield f"{name} {member}: model {value:#x}, trace {b[member]:#x}"


def _fields_overlap(a: FieldLayout, b: FieldLayout) -> bool:
    """True if two members of a union overlap."""
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


def _struct_or_none(tables: Abi, known: Ioctl | None, raw: bytearray) -> StructBytes | None:
    if known is None or known.arg is None or len(raw) != tables.structs[known.arg].size:
        return None
    return StructBytes(tables.structs[known.arg], raw)
