"""A whole life of a client, as a program: `python life.py CUBIN`. Prints one JSON object.

Everything from ctrl's open to the last close in struct and ctypes alone: a kernel launched by a QMD
written bit by bit, the copy engine, semaphores with timestamps, an event fd, a clean teardown.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import rawclient as rc  # type: ignore[import-not-found]

COMPUTE_SUB, COPY_SUB = 1, 4
SHARED_WINDOW, LOCAL_WINDOW = 0xFE00000000, 0xFD00000000
RELEASE_WFI_TIMESTAMP_64, ACQUIRE_GEQ_64 = 0x03100001, 0x01000003
PARAMETERS = 0x160
"""Kernel parameters in constant bank 0 of sm_8x."""


def sections(elf: bytes) -> dict[str, bytes]:
    """ELF64 sections by name."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    strings = heads[names][4]
    found = {}
    for name, _, _, _, offset, length in heads:
        end = elf.index(b"\0", strings + name)
        found[elf[strings + name : end].decode()] = elf[offset : offset + length]
    return found


def registers(info: bytes) -> int:
    """EIATTR_REGCOUNT of .nv.info."""
    at = 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        if kind == 0x2F:
            return int(struct.unpack_from("<I", info, at + 8)[0])
        at += 4 + (size if form == 4 else 0)
    raise ValueError("no REGCOUNT")


def put_bits(qmd: bytearray, high: int, low: int, value: int) -> None:
    """QMD field high:low, as clc7c0qmd.h writes it."""
    whole = int.from_bytes(qmd, "little")
    mask = (1 << (high - low + 1)) - 1
    whole = whole & ~(mask << low) | (value & mask) << low
    qmd[:] = whole.to_bytes(256, "little")


def method(sub: int, address: int, *data: int) -> list[int]:
    """INC method header and its data."""
    return [1 << 29 | len(data) << 16 | sub << 13 | address >> 2, *data]


def wide(value: int) -> tuple[int, int]:
    """Upper, lower."""
    return value >> 32, value & 0xFFFFFFFF


def semaphore(va: int, value: int, execute: int) -> list[int]:
    """SEM_ADDR, SEM_PAYLOAD, SEM_EXECUTE."""
    return method(0, 0x5C, va & 0xFFFFFFFF, va >> 32, value & 0xFFFFFFFF, value >> 32, execute)


def make_qmd(code: int, size: int, regs: int, bank: int, bank_size: int, release: int) -> bytes:
    """Grid 4 x 1 x 1 of blocks 128 x 1 x 1."""
    qmd = bytearray(256)
    for high, low, value in (
        (583, 580, 3), (133, 128, 0x3F), (134, 134, 1), (189, 186, 0xF), (369, 368, 1),
        (378, 378, 1), (382, 382, 1), (415, 384, 4), (431, 416, 1), (463, 448, 1),
        (607, 592, 128), (623, 608, 1), (639, 624, 1), (1567, 1536, code & 0xFFFFFFFF),
        (1584, 1568, code >> 32), (287, 256, code >> 8), (1640, 1632, code >> 40),
        (1649, 1641, min(size >> 8, 0x1FF)), (1663, 1656, 0x87), (656, 648, regs),
        (767, 763, 1), (561, 544, 0x400), (567, 562, 9), (662, 657, 9), (574, 569, 0x1A),
        (640, 640, 1), (1055, 1024, bank & 0xFFFFFFFF), (1072, 1056, bank >> 32), (1074, 1074, 1),
        (1087, 1075, bank_size >> 4), (799, 768, release & 0xFFFFFFFF), (807, 800, release >> 32),
        (823, 823, 1), (863, 832, 7),
    ):  # fmt: skip
        put_bits(qmd, high, low, value)
    return bytes(qmd)


def wait(mem: memoryview, value: int) -> None:
    """Poll a 64-bit signal, for $PATIENCE seconds."""
    end = time.monotonic() + float(os.environ.get("PATIENCE", "120"))
    while struct.unpack_from("<Q", mem)[0] < value:
        if time.monotonic() > end:
            raise TimeoutError(f"signal {struct.unpack_from('<Q', mem)[0]} < {value}")
        time.sleep(0.0005)


def main(path: str) -> dict[str, object]:
    """The life; returns what it saw."""
    parts = sections(Path(path).read_bytes())
    text, bank_size = parts[".text.scale"], len(parts[".nv.constant0.scale"])
    n = 500
    board = rc.Board()
    for window in (SHARED_WINDOW, LOCAL_WINDOW):
        assert board.end <= window
    compute = board.channel(entries=1 << 16, classes=(rc.COMPUTE,))
    copy = board.channel(entries=1024, classes=(rc.COPY,))
    event = rc.call(board.tsg, "T", 7, "IIiI", 1, 2, 0, 0)[2]
    code, signals = board.buffer(len(text) + 8192), board.buffer(4096)
    source, result, copied = (board.buffer(4 * n) for _ in range(3))
    launch, commands = board.buffer(8192), board.buffer(65536, flags=rc.TAG | rc.WRITE_COMBINE)
    code.mem[: len(text)] = text
    source.mem[: 4 * n] = struct.pack(f"<{n}f", *range(n))
    bank = struct.pack("<6I", 128, 1, 1, 4, 1, 1) + struct.pack(
        "<QQI", SHARED_WINDOW, LOCAL_WINDOW, 0xFFFDC0
    )
    bank = bank.ljust(PARAMETERS, b"\0") + struct.pack("<QQfi", result.va, source.va, 2.5, n)
    launch.mem[: len(bank)] = bank
    qmd_va = launch.va + 4096
    done, qmd_done, copy_done = signals.va, signals.va + 16, signals.va + 32
    qmd = make_qmd(
        code.va,
        len(text),
        registers(parts[".nv.info"]),
        launch.va,
        -(-bank_size // 16) * 16,
        qmd_done,
    )
    launch.mem[4096 : 4096 + 256] = qmd
    words = [
        *method(COMPUTE_SUB, 0, rc.COMPUTE),
        *method(COMPUTE_SUB, 0x2A0, *wide(SHARED_WINDOW)),
        *method(COMPUTE_SUB, 0x7B0, *wide(LOCAL_WINDOW)),
        *method(COMPUTE_SUB, 0x1698, 0x1011),
        *method(COMPUTE_SUB, 0x2B4, qmd_va >> 8),
        *method(COMPUTE_SUB, 0x2C0, 9),
        *semaphore(done, 1, RELEASE_WFI_TIMESTAMP_64),
        *method(0, 0x20, 0),
    ]
    copies = [
        *method(COPY_SUB, 0, rc.COPY),
        *semaphore(done, 1, ACQUIRE_GEQ_64),
        *method(COPY_SUB, 0x400, *wide(result.va), *wide(copied.va)),
        *method(COPY_SUB, 0x418, 4 * n),
        *method(COPY_SUB, 0x300, 0x182),
        *method(COPY_SUB, 0x240, *wide(copy_done), 5),
        *method(COPY_SUB, 0x300, 0x14),
    ]
    commands.mem[: 4 * len(words)] = struct.pack(f"<{len(words)}I", *words)
    commands.mem[4096 : 4096 + 4 * len(copies)] = struct.pack(f"<{len(copies)}I", *copies)
    copy.submit(commands.va + 4096, len(copies))  # waits on the GPU for the other channel
    compute.submit(commands.va, len(words))
    wait(signals.mem[:8], 1)
    wait(signals.mem[32:40], 5)
    poller = select.poll()
    poller.register(event, select.POLLIN | select.POLLPRI)
    woken = bool(poller.poll(5000))
    stamps = [struct.unpack_from("<Q", signals.mem, at + 8)[0] for at in (0, 16, 32)]
    got = struct.unpack_from(f"<{n}f", copied.mem)
    seen = {
        "right": list(got) == [2.5 * i + 1 for i in range(n)],
        "qmd_release": struct.unpack_from("<Q", signals.mem, 16)[0],
        "ordered": 0 < stamps[1] <= stamps[0] <= stamps[2],
        "woken": woken,
        "errors": [compute.error(), copy.error()],
        "gpget": [compute.gpget(), copy.gpget()],
    }
    os.close(event)
    board.close()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
