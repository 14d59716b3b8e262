"""cvt: every pair of types, with PTX's rounding, saturation and NaN rules (PTX ISA 9.7.9.21)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..state import CONTAINER, State
from . import floats as fl
from .floats import F16, F32, F64, Value
from .lower import TYPES, Op, Site, Type

_U16, _U32, _U64 = CONTAINER[16], CONTAINER[32], CONTAINER[64]
_INTEGRAL: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_MODES = ("rn", "rz", "rm", "rp", "rna")
Fn = Callable[[Value], Value]


def cvt(site: Site) -> Op:
    """cvt with one source, or two packed into .f16x2/.bf16x2, or cvt.pack."""
    if site.has("pack"):
        return _pack_integers(site)
    site.only("ftz", "sat", "relu", *_MODES, *_INTEGRAL)
    if len(site.types) != 2:
        raise site.error("cvt needs two types")
    to, frm = site.types
    mode = next((m for m in site.mods if m in _MODES), "")
    integral = next((m for m in site.mods if m in _INTEGRAL), "")
    if to.name in ("f16x2", "bf16x2"):
        return _pack(site, to, mode or "rn")
    if to.kind in "fx" and frm.kind in "fx":
        fn = _float_float(site, to, frm, mode, integral)
    elif frm.kind in "fx":
        fn = _float_int(site, to, frm, integral)
    elif to.kind in "fx":
        fn = _int_float(site, to, frm, mode or "rn")
    else:
        fn = _int_int(site, to, frm)
    a, put = site.src(1, frm), site.dst(0, to)
    return lambda st: put(st, fn(a(st)))


def _pack(site: Site, to: Type, mode: str) -> Op:
    if site.types[1].name != "f32":
        raise site.error()
    one = _to_half(mode) if to.name == "f16x2" else (lambda x: fl.to_bf16(x, mode))
    relu = site.has("relu")

    def run(a: Value, b: Value) -> Value:
        if relu:
            a, b = fl.relu(a), fl.relu(b)
        high, low = one(a).view(_U16), one(b).view(_U16)
        return (high.astype(_U32) << np.uint32(16)) | low

    first, second, put = site.src(1, TYPES["f32"]), site.src(2, TYPES["f32"]), site.dst(0, to)
    return lambda st: put(st, run(first(st), second(st)))


def _pack_integers(site: Site) -> Op:
    """cvt.pack.sat: two saturated integers, above the lower part of c where there is one."""
    name = next(m for m in site.mods if m != "pack" and m != "sat")
    bits = int(name[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if name[0] == "s" else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)
    s32 = TYPES["s32"]
    a, b, put = site.src(1, s32), site.src(2, s32), site.dst(0, TYPES["b32"])
    c = site.src(3, TYPES["b32"]) if len(site.i.args) > 3 else None

    def cut(x: Value) -> Value:
        return np.clip(x, low, high).astype(_U32) & mask if bits < 32 else x

    def run(st: State) -> None:
        r = (cut(a(st)) << np.uint32(bits)) | cut(b(st))
        if c is not None:
            r = r | (c(st) << np.uint32(2 * bits))
        put(st, r.astype(_U32))

    return run


def _to_half(mode: str) -> Fn:
    if mode == "rn":
        return lambda x: fl.canonical(x.astype(F16))
    return lambda x: fl.canonical(fl.narrow(x.astype(F64), F16, mode).astype(F16, copy=False))


def _tf32(x: Value) -> Value:
    """Round to 10 mantissa bits, ties away (rna); the low 13 bits become 0."""
    bits = x.view(_U32)
    r = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(x != x, bits & np.uint32(0xFFFFE000), r).astype(_U32, copy=False)


def _float_float(site: Site, to: Type, frm: Type, mode: str, integral: str) -> Fn:
    ftz = site.has("ftz")
    relu, sat = site.has("relu"), site.has("sat")
    if to.name == "tf32":
        return _tf32
    steps: list[Fn] = []
    if frm.name == "bf16":
        steps.append(fl.from_bf16)
    if ftz and frm.name in ("f32", "bf16") and to.name != "f16":  # [recorded, H200]
        steps.append(lambda x: fl.canonical(fl.flush(x)))
    if integral:
        fn = _INTEGRAL[integral]
        steps.append(lambda x: fn(x))
    if frm.name == "f64" and to.name in ("f16", "f32"):
        rnd = mode or "rn"
        steps.append(lambda x: fl.from_nan(x, fl.narrow(x, to.dt, rnd).astype(to.dt, copy=False)))
    elif to.name == "f16" and frm.name != "f16":
        steps.append(_to_half(mode or "rn"))
    elif to.name == "bf16":
        if frm.name == "f64":
            steps.append(fl.odd32)
        elif frm.name == "f16":
            steps.append(lambda x: x.astype(F32))
        if relu:
            steps.append(fl.relu)
        steps.append(lambda x: fl.to_bf16(x, mode or "rn"))
        return _chain(steps)
    elif to.dt != frm.dt:
        steps.append(lambda x: x.astype(to.dt))
        if to.name == "f64":
            steps.append(fl.with_nan(lambda x: x, 0))
    plain = frm.name in ("f32", "bf16") and not (integral or ftz or relu)
    if to.name in ("f32", "f16") and frm.name != "f64" and not plain:
        steps.append(fl.canonical)
    if ftz and to.name == "f32":
        steps.append(fl.flush)
    if relu:
        steps.append(fl.relu)
    if sat:
        steps.append(fl.saturate)
    return _chain(steps)


def _chain(steps: list[Fn]) -> Fn:
    def run(x: Value) -> Value:
        for step in steps:
            x = step(x)
        return x

    return run


def _float_int(site: Site, to: Type, frm: Type, integral: str) -> Fn:
    """Rounded, then clamped to the destination's range; NaN gives 0 (see `nan_to_int`)."""
    fn = _INTEGRAL[integral or "rzi"]
    info = np.iinfo(to.dt)
    low, high = np.float64(info.min), np.float64(info.max)
    ftz = site.has("ftz") and frm.name == "f32"
    nan = nan_to_int(frm, to)

    def run(x: Value) -> Value:
        if frm.name == "bf16":
            x = fl.from_bf16(x)
        if ftz:
            x = fl.flush(x)
        r = fn(x.astype(F64))
        above, below = r >= high, r <= low
        safe = np.where(above | below | (r != r), 0.0, r)
        value = safe.astype(to.dt)
        value = np.where(above, to.dt.type(info.max), np.where(below, to.dt.type(info.min), value))
        return np.where(r != r, nan, value).astype(to.dt, copy=False)

    return run


def nan_to_int(frm: Type, to: Type) -> Any:
    """Convert a NaN: 0 from f16 and f32 to 32 bits and less, else the top bit alone.

    PTX says 0; hardware gives 0x8000... for 64-bit sources and destinations [recorded, H200].
    """
    if frm.bits == 64 or to.bits == 64:
        return CONTAINER[to.bits].type(1 << (to.bits - 1)).view(to.dt)
    return to.dt.type(0)


def _int_float(site: Site, to: Type, frm: Type, mode: str) -> Fn:
    sat = site.has("sat")

    def wide(x: Value) -> Value:
        """The integer as float64, rounded to odd where 53 bits are not enough."""
        if frm.bits < 64:
            return x.astype(F64)
        u = x.view(_U64)
        negative = (x < 0) if frm.kind == "s" else np.bool_(False)
        size = np.where(negative, ~u + np.uint64(1), u)
        lost = (size & np.uint64(0x7FF)) != 0
        cut = (size & ~np.uint64(0x7FF)) | (lost.astype(_U64) << np.uint64(11))
        exact = np.where(size < np.uint64(1 << 53), size, cut)
        r = exact.astype(F64)
        return np.where(negative, -r, r)

    def run(x: Value) -> Value:
        if to.name == "f64":
            r = fl.in_mode(lambda x: x.astype(F64), mode)(x)
        elif to.name == "bf16":
            return fl.to_bf16(fl.odd32(wide(x)), mode)
        else:
            r = fl.narrow(wide(x), to.dt, mode).astype(to.dt, copy=False)
        return fl.saturate(r) if sat else r

    return run


def _int_int(site: Site, to: Type, frm: Type) -> Fn:
    if not site.has("sat"):
        if to.bits == frm.bits:
            return lambda x: x.view(to.dt)
        return lambda x: x.astype(to.dt)
    info = np.iinfo(to.dt)

    def run(x: Value) -> Value:
        if frm.kind == "s":
            low = max(int(info.min), int(np.iinfo(frm.dt).min))
            x = np.maximum(x, frm.dt.type(low))
        high = min(int(info.max), int(np.iinfo(frm.dt).max))
        return np.minimum(x, frm.dt.type(high)).astype(to.dt)

    return run
