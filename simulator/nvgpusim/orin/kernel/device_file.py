"""Open devices: handlers by ioctl name, and dispatch as nvgpu does it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ...memory import client_call_text
from ..abi import Ioctl, StructBytes, ioc_dir, ioc_nr, ioc_size, ioc_type
from ..rules import KernelError

if TYPE_CHECKING:
    from .core import Kernel

Handler = Callable[..., int | None]
Key = tuple[int, int]
"""Device and inode number: what an fd is found by."""


def ioctl_handler(*names: str) -> Callable[[Handler], Handler]:
    """Mark a method as the handler of the ioctls with these header names."""

    def mark(function: Handler) -> Handler:
        function.ioctl_names = names  # type: ignore[attr-defined]
        return function

    return mark


class DeviceFile:
    """An open device. Subclasses hold the state and mark their ioctl handlers.

    A handler gets a :class:`StructBytes` of its struct, changes it, and returns None or a positive
    residue; a refusal is a KernelError.
    """

    kind = ""
    letter = ""
    answers: ClassVar[dict[str, dict[str, int]]] = {}
    """Ioctls without a handler: the members that come out."""
    handlers: dict[str, str]

    def __init_subclass__(cls) -> None:
        cls.handlers = {
            ioctl: name
            for base in reversed(cls.__mro__)
            for name, f in vars(base).items()
            for ioctl in getattr(f, "ioctl_names", ())
        }

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.line = client_call_text()
        self.key: Key = (0, 0)
        self.peer: socket.socket | None = None

    def refusal(self, rule: str, detail: str = "", errno: int | None = None) -> KernelError:
        """The error to raise for breaking `rule`."""
        return KernelError(rule, detail, errno)

    def note_rule(self, rule: str) -> None:
        """Note that a rule without errno was exercised."""
        self.kernel.journal.count_rule(rule)

    def check_invariants(self) -> None:
        """The file's invariants; raises AssertionError. A file without any has none to check."""

    def fd_for_mmap(self, length: int, offset: int) -> int:
        """The fd to map in place of this one; raises KernelError."""
        raise self.refusal("fd.mmap")

    def ioctl(self, request: int, arg: int) -> int:
        """Dispatch as nvgpu does: letter, number, size, copy in, handler, copy out."""
        tables, letter = self.kernel.abi, ioc_type(request)
        if letter != self.letter:
            raise self.refusal("dispatch.type", f"letter {letter!r} on a {self.kind} fd")
        if not 0 < ioc_nr(request) <= tables.last[letter]:
            if letter == "T" and ioc_nr(request) == 18:
                raise self.refusal("profile.subctx")
            raise self.refusal("dispatch.nr")
        size = ioc_size(request)
        if size > tables.max_size[letter]:
            raise self.refusal("dispatch.size")
        raw = bytearray(size)
        if ioc_dir(request) & 1:
            data = self.kernel.user.copy_from_user(arg, size)
            if len(data) < size:
                raise self.refusal("dispatch.fault")
            raw[:] = data
        known = tables.by_number.get(request)
        if known is None:
            same = [i for i in tables.ioctls.values() if (i.number ^ request) & 0xFFFF == 0]
            tsg = any(i.name == "NVGPU_GPU_IOCTL_OPEN_TSG" for i in same)
            rule = "profile.open-tsg" if tsg else "dispatch.unknown"
            raise self.refusal(rule, f"the kernel's is {same[0].number:#x}" if same else "")
        self.check_before_ioctl(known.name)
        if known.name == "NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES":
            raise self.refusal("profile.read-all-sm")
        record = StructBytes(tables.structs[known.arg], raw) if known.arg else raw
        residue = self._call_handler(known, record)
        if residue:
            self.note_rule("dispatch.residue")
            return int(residue)
        if ioc_dir(request) & 2 and self.kernel.user.copy_to_user(arg, bytes(raw)):
            raise self.refusal("dispatch.fault")
        return 0

    def _call_handler(self, known: Ioctl, record: StructBytes | bytearray) -> int | None:
        """The handler's answer, or the table's."""
        if known.name in self.handlers:
            answer: int | None = getattr(self, self.handlers[known.name])(record)
            return answer
        if known.name not in self.answers:
            raise self.refusal("dispatch.not-modelled", known.short_name)
        assert isinstance(record, StructBytes)
        for member, value in self.answers[known.name].items():
            record[member] = value
        return None

    def check_before_ioctl(self, name: str) -> None:
        """Checked before every handler (a channel that is gone)."""

    def release(self) -> None:
        """The last fd is gone."""
