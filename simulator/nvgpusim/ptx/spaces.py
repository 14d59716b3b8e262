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
from .instructions.floats import Value
from .state import KernelFault, State

OUT_OF_RANGE, MISALIGNED, WRONG_SPACE, BAD_CONSTANT = 0xE, 0xF, 0x10, 0x12
SHARED_RESERVED = 0x400
WINDOW_BYTES = 1 << 32
LOCAL_SPAN = 1 << 24
SPACES = ("global", "shared", "local", "const", "param")
_U64 = np.dtype(np.uint64)


def aligned(st: State, addr: Value, size: int) -> None:
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


def _window(st: State, addr: Value) -> tuple[Value, Value]:
    """Masks of the lanes in the shared and in the local window."""
    shared, local = st.launch.shared_window, st.launch.local_window
    return (addr - np.uint64(shared)) < WINDOW_BYTES, (addr - np.uint64(local)) < WINDOW_BYTES


def check_global(st: State, addr: NDArray[np.uint64]) -> tuple[int, int]:
    """Lowest and highest address; trap ld/st.global inside a window."""
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
    return low, high


def split(st: State, space: str, addr: Value) -> list[tuple[str, Any, Value]]:
    """A generic access by space: (space, lanes or None for all, address within the space)."""
    if space != "generic":
        return [(space, None, addr)]
    array = addr if addr.ndim else addr.reshape(1)
    in_shared, in_local = _window(st, array)
    parts: list[tuple[str, Any, Value]] = []
    for name, inside, base in (
        ("shared", in_shared, st.launch.shared_window),
        ("local", in_local, st.launch.local_window),
        ("global", ~(in_shared | in_local), 0),
    ):
        hits = np.count_nonzero(inside)
        if hits == len(inside):
            return [(name, None, addr - np.uint64(base))]
        if hits:
            lanes = np.flatnonzero(inside)
            parts.append((name, lanes, array[lanes] - np.uint64(base)))
    return parts


def _flat_shared(st: State, lanes: Any, addr: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
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
    active = st.lanes() if lanes is None else st.lanes()[lanes]
    flat: NDArray[np.int64] = (active // st.threads) * limit + addr.astype(np.int64)
    return flat


def _flat_local(st: State, lanes: Any, addr: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
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
    active = st.lanes() if lanes is None else st.lanes()[lanes]
    return np.asarray(st.local.rows[active] + offset)


def flat(st: State, space: str, lanes: Any, addr: Value, size: int) -> tuple[Any, Any]:
    """Backing bytes (flat uint8) and per-lane byte offsets of a shared or local access."""
    if not addr.ndim:
        addr = np.full(st.count(), addr)
    if space == "shared":
        return st.shared.reshape(-1), _flat_shared(st, lanes, addr, size)
    return st.local.bytes, _flat_local(st, lanes, addr, size)


def constant(st: State, space: str, addr: Value, size: int) -> tuple[Any, Any]:
    """Bytes of the constant bank behind `ld.param` or `ld.const`, and the offsets in them."""
    bank = st.launch.banks.get(st.launch.bank_of(space))
    if bank is None:
        raise KernelFault(BAD_CONSTANT, f"constant bank {st.launch.bank_of(space)} is not valid")
    data = np.frombuffer(bank, np.uint8)
    top = int(addr.max()) if addr.ndim else int(addr)
    if top + size > len(data):
        raise KernelFault(
            BAD_CONSTANT, f"invalid constant address {top:#x}: the bank has {len(data):#x} bytes"
        )
    return data, addr.astype(np.int64)


def parameter(st: State, at: int, dt: np.dtype[Any], count: int) -> list[Value]:
    """Values of the kernel's parameters at an aligned offset, the same in all lanes."""
    bank, start = st.launch.banks.get(0), st.launch.param_base + at
    if bank is None or start + dt.itemsize * count > len(bank):
        return load(st, "param", np.uint64(start), dt, count)  # which says what is wrong
    return list(np.frombuffer(bank, dt, count, start))


def gather(data: Any, offsets: Any, dt: np.dtype[Any], count: int) -> list[Value]:
    """`count` consecutive elements at each byte offset of `data`, aligned to their total size."""
    total = dt.itemsize * count
    table = data[: len(data) // total * total].view(dt)
    index = offsets >> (total.bit_length() - 1)
    if index.ndim == 0:  # take would hand the interpreter's lock to another thread
        return list(table[index * count : (index + 1) * count])
    if count == 1:
        return [table.take(index)]
    rows = table.reshape(-1, count).take(index, 0)
    return list(np.ascontiguousarray(rows.T))


def load(st: State, space: str, addr: Value, dt: np.dtype[Any], count: int) -> list[Value]:
    """`count` values of type dt per lane. Raises KernelFault or MmuFault."""
    total = dt.itemsize * count
    aligned(st, addr, total)
    if space in ("param", "const"):
        data, offsets = constant(st, space, addr, total)
        return gather(data, offsets, dt, count)
    parts = split(st, space, addr)
    if len(parts) == 1:
        name, _, where = parts[0]
        return _load_one(st, name, None, where, dt, count)
    out = [np.zeros(st.count(), dt) for _ in range(count)]
    for name, lanes, where in parts:
        for column, value in zip(out, _load_one(st, name, lanes, where, dt, count), strict=True):
            column[lanes] = value
    return out


def _load_one(
    st: State, space: str, lanes: Any, addr: Value, dt: np.dtype[Any], count: int
) -> list[Value]:
    total = dt.itemsize * count
    if st.launch.looks is not None and space != "local":
        st.looks_at(space, lanes, addr)
    if space != "global":
        data, offsets = flat(st, space, lanes, addr, total)
        if st.shadow is not None:
            st.shadow.load(space, lanes, offsets, total)
        return gather(data, offsets, dt, count)
    st.launch.moved += total * (len(addr) if addr.ndim else 1)
    if st.shadow is not None and not st.shadow.is_repeat(lanes, addr):
        st.shadow.reach(lanes, addr, total, "read")
        st.shadow.global_load(lanes, addr, total)
    if addr.ndim == 0:
        check_global(st, addr.reshape(1))
        view = st.launch.vm.view(int(addr), total, "read")
        return list(np.frombuffer(view, dt, count))
    low, high = check_global(st, addr)
    high += total
    try:
        data = np.frombuffer(st.launch.vm.view(low, high - low, "read"), np.uint8)
    except MmuFault:
        try:  # another mapping, or a fault that must name its lane
            got = st.launch.vm.load(addr, total)
        except MmuFault as e:
            raise at_lane(e, lanes) from None
        return list(np.ascontiguousarray(got.view(dt).T))
    return gather(data, (addr - np.uint64(low)).astype(np.int64), dt, count)


def at_lane(fault: MmuFault, lanes: Any) -> MmuFault:
    """The fault with its lane counted among the active ones."""
    lane = fault.lane or 0
    fault.lane = lane if lanes is None else int(lanes[lane])
    return fault


def store(st: State, space: str, addr: Value, values: list[Value]) -> None:
    """Store one value (or vector) per lane; of several to one address the last lane's stays."""
    dt, count = values[0].dtype, len(values)
    total = dt.itemsize * count
    aligned(st, addr, total)
    if space in ("param", "const"):
        raise KernelFault(WRONG_SPACE, f"store to .{space}")
    watched = st.launch.looks is not None
    for name, lanes, where in split(st, space, addr):
        if watched and _changes(st, name, lanes, where, values, dt):
            st.launch.changes += 1
        part = values if lanes is None else [v if v.ndim == 0 else v[lanes] for v in values]
        _store_one(st, name, lanes, where, part, dt, total)


def _changes(
    st: State, space: str, lanes: Any, addr: Value, values: list[Value], dt: np.dtype[Any]
) -> bool:
    """True if a store changes memory, or fails."""
    looks, shadow, st.launch.looks, st.shadow = st.launch.looks, st.shadow, None, None
    try:
        now = _load_one(st, space, lanes, addr, dt, len(values))
    except (KernelFault, MmuFault):
        return True
    finally:
        st.launch.looks, st.shadow = looks, shadow
    part = values if lanes is None else [v if v.ndim == 0 else v[lanes] for v in values]
    return any((old != new).any() for old, new in zip(now, part, strict=True))


def _rows(values: list[Value], n: int, dt: np.dtype[Any]) -> NDArray[Any]:
    if len(values) == 1:
        v = values[0]
        return v if v.ndim else np.full(n, v)
    rows = np.empty((n, len(values)), dt)
    for k, v in enumerate(values):
        rows[:, k] = v
    return rows


def _store_one(
    st: State,
    space: str,
    lanes: Any,
    addr: Value,
    values: list[Value],
    dt: np.dtype[Any],
    total: int,
) -> None:
    n = st.count() if lanes is None else len(lanes)
    if space != "global":
        data, offsets = flat(st, space, lanes, addr, total)
        rows = _rows(values, len(offsets), dt)
        if st.shadow is not None:
            st.shadow.store(space, lanes, offsets, rows, total, data)
            return
        scatter(data, offsets, rows, total)
        return
    st.launch.moved += total * n
    if addr.ndim == 0:
        addr = np.full(n, addr)
    low, high = check_global(st, addr)
    high += total
    rows = _rows(values, n, dt)
    if st.shadow is not None:
        st.shadow.reach(lanes, addr, total, "write")
        if st.shadow.global_store(lanes, addr, rows, total):
            return
    try:
        data = np.frombuffer(st.launch.vm.view(low, high - low, "write"), np.uint8)
    except MmuFault:
        try:
            st.launch.vm.store(addr, rows.reshape(n, -1).view(np.uint8).reshape(n, total))
        except MmuFault as e:
            raise at_lane(e, lanes) from None
        return
    scatter(data, (addr - np.uint64(low)).astype(np.int64), rows, total)


def scatter(data: Any, offsets: Any, rows: NDArray[Any], total: int) -> None:
    """Write rows at byte offsets; numpy lets the last of equal indices win."""
    table = data[: len(data) // total * total].view(rows.dtype)
    if rows.ndim == 2:
        table = table.reshape(-1, rows.shape[1])
    table[offsets >> (total.bit_length() - 1)] = rows


def window_view(
    st: State, space: str, lanes: Any, addr: NDArray[np.uint64], size: int, access: Access
) -> tuple[Any, NDArray[np.int64]]:
    """Bytes and offsets of a read-modify-write of shared or local memory, or of one mapping."""
    ((_, data, offsets),) = windows(st, space, lanes, addr, size, access)
    return data, offsets


def windows(
    st: State, space: str, lanes: Any, addr: NDArray[np.uint64], size: int, access: Access
) -> list[tuple[Any, Any, NDArray[np.int64]]]:
    """For each mapping: which of the accesses are in it (all: a slice), its bytes, the offsets."""
    if st.launch.looks is not None:
        st.looks_at(space, lanes, addr)
    if space != "global":
        data, offsets = flat(st, space, lanes, addr, size)
        if st.shadow is not None and access == "atomic" and not st.shadow.is_repeat(lanes, offsets):
            st.shadow.atomic(space, lanes, offsets, size)
        return [(slice(None), data, offsets)]
    low, high = check_global(st, addr)
    if st.shadow is not None and access == "atomic" and not st.shadow.is_repeat(lanes, addr):
        st.shadow.reach(lanes, addr, size, "atomic")
        st.shadow.global_atomic(lanes, addr, size)
    try:
        data = np.frombuffer(st.launch.vm.view(low, high + size - low, access), np.uint8)
    except MmuFault:
        try:
            st.launch.vm.load(addr, size, access)
        except MmuFault as e:
            raise at_lane(e, lanes) from None
        return _apart(st, np.argsort(addr, kind="stable"), addr, size, access)
    return [(slice(None), data, (addr - np.uint64(low)).astype(np.int64))]


def _apart(
    st: State, some: NDArray[np.intp], addr: NDArray[np.uint64], size: int, access: Access
) -> list[tuple[Any, Any, NDArray[np.int64]]]:
    """Accesses in rising order of address by the mapping that they are in."""
    where = addr[some]
    try:
        span = int(where[-1]) + size - int(where[0])
        data = np.frombuffer(st.launch.vm.view(int(where[0]), span, access), np.uint8)
    except MmuFault:
        cut = int(np.argmax(np.diff(where))) + 1  # mappings lie apart: the widest gap is no loss
        first = _apart(st, some[:cut], addr, size, access)
        return first + _apart(st, some[cut:], addr, size, access)
    order = np.sort(some)  # lanes act in their order
    return [(order, data, (addr[order] - where[0]).astype(np.int64))]
