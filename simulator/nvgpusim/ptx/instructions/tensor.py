"""wmma, mbarrier and cp.async, as sm_80 has them (PTX ISA 9.7.14.4, 9.7.13.15).

The layout of wmma's fragments is not specified, so it is ours: element n of a matrix lies in lane
n / (elements a lane), and a and b, which have room for more, repeat from the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..spaces import load, store, window_view
from ..state import CONTAINER, KernelFault, State
from . import floats as fl
from .floats import F16, Value
from .lower import PRED, TYPES, U32, U64, Op, Read, Site
from .mem import cp_async, land, space_of
from .warp import ELEMENTS

SHAPES = {
    "m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16),
    "m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4),
}  # fmt: skip
_RAW = {"f16": "u16", "bf16": "u16", "s8": "u8", "u8": "u8", "tf32": "u32", "f64": "u64",
        "f32": "u32", "s32": "u32"}  # fmt: skip


def _shape(site: Site) -> tuple[int, int, int]:
    name = next((m for m in site.mods if m in SHAPES), None)
    if name is None:
        raise site.error("this shape of wmma is not supported")
    return SHAPES[name]


def _kind(site: Site) -> str:
    kind = site.mods[-1]
    if kind not in _RAW:
        raise site.error(f"wmma of .{kind} is not supported")
    return kind


def _word(kind: str) -> Any:
    return TYPES["b64"] if kind == "f64" else TYPES["b32"]


def wmma(site: Site) -> Op:
    """wmma.load, wmma.store, wmma.mma."""
    if site.has("load"):
        return _load(site)
    if site.has("store"):
        return _store(site)
    if not site.has("mma") or (site.has("popc", "satfinite") and site.has("popc")):
        raise site.error()
    return _mma(site)


def _matrix(site: Site) -> tuple[str, int, int]:
    """Name of the matrix, its rows and columns."""
    m, n, k = _shape(site)
    which = next(x for x in site.mods if x in "abcd")
    return which, *{"a": (m, k), "b": (k, n)}.get(which, (m, n))


def _places(site: Site, at: int, rows: int, columns: int) -> Callable[[State], Any]:
    """Byte addresses of all elements, (warps, rows * columns)."""
    addr, _ = site.address(at)
    stride_at = at + (2 if site.has("store") else 1)
    given = len(site.i.args) > stride_at
    column_major = site.has("col")
    stride = site.src(stride_at, U32) if given else None
    size = CONTAINER[int(_RAW[_kind(site)][1:])].itemsize
    row, column = np.divmod(np.arange(rows * columns), columns)

    def run(st: State) -> Any:
        base = st.spread(addr(st)).reshape(-1, 32)[:, :1]
        ldm: Any = np.int64(rows if column_major else columns)
        if stride is not None:
            ldm = st.spread(stride(st)).reshape(-1, 32)[:, :1].astype(np.int64)
        index = column * ldm + row if column_major else row * ldm + column
        return base + (index * size).astype(np.uint64)

    return run


def _some_lanes(st: State, count: int) -> Any:
    """The first lane of each warp, once for each element: who accesses it does not matter."""
    return np.repeat(st.lanes().reshape(-1, 32)[:, 0], count)


def _load(site: Site) -> Op:
    _, rows, columns = _matrix(site)
    kind, count = _kind(site), rows * columns
    raw, word = CONTAINER[int(_RAW[kind][1:])], _word(kind)
    items = site.items(0)
    puts = [site.write(item, word if kind != "f32" else TYPES["f32"]) for item in items]
    if kind == "s32":
        puts = [site.write(item, TYPES["s32"]) for item in items]
    per = word.bits // (8 * raw.itemsize)
    places, space = _places(site, 1, rows, columns), space_of(site)

    def run(st: State) -> None:
        where = places(st)
        mask, st.m = st.m, _some_lanes(st, count)
        try:
            got = load(st, space, where.reshape(-1), raw, 1)[0]
        finally:
            st.m = mask
        _spread(st, got.reshape(-1, count), per, puts, word, kind)

    return run


def _spread(st: State, matrices: Any, per: int, puts: list[Any], word: Any, kind: str) -> None:
    """Write (warps, elements) to the lanes' registers."""
    slots = 32 * len(puts) * per
    full = np.tile(matrices, (1, -(-slots // matrices.shape[1])))[:, :slots]
    words = np.ascontiguousarray(full).view(CONTAINER[word.bits]).reshape(-1, len(puts))
    for n, put in enumerate(puts):
        column = np.ascontiguousarray(words[:, n])
        put(
            st,
            column.view(
                {"f32": np.float32, "s32": np.int32, "f64": np.uint64}.get(kind, column.dtype)
            ),
        )


def _collect(st: State, reads: list[Read], raw: Any, count: int) -> Any:
    """The first `count` elements that the lanes' registers hold, (warps, count)."""
    columns = [np.ascontiguousarray(st.spread(read(st))) for read in reads]
    words = np.ascontiguousarray(np.stack(columns, -1))
    return words.view(raw).reshape(len(columns[0]) // 32, -1)[:, :count]


def _store(site: Site) -> Op:
    _, rows, columns = _matrix(site)
    kind, count = _kind(site), rows * columns
    raw = CONTAINER[int(_RAW[kind][1:])]
    reads = [site.read(item, _word(kind)) for item in site.items(1)]
    places, space = _places(site, 0, rows, columns), space_of(site)

    def run(st: State) -> None:
        where, values = places(st), _collect(st, reads, raw, count)
        mask, st.m = st.m, _some_lanes(st, count)
        try:
            store(st, space, where.reshape(-1), [np.ascontiguousarray(values).reshape(-1)])
        finally:
            st.m = mask

    return run


def _mma(site: Site) -> Op:
    m, n, k = _shape(site)
    kinds = [x for x in site.mods if x in _RAW]
    if len(kinds) == 2:  # .d.c of f16
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    td, ta, tb, tc = kinds
    if ta not in ELEMENTS or tb not in ELEMENTS:
        raise site.error()
    a = [site.read(r, _word(ta)) for r in site.items(1)]
    b = [site.read(r, _word(tb)) for r in site.items(2)]
    c = [site.read(r, _word(tc)) for r in site.items(3)]
    puts = [site.write(r, _word(td)) for r in site.items(0)]
    exact = np.int64 if ta in ("s8", "u8") else np.float64

    def numbers(raw: Any, kind: str) -> Any:
        if kind in ("f32", "s32"):
            return raw.view(np.float32 if kind == "f32" else np.int32).astype(exact)
        return ELEMENTS[kind](raw).astype(exact)

    def run(st: State) -> None:
        x, y, z = (
            numbers(_collect(st, reads, CONTAINER[int(_RAW[t][1:])], rows * columns), t)
            for reads, t, rows, columns in ((a, ta, m, k), (b, tb, k, n), (c, tc, m, n))
        )
        total = np.matmul(x.reshape(-1, m, k), y.reshape(-1, k, n)) + z.reshape(-1, m, n)
        if exact is np.int64 and site.has("satfinite"):
            total = np.clip(total, -(2**31), 2**31 - 1)
        flat = total.reshape(-1, m * n)
        out: Value
        if td == "f16":
            out = fl.canonical(flat.astype(F16).reshape(-1)).reshape(flat.shape).view(np.uint16)
        elif td == "f32":
            out = fl.canonical(flat.astype(np.float32).reshape(-1)).reshape(flat.shape)
        else:
            out = flat if td == "f64" else flat.astype(np.uint32)
        word = _word(td)
        words = np.ascontiguousarray(out).view(CONTAINER[word.bits]).reshape(-1, len(puts))
        for number, put in enumerate(puts):
            put(st, np.ascontiguousarray(words[:, number]))

    return run


# mbarrier: the 64-bit word holds pending arrivals (20 bits), expected ones (20), the phase above.

_FIELD = np.uint64((1 << 20) - 1)
_BITS = np.uint64(20)
_PHASE = np.uint64(40)


def mbarrier(site: Site) -> Op:
    """init, inval, arrive, arrive_drop, test_wait, try_wait, pending_count."""
    if site.has("pending_count"):
        state, put = site.src(1, U64), site.dst(0, U32)
        return lambda st: put(st, (state(st) & _FIELD).astype(np.uint32))
    if site.has("init", "inval"):
        return _init(site)
    if site.has("test_wait", "try_wait"):
        return _test_wait(site)
    if site.has("arrive", "arrive_drop") and not site.has("expect_tx"):
        return arrive(site)
    raise site.error()


def _word_at(st: State, space: str, addr: Value, access: Any = "atomic") -> tuple[Any, Any]:
    """Table of 64-bit words and the lanes' indices; a barrier lies in shared memory."""
    where = st.spread(addr)
    if space == "generic":
        where = where - np.uint64(st.launch.shared_window)
    if (where % 8).any():
        raise KernelFault(0xF, "an mbarrier needs 8-byte alignment")
    data, offsets = window_view(st, "shared", None, where, 8, access)
    return data[: len(data) // 8 * 8].view(np.uint64), offsets // 8


def _init(site: Site) -> Op:
    addr, _ = site.address(0)
    space = space_of(site)
    count = site.src(1, U32) if site.has("init") else None

    def run(st: State) -> None:
        number = (count(st) if count is not None else np.uint32(0)).astype(np.uint64) & _FIELD
        where = st.spread(addr(st))
        if space == "generic":
            where = where - np.uint64(st.launch.shared_window)
        store(st, "shared", where, [number | number << _BITS])

    return run


def arrive(site: Site) -> Op:
    """mbarrier.arrive: lanes act one after the other."""
    at = 0 if len(site.i.args) == 1 else 1
    addr, _ = site.address(at)
    space = space_of(site)
    given = site.src(at + 1, U32) if len(site.i.args) > at + 1 else None
    put = site.dst(0, U64) if at == 1 else None
    drop = site.has("arrive_drop")

    def run(st: State) -> None:
        if st.shadow is not None:
            st.shadow.fence()
        table, index = _word_at(st, space, addr(st))
        st.launch.changes += 1
        by = st.spread(given(st)).astype(np.uint64) if given is not None else None
        before = np.empty(len(index), np.uint64)
        ended: dict[int, int] = {}
        for lane, place in enumerate(index.tolist()):
            if place in ended and st.shadow is not None:
                _left_over(st, index, place, ended[place], lane)
            word = before[lane] = table[place]
            step = np.uint64(1) if by is None else by[lane]
            pending, expected = word & _FIELD, (word >> _BITS) & _FIELD
            phase = word >> _PHASE
            if pending < step:
                raise KernelFault(0, "more arrivals at an mbarrier than it expects", lane)
            pending = pending - step
            if drop:
                expected = expected - step
            if pending == 0:
                pending, phase = expected, phase + np.uint64(1)
                ended[place] = int(expected)
            table[place] = pending | expected << _BITS | phase << _PHASE
        if put is not None:
            put(st, before)

    return run


def _left_over(st: State, index: Any, place: int, expected: int, lane: int) -> None:
    """Arrivals of one instruction are in two phases: nothing says whose is in which."""
    count = int((index == place).sum())
    what = f"sync: an mbarrier's phase has {expected} arrivals, but {count} threads arrive together"
    st.launch.find(st, what, f", {st.who(lane)} among them, for the next phase")


def _test_wait(site: Site) -> Op:
    addr, _ = site.address(1)
    space, parity = space_of(site), site.has("parity")
    state, put = site.src(2, U32 if parity else U64), site.dst(0, PRED)

    def run(st: State) -> None:
        table, index = _word_at(st, space, addr(st))
        now = table[index] >> _PHASE
        then = st.spread(state(st)).astype(np.uint64)
        put(st, now % 2 != then % 2 if parity else now != then >> _PHASE)

    return run


def cp(site: Site) -> Op:
    """cp.async; its mbarrier.arrive lets the copies land at once, the earliest that may be.

    Without .noinc, the barrier expects one arrival more, which the landed copies make.
    """
    if not site.has("mbarrier"):
        return cp_async(site)
    if not site.has("async") or not site.has("arrive") or site.has("shared::cluster"):
        raise site.error()
    arrives = arrive(site) if site.has("noinc") else None
    addr, _ = site.address(0)
    space = space_of(site)

    def run(st: State) -> None:
        land(st, None)
        if arrives is not None:
            arrives(st)
        else:
            _word_at(st, space, addr(st))  # faults where there is none

    return run


TENSOR_OPS: dict[str, Callable[[Site], Op]] = {"wmma": wmma, "mbarrier": mbarrier, "cp": cp}
