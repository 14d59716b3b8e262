"""Loads, stores, address conversion, atomics, asynchronous copies (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...memory import MmuFault
from ..parser.syntax import Addr, Reg, Sym
from ..spaces import SPACES, aligned, load, parameter, split, store, windows
from ..state import CONTAINER, Async, KernelFault, State
from . import floats as fl
from .floats import Value
from .lower import PRED, U32, U64, Op, Read, Site

_HINTS = (
    "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "sc", "cta", "cluster", "gpu",
    "sys", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B",
    "L2::cache_hint", "v2", "v4", "v8", "shared::cta",
)  # fmt: skip


def space_of(site: Site) -> str:
    """State space named by the modifiers, "generic" without one."""
    if site.has("shared::cta"):
        return "shared"
    return next((m for m in site.mods if m in SPACES), "generic")


def _place(site: Site, n: int) -> tuple[str, Read]:
    """Space and address reader of memory operand n; kernel parameters become bank offsets."""
    addr, _ = site.address(n)
    return space_of(site), addr


def _vector(site: Site) -> int:
    return next((int(m[1:]) for m in site.mods if m in ("v2", "v4", "v8")), 1)


def _slot(site: Site, n: int) -> Reg | None:
    """The register that stands for a call's parameter variable in memory operand n."""
    arg = site.i.args[n]
    if not isinstance(arg, Addr) or not isinstance(arg.base, Sym) or "@" not in arg.base.name:
        return None
    if _vector(site) > 1:
        raise site.error("vector parameters of calls are not supported")
    return site.kernel.slot(arg.base.name, arg.offset, site.t.bits)


def ld(site: Site) -> Op:
    """ld, ldu: scalar and vector."""
    site.only(*_HINTS, *SPACES)
    if (slot := _slot(site, 1)) is not None:
        read, write = site.read(slot, site.t), site.dst()
        return lambda st: write(st, read(st))
    space, addr = _place(site, 1)
    t, count = site.t, _vector(site)
    items = site.items(0)
    if len(items) != count:
        raise site.error(f"{count} destinations are needed")
    puts = [site.write(item, t) for item in items]
    dt = t.dt
    arg = site.i.args[1]
    if space == "param" and isinstance(arg, Addr) and isinstance(arg.base, Sym):
        known = site.kernel.params.get(arg.base.name)
        at = arg.offset + (0 if known is None else known.offset)
        if known is not None and at >= 0 and at % (dt.itemsize * count) == 0:

            def one_of_all(st: State) -> None:
                for put, value in zip(puts, parameter(st, at, dt, count), strict=True):
                    put(st, value)

            return one_of_all
    if count == 1:
        put = puts[0]

        def one(st: State) -> None:
            put(st, load(st, space, addr(st), dt, 1)[0])

        return one

    def many(st: State) -> None:
        for put, value in zip(puts, load(st, space, addr(st), dt, count), strict=True):
            put(st, value)

    return many


def st_(site: Site) -> Op:
    """st: scalar and vector."""
    site.only(*_HINTS, *SPACES)
    if (slot := _slot(site, 0)) is not None:
        read, write = site.src(1), site.write(slot, site.t)
        return lambda st: write(st, read(st))
    space, addr = _place(site, 0)
    t, count = site.t, _vector(site)
    items = site.items(1)
    if len(items) != count:
        raise site.error(f"{count} sources are needed")
    reads = [site.read(item, t) for item in items]
    return lambda st: store(st, space, addr(st), [read(st) for read in reads])


def cvta(site: Site) -> Op:
    """cvta: generic from/to a space's addresses."""
    space = next((m for m in site.mods if m in SPACES), None)
    if space is None:
        raise site.error("no state space")
    t = site.t
    kind = t.dt.type
    a, put = site.src(1), site.dst()
    sign = -1 if site.has("to") else 1

    def run(st: State) -> None:
        base = st.launch.window_base(space)
        put(st, a(st) + kind(sign * base & (1 << t.bits) - 1))

    return run


def isspacep(site: Site) -> Op:
    """Test if a generic address lies in a space."""
    space = space_of(site)
    a, put = site.src(1, U64), site.dst(0, PRED)

    def run(st: State) -> None:
        addr = st.spread(a(st))
        out = np.zeros(len(addr), bool)
        for name, lanes, _ in split(st, "generic", addr):
            out[slice(None) if lanes is None else lanes] = name == space
        put(st, out)

    return run


def nothing(site: Site) -> Op:
    """Hints without effect here: prefetch, discard."""
    return lambda st: None


def fence(site: Site) -> Op:
    """Fences: all accesses are in order here, only the sanitizer needs to know."""

    def run(st: State) -> None:
        if st.shadow is not None:
            st.shadow.fence()

    return run


def _wrap_inc(old: Value, b: Value) -> Value:
    return np.where(old >= b, 0, old + old.dtype.type(1)).astype(old.dtype)


def _wrap_dec(old: Value, b: Value) -> Value:
    return np.where((old == 0) | (old > b), b, old - old.dtype.type(1)).astype(old.dtype)


def _real(fn: Any, dt: np.dtype[Any]) -> Any:
    """Of f32, of f16 and of both parts of f16x2, with PTX's NaN."""
    return lambda a, b: fl.canonical(fn(a.view(dt), b.view(dt))).view(a.dtype)


def _bf(a: Value, b: Value) -> Value:
    return fl.to_bf16(fl.from_bf16(a) + fl.from_bf16(b))


_UPDATE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, b: b, "inc": _wrap_inc,
    "dec": _wrap_dec,
}  # fmt: skip


def atom(site: Site) -> Op:
    """atom and red: lanes act one after the other, in lane order."""
    red = site.i.op == "red"
    at = 0 if red else 1
    op = next((m for m in site.mods if m in _UPDATE or m == "cas"), None)
    if op is None or site.has("v2", "v4", "v8"):
        raise site.error()
    site.only(*_HINTS, *SPACES, op, "noftz")
    space, addr = _place(site, at)
    t = site.t
    value = site.src(at + 1, t)
    third = site.src(at + 2, t) if op == "cas" else None
    put = None if red else site.dst(0, t)
    update = _UPDATE.get(op)
    if t.name in ("f16", "f16x2", "f32") and op == "add":
        update = _real(update, np.dtype(np.float32 if t.name == "f32" else np.float16))
    elif t.name == "bf16x2":
        raise site.error()
    elif t.name == "bf16":
        update = _bf if op == "add" else None
    if op != "cas" and update is None:
        raise site.error()
    size = t.bits // 8

    def run(st: State) -> None:
        where = st.spread(addr(st))
        b = st.spread(value(st))
        c = st.spread(third(st)) if third is not None else None
        aligned(st, where, size)
        old = np.zeros(len(where), t.dt)
        for name, lanes, part in split(st, space, where):
            for some, data, offsets in windows(st, name, lanes, part, size, "atomic"):
                table = data[: len(data) // size * size].view(t.dt)
                index = offsets // size
                pick = some if lanes is None else lanes[some]
                watched = st.launch.looks is not None
                before = table[index] if watched else None
                old[pick] = _atomic(table, index, b[pick], None if c is None else c[pick], update)
                if watched and (table[index] != before).any():
                    st.launch.changes += 1
        if put is not None:
            put(st, old)

    return run


def _atomic(table: Any, index: Any, b: Any, c: Any, update: Any) -> Any:
    """Apply the updates of equal indices one after the other; returns what each lane found."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    fresh = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(fresh)
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    old = np.empty(len(index), table.dtype)
    by_rank = np.argsort(rank, kind="stable")
    ends = np.cumsum(np.bincount(rank))
    begin = 0
    for end in ends:
        lanes = order[by_rank[begin:end]]
        here = index[lanes]
        found = table[here]
        old[lanes] = found
        table[here] = (
            np.where(found == b[lanes], c[lanes], found)
            if c is not None
            else update(found, b[lanes])
        )
        begin = int(end)
    return old


def cp_async(site: Site) -> Op:
    """cp.async: the copy lands when it is waited for, not before."""
    if site.has("commit_group"):
        return _commit
    if site.has("wait_group", "wait_all"):
        keep = 0 if site.has("wait_all") else site.constant(0)
        if keep is None:
            raise site.error()
        left = None if site.has("wait_all") else keep
        return lambda st: land(st, left)
    if not site.has("shared", "shared::cta") or not site.has("global"):
        raise site.error()
    dst, _ = site.address(0)
    src, _ = site.address(1)
    size = site.constant(2)
    if size not in (4, 8, 16) or (site.has("cg") and size != 16):
        raise site.error("cp-size must be 4, 8 or 16 (.cg: 16)")
    given = site.read(site.i.args[3], U32) if len(site.i.args) > 3 else None
    n = size

    def run(st: State) -> None:
        to, frm = st.spread(dst(st)), st.spread(src(st))
        aligned(st, to, n)
        aligned(st, frm, n)
        real = np.full(len(to), n) if given is None else st.spread(given(st)).astype(np.int64)
        lanes = st.lanes()
        copy = Async(lanes, _commits(st)[lanes], to, frm, n, np.minimum(real, n), site.i, st.site)
        if st.shadow is not None:
            st.shadow.copy_begins(lanes, st.shadow.flat(lanes, to), n)
            copy.begun = source(st, copy)
        st.copies.append(copy)

    return run


def _commits(st: State) -> NDArray[np.int64]:
    """Number of groups that each lane has committed."""
    if not len(st.commits):
        st.commits = np.zeros(st.n, np.int64)
    return st.commits


def _commit(st: State) -> None:
    _commits(st)[st.lanes()] += 1


def land(st: State, keep: int | None) -> None:
    """Land the active lanes' copies of all but their last `keep` groups (None: all copies)."""
    limit = np.full(st.n, -1)
    lanes = st.lanes()
    limit[lanes] = _commits(st)[lanes] - keep if keep is not None else np.iinfo(np.int64).max
    left = []
    for copy in st.copies:
        now = copy.group < limit[copy.lanes]
        if now.any():
            _land_one(st, copy.part(now))
        if not now.all():
            left.append(copy.part(~now))
    st.copies = left


def _land_one(st: State, copy: Async) -> None:
    if st.shadow is not None:
        st.shadow.copy_ends(st.shadow.flat(copy.lanes, copy.dst), copy.size)
    words = source(st, copy)
    if st.shadow is not None and copy.begun is not None:
        st.shadow.copy_read(copy, words)
    mask, st.m = st.m, copy.lanes
    here, st.site = st.site, copy.site
    try:
        store(st, "shared", copy.dst, list(words.T))
    finally:
        st.m, st.site = mask, here


def source(st: State, copy: Async) -> NDArray[np.uint32]:
    """Words that a copy reads, filled up with zeros. Raises KernelFault or MmuFault."""
    words = np.zeros((len(copy.lanes), copy.size // 4), np.uint32)
    mask, here, st.site = st.m, st.site, copy.site
    try:
        for size in np.unique(copy.source_size).tolist():
            some = np.flatnonzero(copy.source_size == size)
            st.m = copy.lanes[some]
            if size in (4, 8, 16):
                got = load(st, "global", copy.src[some], CONTAINER[32], size // 4)
                for k, word in enumerate(got):
                    words[some, k] = word
            else:
                data = words.view(np.uint8)
                for k in range(size):
                    byte = copy.src[some] + np.uint64(k)
                    data[some, k] = load(st, "global", byte, CONTAINER[8], 1)[0]
    except (KernelFault, MmuFault):
        st.fault_mask = st.m
        raise
    finally:
        st.m, st.site = mask, here
    return words


def ldmatrix(site: Site) -> Op:
    """ldmatrix .m8n8 .x1/.x2/.x4, with or without .trans, 16-bit elements."""
    if not site.has("m8n8") or not site.has("b16"):
        raise site.error()
    count = next((int(m[1:]) for m in site.mods if m in ("x1", "x2", "x4")), 0)
    items = site.items(0)
    if not count or len(items) != count:
        raise site.error("wrong number of destinations")
    trans = site.has("trans")
    addr, _ = site.address(1)
    puts = [site.write(item, U32) for item in items]
    space = space_of(site)
    row, col = np.arange(32) // 4, np.arange(32) % 4 * 2

    def run(st: State) -> None:
        where = st.spread(addr(st))
        whole_warps(st)
        warps = where.reshape(-1, 32)
        for k, put in enumerate(puts):
            rows = warps[:, 8 * k : 8 * k + 8].reshape(-1)  # addresses of matrix k's rows
            elements = np.empty((len(warps), 8, 8), np.uint16)
            mask = st.m
            lanes = st.lanes().reshape(-1, 32)[:, 8 * k : 8 * k + 8].reshape(-1)
            st.m = lanes
            try:
                words = load(st, space, rows, np.dtype(np.uint32), 4)
            finally:
                st.m = mask
            elements[:] = np.stack(words, -1).view(np.uint16).reshape(len(warps), 8, 8)
            if trans:
                elements = elements.transpose(0, 2, 1)
            low, high = elements[:, row, col], elements[:, row, col + 1]
            value = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
            put(st, value.reshape(-1))

    return run


def whole_warps(st: State) -> None:
    """Trap a warp-wide instruction that not all 32 threads of each warp execute."""
    lanes = st.lanes()
    ok = len(lanes) % 32 == 0
    if ok:
        rows = lanes.reshape(-1, 32)
        ok = bool((rows == rows[:, :1] + np.arange(32)).all() and (st.lane[rows[:, 0]] == 0).all())
    if not ok:
        raise KernelFault(0, "a warp-wide instruction is not executed by all 32 threads of a warp")


MEM_OPS: dict[str, Callable[[Site], Op]] = {
    "ld": ld, "ldu": ld, "st": st_, "cvta": cvta, "isspacep": isspacep, "atom": atom, "red": atom,
    "prefetch": nothing, "prefetchu": nothing, "membar": fence, "fence": fence,
    "discard": nothing, "applypriority": nothing, "ldmatrix": ldmatrix,
}  # fmt: skip
