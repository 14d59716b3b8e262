"""`nvgpusim judge`: drive the model with recorded answers of NVIDIA's own driver code.

The file holds sequences of calls with what nvgpu answered to each: result, struct and second
buffers (its description is beside it, tests/simulator/kernel/data/nvgpu-answers.md). Every sequence
meets a board of its own. Once the model has answered a call differently its state is another one,
so that only a sequence's first difference says something; the later answers are still counted.
"""

from __future__ import annotations

import ctypes
import errno
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SimError
from ..options import PROFILES, Options
from .abi import ioc_nr, ioc_size, ioc_type
from .call_trace import NEW_FDS
from .kernel import Kernel
from .kernel.nvmap import HEAP_IOVMM, READ_ONLY

SCHEMA = 1
"""Layout of the file; a judge refuses any other."""
NOWHERE = (99, 999)
"""Numbers that sequences use for a descriptor that is not open."""
BOARDS = {"orin": "agx64"}
"""Boards of the file: ga10b with 16 SMs is the AGX Orin 64 GB."""
_CREATE_64, _ALLOC, _GET_FD, _DUP_HANDLE = 0xC0084E01, 0x40144E03, 0xC0084E0F, 0xC00C4E6A
"""nvmap: where the dmabufs of a sequence come from."""


class BrokenModelError(Exception):
    """The model raised what no driver can answer, or made no dmabuf for a sequence."""


@dataclass
class SequenceVerdict:
    """Outcome of one sequence."""

    release: str
    name: str
    compared: int = 0
    doubted: int = 0
    differences: list[tuple[int, str]] = field(default_factory=list)
    """Number of the call, and how the model's answer is another one than nvgpu's."""

    def count_answer(self, number: int, difference: str) -> None:
        """One more answer, and how it is another one (or nothing)."""
        self.compared += 1
        if difference:
            self.differences.append((number, difference))

    @property
    def sequence_kind(self) -> str:
        """The family of the sequence: rule, place, flags, order or tidy."""
        return self.name.partition("/")[0]


@dataclass(frozen=True)
class RecordedSequence:
    """One recorded sequence."""

    release: str
    profile: str
    name: str
    board: str
    calls: list[dict[str, Any]]


def load_sequences(path: Path) -> list[RecordedSequence]:
    """The sequences of a file, plain or gzip; raises SimError when it is not one."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile):
        raise SimError(f"{path}: not recorded answers: expected JSON, plain or gzip") from None
    except OSError as error:
        raise SimError(f"{path}: {error.strerror}; expected a file of answers") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "releases" not in data:
        raise SimError(f"{path}: not recorded answers of schema {SCHEMA}")
    found: list[RecordedSequence] = []
    try:
        for release, part in data["releases"].items():
            if part["profile"] not in PROFILES:
                raise SimError(f"{path}: profile {part['profile']!r} is not modelled")
            for entry in part["sequences"]:
                if entry["board"] not in BOARDS:
                    raise SimError(f"{path}: board {entry['board']!r} is not modelled")
                board = BOARDS[entry["board"]]
                calls = entry["calls"]
                found.append(
                    RecordedSequence(release, part["profile"], entry["name"], board, calls)
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise SimError(f"{path}: damaged: {error!r}") from error
    if not found:
        raise SimError(f"{path}: holds no sequence")
    return found


class SequencePlayer:
    """One sequence on one board."""

    def __init__(self, sequence: RecordedSequence) -> None:
        self.sequence = sequence
        self.kernel = Kernel(Options(profile=sequence.profile, board=sequence.board))
        # the code that answered allocated no context: its TSGs start without preemption modes
        self.kernel.default_modes = (0, 0)
        self.fds: dict[str, int] = {}
        self.nvmap = self._move_fd_off_reserved(self.kernel.open("/dev/nvmap"))

    def run_sequence(self) -> SequenceVerdict:
        """Every call in turn; raises SimError when the sequence is damaged."""
        verdict = SequenceVerdict(self.sequence.release, self.sequence.name)
        try:
            for number, call in enumerate(self.sequence.calls):
                try:
                    found = self._play_and_compare_call(call)
                except (KeyError, ValueError, TypeError) as error:
                    where = f"{verdict.release} {verdict.name}, call {number}"
                    raise SimError(f"{where} is damaged: {error!r}") from error
                if "ret" not in call or "dmabuf" in call:
                    continue
                if call.get("doubt"):
                    verdict.doubted += 1
                    continue
                verdict.count_answer(number, found)
        except BrokenModelError as error:
            verdict.count_answer(number, str(error))
        finally:
            self._close_all_and_stop_kernel(verdict)
        return verdict

    def _play_and_compare_call(self, call: dict[str, Any]) -> str:
        """One call; returns how the answer differs, or nothing."""
        if "dmabuf" in call:
            self.fds[call["dmabuf"]] = self._make_dmabuf(
                int(call["size"], 16), call["mode"] == "ro"
            )
            return ""
        if "open" in call:
            return self._play_and_compare_open(call)
        if "close" in call:
            self._close_and_release_fd(self.fds.pop(call["close"], -1))
            return ""
        return self._play_and_compare_ioctl(call)

    def _play_and_compare_open(self, call: dict[str, Any]) -> str:
        fd = _result_or_errno(self.kernel.open, f"/dev/nvgpu/igpu0/{call['open']}")
        if fd >= 0:
            self._name_or_close_fd(fd, "" if call["ret"] else call["name"])
        return _result_difference(f"open {call['open']}", min(fd, 0), call["ret"])

    def _play_and_compare_ioctl(self, call: dict[str, Any]) -> str:
        request = int(call["ioctl"], 16)
        name = self.kernel.abi.ioctl_name(request)
        if call["on"] not in self.fds:
            return f"{name}: the model made no {call['on']}"
        raw = self._input_bytes(call)
        memories: list[tuple[dict[str, Any], Any]] = []
        for memory in call.get("mem", ()):
            data = self._input_bytes(memory)
            space = (ctypes.c_ubyte * max(len(data), 1)).from_buffer(data or bytearray(1))
            raw[memory["at"] : memory["at"] + 8] = ctypes.addressof(space).to_bytes(8, "little")
            memories.append((memory, space))
        size = max(len(raw), ioc_size(request), 1)
        struct = (ctypes.c_ubyte * size).from_buffer(raw.ljust(size, b"\0"))
        result = _result_or_errno(
            self.kernel.ioctl, self.fds[call["on"]], request, ctypes.addressof(struct)
        )
        made = NEW_FDS.get((ioc_type(request), ioc_nr(request)))
        if result >= 0 and made is not None:
            fd = int.from_bytes(bytes(struct)[made : made + 4], "little")
            self._name_or_close_fd(fd, call.get("makes", {}).get(str(made), ""))
        found = _result_difference(name, result, call["ret"])
        if not found and "out" in call:
            found = _bytes_difference(name, call, bytes(struct))
        for memory, space in memories:
            if not found and "out" in memory:
                found = _bytes_difference(f"{name}, memory at {memory['at']}", memory, bytes(space))
        return f"{found} ({call['what']})" if found and "what" in call else found

    def _input_bytes(self, part: dict[str, Any]) -> bytearray:
        """The bytes that go in, with the model's descriptors in their places."""
        raw = bytearray.fromhex(part["in"])
        for at, name in part.get("fds", {}).items():
            fd = self.fds.get(name, -1)
            raw[int(at) : int(at) + 4] = (fd & 0xFFFFFFFF).to_bytes(4, "little")
        return raw

    def _name_or_close_fd(self, fd: int, name: str) -> None:
        """Keep a descriptor of the model under its name; one that nvgpu did not make is closed."""
        fd = _result_or_errno(self._move_fd_off_reserved, fd)
        if name:
            self.fds[name] = fd
        else:
            self._close_and_release_fd(fd)

    def _move_fd_off_reserved(self, fd: int) -> int:
        """A descriptor of the sequence, never one of the numbers that are to be open nowhere."""
        if fd not in NOWHERE:
            return fd
        moved = self._move_fd_off_reserved(os.dup(fd))
        os.close(fd)
        return moved

    def _make_dmabuf(self, size: int, read_only: bool) -> int:
        """A dmabuf: handle made, allocated, exported and given up."""

        def ask(request: int, raw: bytearray) -> bytearray:
            struct = (ctypes.c_ubyte * len(raw)).from_buffer(raw)
            result = _result_or_errno(
                self.kernel.ioctl, self.nvmap, request, ctypes.addressof(struct)
            )
            if result < 0:
                name = self.kernel.abi.ioctl_name(request)
                raise BrokenModelError(f"no dmabuf: {name} answers {_result_text(result)}")
            return raw

        handle = ask(_CREATE_64, bytearray(size.to_bytes(8, "little")))[:4]
        ask(_ALLOC, handle + HEAP_IOVMM.to_bytes(4, "little") + bytearray(12))
        if read_only:
            handle = ask(_DUP_HANDLE, handle + READ_ONLY.to_bytes(8, "little"))[8:]
        return self._move_fd_off_reserved(
            int.from_bytes(ask(_GET_FD, bytearray(4) + handle)[:4], "little")
        )

    def _close_and_release_fd(self, fd: int) -> None:
        if fd >= 0:
            with suppress(OSError):  # a broken model may have closed it, or never have opened it
                os.close(fd)
            _result_or_errno(self.kernel.release_closed_files)

    def _close_all_and_stop_kernel(self, verdict: SequenceVerdict) -> None:
        try:
            for fd in (*self.fds.values(), self.nvmap):
                self._close_and_release_fd(fd)
        except BrokenModelError as error:
            verdict.count_answer(len(self.sequence.calls), str(error))
        finally:
            self.kernel.stop_and_close_fds()


def _result_or_errno(call: Callable[..., int | None], *args: Any) -> int:
    """The result of a call of the model, or minus its errno; else raises BrokenModelError."""
    try:
        return call(*args) or 0
    except OSError as error:
        return -(error.errno or 0)
    except Exception as error:
        raise BrokenModelError(f"the model broke: {error!r}") from error


def _result_text(value: int) -> str:
    return str(value) if value >= 0 else errno.errorcode.get(-value, str(value))


def _result_difference(name: str, mine: int, theirs: int) -> str:
    return (
        ""
        if mine == theirs
        else f"{name}: nvgpu {_result_text(theirs)}, model {_result_text(mine)}"
    )


def _bytes_difference(name: str, part: dict[str, Any], mine: bytes) -> str:
    """The first byte that differs outside `skip`, with the word around it."""
    theirs = bytes.fromhex(part["out"])
    masked = bytearray(len(theirs))
    for at, length in part.get("skip", ()):
        masked[at : at + length] = b"\1" * length
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b and not masked[i]:
            start, width = i & ~7, 8 if len(theirs) >= (i & ~7) + 8 else 4
            values = [int.from_bytes(x[start : start + width], "little") for x in (theirs, mine)]
            return f"{name}: byte {i}: nvgpu {values[0]:#x}, model {values[1]:#x}"
    return ""


def iter_verdicts(sequences: list[RecordedSequence]) -> Iterator[SequenceVerdict]:
    """The verdicts, in the order of the sequences; raises SimError for a damaged one."""
    taken = [fd for fd in NOWHERE if _is_fd_open(fd)]
    if taken:
        raise SimError(f"descriptor {taken[0]} is open: the sequences need {NOWHERE} closed")
    for sequence in sequences:
        yield SequencePlayer(sequence).run_sequence()


def _is_fd_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def agreement_table_lines(verdicts: list[SequenceVerdict]) -> list[str]:
    """By release and kind: sequences and answers that agree, of those compared."""
    lines = [f"{'release':<8} {'kind':<6} {'sequences':>13} {'answers':>15} {'not judged':>11}"]
    groups: dict[tuple[str, str], list[SequenceVerdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.release, verdict.sequence_kind), []).append(verdict)
        groups.setdefault((verdict.release, "all"), []).append(verdict)
    for (release, kind), members in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1])):
        agree = sum(not v.differences for v in members)
        compared = sum(v.compared for v in members)
        same = compared - sum(len(v.differences) for v in members)
        doubted = sum(v.doubted for v in members)
        lines.append(
            f"{release:<8} {kind:<6} {f'{agree}/{len(members)}':>13} "
            f"{f'{same}/{compared}':>15} {doubted:>11}"
        )
    return lines
