"""State spaces: where an address leads, and what the SM traps on the way.

Shared memory of a block begins 0x400 bytes into its window: the system reserves the first 1 KiB
(SHARED_MEMORY_SIZE counts it). The local window of a thread spans 16 MiB; the stack of HIGH_SIZE
bytes lies at its end. A global access inside a window is trapped (invalid address space), a
generic one is redirected. Windows are taken as 4 GiB each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory import Access, MmuFault
from .operands import Value
from .state import ChunkState, KernelFault

OUT_OF_RANGE, MISALIGNED, WRONG_SPACE, BAD_CONSTANT = 0xE, 0xF, 0x10, 0x12
SHARED_RESERVED = 0x400
WINDOW_BYTES = 1 << 32
LOCAL_SPAN = 1 << 24
UNPLACED = 0x7E0000000000
"""Start of the addresses of variables that no relocation has placed, 4 GiB each."""


def raise_if_misaligned(st: ChunkState, addr: Value, size: int) -> None:
    """Trap the first lane whose address is no multiple of `size` bytes."""
    if size == 1:
        return
    every = np.bitwise_or.reduce(addr) if addr.ndim else addr
    if int(every) & (size - 1):
        lane = int(np.flatnonzero(addr & np.uint64(size - 1))[0]) if addr.ndim else 0
        where = int(addr[lane]) if addr.ndim else int(addr)
        raise KernelFault(
            MISALIGNED, f"misaligned address {where:#x}: an access of {size} bytes", lane, where
        )


def raise_if_in_window(st: ChunkState, addr: NDArray[np.uint64]) -> None:
    """Trap ld/st.global inside a window."""
    low, high = int(np.minimum.reduce(addr)), int(np.maximum.reduce(addr))
    for name, base in (("shared", st.launch.shared_window), ("local", st.launch.local_window)):
        if high >= base and low < base + WINDOW_BYTES:
            inside = np.flatnonzero((addr - np.uint64(base)) < WINDOW_BYTES)
            if len(inside):
                lane, where = int(inside[0]), int(addr[inside[0]])
                raise KernelFault(
                    WRONG_SPACE,
                    f"invalid address space: global access to {where:#x}, which is in the "
                    f"{name} memory window at {base:#x}",
                    lane,
                    where,
                )


def split_by_space(st: ChunkState, space: str, addr: Value) -> list[tuple[str, Any, Value]]:
    """A generic access by space: (space, lanes or None for all, address within the space)."""
    if space != "generic":
        return [(space, None, addr)]
    array = addr if addr.ndim else addr.reshape(1)
    shared, local = st.launch.shared_window, st.launch.local_window
    in_shared = (array - np.uint64(shared)) < WINDOW_BYTES
    in_local = (array - np.uint64(local)) < WINDOW_BYTES
    parts: list[tuple[str, Any, Value]] = []
    for name, inside, base in (
        ("shared", in_shared, shared),
        ("local", in_local, local),
        ("global", ~(in_shared | in_local), 0),
    ):
        hits = np.count_nonzero(inside)
        if hits == len(inside):
            return [(name, None, addr - np.uint64(base))]
        if hits:
            lanes = np.flatnonzero(inside)
            parts.append((name, lanes, array[lanes] - np.uint64(base)))
    return parts


def _shared_offsets(
    st: ChunkState, lanes: Any, addr: NDArray[np.uint64], size: int
) -> NDArray[np.int64]:
    limit = end = st.shared.shape[1]
    if st.shadow is not None and st.shadow.bounds and not st.launch.code.dynamic:
        end = min(end, st.launch.code.shared_bytes)  # without what the launch rounds up
    bad = (addr + np.uint64(size) > np.uint64(end)) | (addr >= np.uint64(end))
    if np.count_nonzero(bad):
        at = int(np.flatnonzero(bad)[0])
        lane = at if lanes is None else int(lanes[at])
        raise KernelFault(
            OUT_OF_RANGE,
            f"shared address {int(addr[at]):#x} + {size} is beyond the block's {end:#x} bytes",
            lane,
            int(addr[at]),
        )
    active = st.active_lanes() if lanes is None else st.active_lanes()[lanes]
    flat: NDArray[np.int64] = (active // st.threads) * limit + addr.astype(np.int64)
    return flat


def _local_offsets(
    st: ChunkState, lanes: Any, addr: NDArray[np.uint64], size: int
) -> NDArray[np.int64]:
    depth = st.local.shape[1]
    offset = addr.astype(np.int64) - (LOCAL_SPAN - depth)
    bad = (offset < 0) | (offset + size > depth)
    if np.count_nonzero(bad):
        at = int(np.flatnonzero(bad)[0])
        lane = at if lanes is None else int(lanes[at])
        raise KernelFault(
            OUT_OF_RANGE,
            f"local address {int(addr[at]):#x} is outside the thread's {depth:#x} bytes "
            f"(SHADER_LOCAL_MEMORY_HIGH_SIZE)",
            lane,
            int(addr[at]),
        )
    active = st.active_lanes() if lanes is None else st.active_lanes()[lanes]
    return np.asarray(st.local.rows[active] + offset)


def backing_and_offsets(
    st: ChunkState, space: str, lanes: Any, addr: Value, size: int
) -> tuple[Any, Any]:
    """Backing bytes (flat uint8) and per-lane byte offsets of a shared or local access."""
    if not addr.ndim:
        addr = np.full(st.active_count(), addr)
    if space == "shared":
        return st.shared.reshape(-1), _shared_offsets(st, lanes, addr, size)
    return st.local.bytes, _local_offsets(st, lanes, addr, size)


def raise_if_beyond_bank(st: ChunkState, space: str, addr: Value, size: int) -> None:
    """Trap an access beyond the constant bank behind `ld.param` or `ld.const`."""
    bank = st.launch.banks.get(st.launch.bank_number_of_space(space))
    if bank is None:
        raise KernelFault(
            BAD_CONSTANT, f"constant bank {st.launch.bank_number_of_space(space)} is not valid"
        )
    top = int(addr.max())
    if top + size > len(bank):
        raise KernelFault(
            BAD_CONSTANT, f"invalid constant address {top:#x}: the bank has {len(bank):#x} bytes"
        )


def raise_if_access_wrong(
    st: ChunkState, space: str, addr: NDArray[np.uint64], size: int, access: Access
) -> None:
    """Find what is wrong with the active lanes' accesses. Raises KernelFault or MmuFault."""
    _raise_if_no_address(st, addr)
    raise_if_misaligned(st, addr, size)
    if space in ("param", "const"):
        if access != "read":
            raise KernelFault(WRONG_SPACE, f"store to .{space}")
        raise_if_beyond_bank(st, space, addr, size)
        return
    for name, lanes, where in split_by_space(st, space, addr):
        if name != "global":
            backing_and_offsets(st, name, lanes, where, size)
            continue
        raise_if_in_window(st, where)
        try:
            st.launch.vm.gather(where, size, access)
        except MmuFault as e:  # its lane counts among those here
            e.lane = e.lane or 0 if lanes is None else int(lanes[e.lane or 0])
            raise


def _raise_if_no_address(st: ChunkState, addr: NDArray[np.uint64]) -> None:
    """Trap an access to a variable that has no address."""
    number = int(addr[0]) - UNPLACED >> 32
    symbols = st.launch.code.frame.symbols
    if 0 <= number < len(symbols):
        st.launch.symbol_address(symbols[number][1])


def read_bytes(st: ChunkState, address: int, size: int) -> bytes:
    """Bytes at a generic address of the one active lane. Raises KernelFault or MmuFault."""
    ((name, _, where),) = split_by_space(st, "generic", np.array([address], np.uint64))
    if name == "global":
        return st.launch.vm.gather(where, size).tobytes()
    data, offsets = backing_and_offsets(st, name, None, where, size)
    return bytes(data[offsets[0] : offsets[0] + size])
