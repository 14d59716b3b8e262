"""Instructions across a warp: shfl, vote, match, redux, mma (PTX ISA 9.7.9, 9.7.14)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parser.syntax import Pair, Reg
from ..state import CONTAINER, KernelFault, Lanes, State
from . import floats as fl
from .floats import F16, F32, F64, Value
from .lower import PRED, TYPES, U32, Op, Read, Site
from .mem import whole_warps

_U8, _U16, _U32 = CONTAINER[8], CONTAINER[16], CONTAINER[32]
POISON = np.uint32(0xDBDBDBDB)
Groups = NDArray[np.intp]


def members(st: State, mask: Value) -> Groups | None:
    """Lanes that combine: those of a warp that name the same membermask; None: whole warps.

    Traps a membermask that misses the executing lane or names one that is not here.
    """
    lanes = st.lanes()
    masks = st.spread(mask).astype(np.uint32)
    own = np.uint32(1) << st.lane[lanes]
    if ((masks & own) == 0).any():
        lane = int(np.flatnonzero((masks & own) == 0)[0])
        raise KernelFault(0, f"membermask {int(masks[lane]):#x} misses the executing lane", lane)
    together = _partners(st, masks) if mask.ndim else None
    if st.m is None and st.threads % 32 == 0 and together is None:
        return None
    alive = st.launch.alive_mask(st)
    missing = masks & ~ballot(st, np.ones(len(lanes), bool)) & alive
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        raise KernelFault(
            0,
            f"membermask {int(masks[lane]):#x} names lanes {int(missing[lane]):#x} that do not "
            f"execute this instruction together with it",
            lane,
        )
    if together is not None:
        other = masks & ~ballot(st, np.ones(len(lanes), bool), together) & alive
        if other.any():
            lane = int(np.flatnonzero(other)[0])
            what = (
                f"sync: membermask {int(masks[lane]):#x} names lanes {int(other[lane]):#x} that "
                f"give another membermask (undefined)"
            )
            st.launch.find(st, what, f", {st.who(lane)}")
    return together


def _partners(st: State, masks: NDArray[np.uint32]) -> Groups | None:
    """A number for each warp and membermask in it; None where no warp has two."""
    warp = st.warp[st.lanes()]
    split = (warp[1:] == warp[:-1]) & (masks[1:] != masks[:-1])
    if not split.any():
        return None
    _, number = np.unique(warp.astype(np.uint64) << np.uint64(32) | masks, return_inverse=True)
    return np.asarray(number, np.intp)


def ballot(st: State, flag: NDArray[np.bool_], groups: Groups | None = None) -> NDArray[np.uint32]:
    """Per active lane: bits of the active lanes of its warp, or group, whose flag is set."""
    lanes = st.lanes()
    if groups is None and st.threads % 32 == 0:
        flags = np.zeros(st.n, bool)
        flags[lanes] = flag
        words: NDArray[np.uint32] = np.packbits(flags, bitorder="little").view("<u4")
        return words[st.warp[lanes]]
    group = st.warp[lanes] if groups is None else groups
    bits = np.where(flag, np.uint32(1) << st.lane[lanes], np.uint32(0))
    return np.bincount(group, bits).astype(np.uint32)[group]  # no bit is there twice


def reduce_blocks(st: State, reduce: tuple[str, Read, Any], lanes: Lanes) -> None:
    """bar.red: combine the predicate of all threads of each block."""
    kind, pred, put = reduce
    st.m = None if len(lanes) == st.n else lanes
    flag = st.spread(pred(st))
    block = lanes // st.threads
    ones = np.bincount(block, weights=flag, minlength=st.blocks).astype(np.uint32)
    everyone = np.bincount(block, minlength=st.blocks)
    out: Any = {"popc": ones, "or": ones > 0, "and": ones == everyone}[kind]
    put(st, out[block])


def shfl(site: Site) -> Op:
    """shfl(.sync).up/down/bfly/idx, with or without the predicate destination."""
    mode = next((m for m in site.mods if m in ("up", "down", "bfly", "idx")), None)
    source = site.i.args[1]
    if mode is None or not isinstance(source, Reg):
        raise site.error()
    index = source.index
    b, c = site.src(2, U32), site.src(3, U32)
    mask = site.src(4, U32) if site.has("sync") else None
    d = site.i.args[0]
    put = site.write(d.first if isinstance(d, Pair) else d, U32)
    put_ok = site.write(d.second, PRED) if isinstance(d, Pair) else None

    def run(st: State) -> None:
        if mask is not None:
            members(st, mask(st))
        lanes = st.lanes()
        lane = st.lane[lanes].astype(np.int64)
        bv = (b(st) & np.uint32(31)).astype(np.int64)
        cv = c(st).astype(np.int64)
        segment = (cv >> 8) & 31
        top = (lane & segment) | (cv & 31 & ~segment)
        low = lane & segment
        if mode == "up":
            j = lane - bv
            ok = j >= top
        elif mode == "down":
            j = lane + bv
            ok = j <= top
        elif mode == "bfly":
            j = lane ^ bv
            ok = j <= top
        else:
            j = low | (bv & ~segment)
            ok = j <= top
        j = np.where(ok, j, lane)
        value = st.full(index, _U32)
        flat = st.warp_base[lanes] + j
        active = np.zeros(st.n + 32, bool)
        active[lanes] = True
        same = flat < np.minimum(st.warp_base[lanes] + 32, (lanes // st.threads + 1) * st.threads)
        there = active[flat] & same
        got = value[np.minimum(flat, st.n - 1)]
        absent, named = ~there, True
        if mask is not None:
            masks = st.spread(mask(st)).astype(np.uint32, copy=False)
            named = (masks >> (j & 31).astype(np.uint32)) & np.uint32(1) != 0
        if mask is not None and mode in ("up", "down"):  # the ends of a part of a warp
            absent &= named
        else:
            absent |= ~np.asarray(named)
        if absent.any():
            who = st.who(int(np.flatnonzero(absent)[0]))
            what = "sync: shfl reads a lane that does not take part (undefined value)"
            st.launch.find(st, what, f", {who}")
        if not there.all():
            got = np.where(there, got, POISON)
        put(st, got)
        if put_ok is not None:
            put_ok(st, ok)

    return run


def vote(site: Site) -> Op:
    """vote(.sync).all/any/uni/ballot."""
    mode = next((m for m in site.mods if m in ("all", "any", "uni", "ballot")), None)
    if mode is None:
        raise site.error()
    p = site.src(1, PRED)
    mask = site.src(2, U32) if site.has("sync") else None
    put = site.dst(0, U32 if mode == "ballot" else PRED)

    def run(st: State) -> None:
        groups = None if mask is None else members(st, mask(st))
        flag = st.spread(p(st))
        yes = ballot(st, flag, groups)
        if mode == "ballot":
            put(st, yes)
        elif mode == "any":
            put(st, yes != 0)
        else:
            everyone = ballot(st, np.ones(len(flag), bool), groups)
            put(st, (yes == everyone) | ((yes == 0) if mode == "uni" else np.bool_(False)))

    return run


def activemask(site: Site) -> Op:
    """Bits of the warp's lanes that execute this."""
    put = site.dst(0, U32)
    return lambda st: put(st, ballot(st, np.ones(st.count(), bool)))


def match(site: Site) -> Op:
    """match.any/all.sync: lanes of the warp with the same value."""
    t = site.t
    a, mask = site.src(1), site.src(2, U32)
    d = site.i.args[0]
    put = site.write(d.first if isinstance(d, Pair) else d, U32)
    put_ok = site.write(d.second, PRED) if isinstance(d, Pair) else None
    everyone = site.has("all")
    unsigned = CONTAINER[t.bits]

    def run(st: State) -> None:
        groups = members(st, mask(st))
        lanes = st.lanes()
        value = st.spread(a(st)).view(unsigned).astype(np.uint64)
        same = np.zeros(len(lanes), np.uint32)
        for v in np.unique(value):
            hit = value == v
            same[hit] = ballot(st, hit, groups)[hit]
        if everyone:
            ok = same == ballot(st, np.ones(len(lanes), bool), groups)
            put(st, np.where(ok, same, np.uint32(0)))
            if put_ok is not None:
                put_ok(st, ok)
        else:
            put(st, same)

    return run


_REDUX: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def redux(site: Site) -> Op:
    """redux.sync: one value from all lanes of the mask."""
    op = next((m for m in site.mods if m in _REDUX), None)
    if op is None:
        raise site.error()
    fn = _REDUX[op]
    t = site.t
    start = {"min": np.iinfo(t.dt).max, "max": np.iinfo(t.dt).min, "and": -1}.get(op, 0)
    a, mask, put = site.src(1), site.src(2, U32), site.dst()

    def run(st: State) -> None:
        groups = members(st, mask(st))
        group = st.warp[st.lanes()] if groups is None else groups
        total = np.full(int(group.max()) + 1, np.int64(start)).astype(t.dt)
        fn.at(total, group, st.spread(a(st)))
        put(st, total[group])

    return run


# mma: which matrix element each lane's register part holds (PTX ISA, "Matrix Fragments for mma").


@lru_cache
def fragment(which: str, k: int, per: int, rows: int = 16) -> tuple[Any, Any]:
    """(32, elements) row and column indices of fragment a, b or c; `per` elements a register."""
    lane = np.arange(32)[:, None]
    group, thread = lane // 4, lane % 4
    if which == "c":
        i = np.arange(4 if rows == 16 else 2)[None, :]
        return group + 8 * (i // 2), thread * 2 + i % 2 + 0 * group
    i = np.arange(rows * k // 32 if which == "a" else k * 8 // 32)[None, :]
    chunk, part = i // per, i % per
    if which == "a":
        row = group + (8 * (chunk % 2) if rows == 16 else 0 * i)
        half = chunk // 2 if rows == 16 else chunk
        return row + 0 * i, thread * per + part + half * per * 4
    return thread * per + part + chunk * per * 4, group + 0 * i


MMA_SHAPES = {
    "m16n8k16": (16, 16), "m16n8k8": (16, 8), "m16n8k4": (16, 4), "m16n8k32": (16, 32),
    "m8n8k16": (8, 16), "m8n8k4": (8, 4),
}  # fmt: skip


def mma(site: Site) -> Op:
    """mma.sync row.col: f16, bf16, tf32, f64, s8/u8; products exact, summed in float64 or int64.

    Tensor cores add in an order and with a truncation that NVIDIA does not document: results agree
    within the rounding of the accumulator's type.
    """
    shape = next((m for m in site.mods if m in MMA_SHAPES), None)
    if shape is None or not site.has("row") or not site.has("col") or site.has("sp"):
        raise site.error()
    rows, k = MMA_SHAPES[shape]
    td, ta, tb, tc = site.types
    if (shape, ta.name) == ("m8n8k4", "f16"):
        raise site.error("this shape of the first tensor cores is not supported")
    if ta.name not in ELEMENTS or tb.name not in ELEMENTS:
        raise site.error()
    word = TYPES["b64"] if ta.name == "f64" else TYPES["b32"]
    per = word.bits // (32 if ta.name == "tf32" else ta.bits)
    readers = {n: [site.read(r, word) for r in site.items(n)] for n in (1, 2)}
    half = tc.name == "f16"
    acc_type = TYPES["b32"] if half else tc
    acc = [site.read(r, acc_type) for r in site.items(3)]
    puts = [site.write(r, TYPES["b32"] if td.name == "f16" else td) for r in site.items(0)]
    a_at, b_at, c_at = (
        fragment("a", k, per, rows),
        fragment("b", k, per),
        fragment("c", k, per, rows),
    )
    if len(readers[1]) * per != a_at[1].shape[1] or len(readers[2]) * per != b_at[0].shape[1]:
        raise site.error("wrong number of registers")
    exact = np.int64 if ta.kind in "us" else np.float64

    def matrix(
        st: State, reads: list[Read], fn: Any, at: tuple[Any, Any], size: tuple[int, int]
    ) -> Any:
        columns = [np.ascontiguousarray(st.spread(read(st))) for read in reads]
        values = fn(np.ascontiguousarray(np.stack(columns, -1)))
        full = np.zeros((len(values) // 32, *size), exact)
        full[:, at[0], at[1]] = values.reshape(-1, 32, values.shape[-1])
        return full

    def run(st: State) -> None:
        whole_warps(st)
        a = matrix(st, readers[1], ELEMENTS[ta.name], a_at, (rows, k))
        b = matrix(st, readers[2], ELEMENTS[tb.name], b_at, (k, 8))
        wide = (lambda x: x.view(F16).astype(F64)) if half else (lambda x: x.astype(exact))
        c = matrix(st, acc, wide, c_at, (rows, 8))
        total = np.zeros((len(a), rows, 8), exact)
        for n in range(k):  # one after the other, as C does
            total += a[:, :, n, None] * b[:, n, None, :]
        total += c
        out = total[:, c_at[0], c_at[1]].reshape(-1, c_at[1].shape[1])
        if exact is np.int64 and site.has("satfinite"):
            out = np.clip(out, -(2**31), 2**31 - 1)
        for put, column in zip(puts, _registers(out, td.name), strict=True):
            put(st, column)

    return run


ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "f16": lambda x: x.view(F16).astype(F64),
    "bf16": lambda x: fl.from_bf16(x.view(_U16)).astype(F64),
    "tf32": lambda x: (x & np.uint32(0xFFFFE000)).view(F32).astype(F64),
    "f64": lambda x: x.view(F64),
    "s8": lambda x: x.view(np.int8).astype(np.int64),
    "u8": lambda x: x.view(_U8).astype(np.int64),
}
"""Registers of an operand of mma, by type, as numbers that hold its products exactly."""


def _registers(out: Any, kind: str) -> list[Any]:
    """Sums (lanes, elements) as registers of the type, one vector of lanes each."""
    if kind == "f16":
        words = fl.canonical(np.ascontiguousarray(out).astype(F16).reshape(-1)).view(_U32)
        out = words.reshape(len(out), -1)
    columns = [np.ascontiguousarray(out[:, n]) for n in range(out.shape[1])]
    if kind == "s32":
        return [column.astype(np.uint32).view(np.int32) for column in columns]
    return [fl.canonical(c.astype(F32)) for c in columns] if kind == "f32" else columns


WARP_OPS: dict[str, Callable[[Site], Op]] = {
    "shfl": shfl, "vote": vote, "activemask": activemask, "match": match, "redux": redux,
    "mma": mma,
}  # fmt: skip
