"""Open devices: handlers by ioctl name, and dispatch as nvgpu does it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ...memory import caller_lines
from ..abi import Ioctl, Record, ioc_dir, ioc_nr, ioc_size, ioc_type
from ..rules import KernelError

if TYPE_CHECKING:
    from .core import Kernel

Handler = Callable[..., int | None]
Key = tuple[int, int]
"""Device and inode number: what an fd is found by."""


def handler(name: str) -> Callable[[Handler], Handler]:
    """Mark a method of a :class:`File` as the handler of the ioctl with header name `name`."""

    def mark(function: Handler) -> Handler:
        function.ioctl_name = name  # type: ignore[attr-defined]
        return function

    return mark


class File:
    """An open device. Subclasses hold the state and mark their ioctl handlers.

    A handler gets a :class:`Record` of its struct, changes it, and returns None or a positive
    residue; a refusal is a KernelError.
    """

    kind = ""
    letter = ""
    answers: ClassVar[dict[str, dict[str, int]]] = {}
    """Ioctls without a handler: the members that come out."""
    handlers: dict[str, str]

    def __init_subclass__(cls) -> None:
        cls.handlers = {
            getattr(f, "ioctl_name", ""): name
            for base in reversed(cls.__mro__)
            for name, f in vars(base).items()
            if hasattr(f, "ioctl_name")
        }

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.line = caller_lines()
        self.key: Key = (0, 0)
        self.peer: socket.socket | None = None

    def refuse(self, rule: str, detail: str = "", errno: int | None = None) -> KernelError:
        """The error to raise for breaking `rule`."""
        return KernelError(rule, detail, errno)

    def follow(self, rule: str) -> None:
        """Note that a rule without errno was exercised."""
        self.kernel.journal.rule(rule)

    def check_invariants(self) -> None:
        """The file's invariants; raises AssertionError. A file without any has none to check."""

    def mmap(self, length: int, offset: int) -> int:
        """The fd to map in place of this one; raises KernelError."""
        raise self.refuse("fd.mmap")

    def ioctl(self, request: int, arg: int) -> int:
        """Dispatch as nvgpu does: letter, number, size, copy in, handler, copy out."""
        tables, letter = self.kernel.abi, ioc_type(request)
        if letter != self.letter:
            raise self.refuse("dispatch.type", f"letter {letter!r} on a {self.kind} fd")
        if not 0 < ioc_nr(request) <= tables.last[letter]:
            if letter == "T" and ioc_nr(request) == 18:
                raise self.refuse("profile.subctx")
            raise self.refuse("dispatch.nr")
        size = ioc_size(request)
        if size > tables.max_size[letter]:
            raise self.refuse("dispatch.size")
        raw = bytearray(size)
        if ioc_dir(request) & 1:
            data = self.kernel.user.read(arg, size)
            if len(data) < size:
                raise self.refuse("dispatch.fault")
            raw[:] = data
        known = tables.by_number.get(request)
        if known is None:
            same = [i for i in tables.ioctls.values() if _same(i.number, request)]
            tsg = any(i.name == "NVGPU_GPU_IOCTL_OPEN_TSG" for i in same)
            rule = "profile.open-tsg" if tsg else "dispatch.unknown"
            raise self.refuse(rule, f"the kernel's is {same[0].number:#x}" if same else "")
        self.before(known.name)
        if known.name == "NVGPU_TSG_IOCTL_READ_ALL_SM_ERROR_STATES":
            raise self.refuse("profile.read-all-sm")
        record = Record(tables.structs[known.arg], raw) if known.arg else raw
        residue = self._answer(known, record)
        if residue:
            self.follow("dispatch.residue")
            return int(residue)
        if ioc_dir(request) & 2 and self.kernel.user.write(arg, bytes(raw)):
            raise self.refuse("dispatch.fault")
        return 0

    def _answer(self, known: Ioctl, record: Record | bytearray) -> int | None:
        """The handler's answer, or the table's."""
        if known.name in self.handlers:
            answer: int | None = getattr(self, self.handlers[known.name])(record)
            return answer
        if known.name not in self.answers:
            raise self.refuse("dispatch.not-modelled", known.short)
        assert isinstance(record, Record)
        for member, value in self.answers[known.name].items():
            record[member] = value
        return None

    def before(self, name: str) -> None:
        """Checked before every handler (a channel that is gone)."""

    def release(self) -> None:
        """The last fd is gone."""


def _same(number: int, request: int) -> bool:
    return number & 0xFFFF == request & 0xFFFF
