"""Floating point as PTX asks for it: rounding modes, fused multiply-add, canonical NaNs.

numpy computes in the rounding mode that the CPU is in (`rounding`). Exact fma and narrow types go
through float64 values that are "rounded to odd": with at least two bits more than the target,
rounding such a value once more gives the correctly rounded result [Boldo, Melquiond: Emulation of
FMA and correctly rounded sums, 2008]. All functions take arrays or numpy scalars and return the
same.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np

Value = Any
"""A numpy array of one element a lane, or a numpy scalar that is the same in all lanes."""

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
U16, U32, U64 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)
_I64 = np.dtype(np.int64)

NAN32 = np.uint32(0x7FFFFFFF).view(F32)
"""Single-precision operations return this NaN, whatever the inputs' payload (PTX ISA 9.7.3)."""
NAN16 = np.uint16(0x7FFF).view(F16)
NANB16 = np.uint16(0x7FFF)
NAN64 = np.uint64(0x7FFFFFFF << 32).view(F64)
"""The NaN of rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 [recorded, H200]."""
_TIE = np.int64(0x10000000)
_BELOW_F32 = np.int64(0x1FFFFFFF)
_MIN_F32 = np.float32(2.0**-126)
_SPLIT = np.float64(134217729.0)  # 2^27 + 1, Dekker's constant


_LIBM = ctypes.CDLL(None)  # Python itself is linked with it
if not hasattr(_LIBM, "fesetround"):
    _LIBM = ctypes.CDLL("libm.so.6")
_LIBM.fma.restype, _LIBM.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_FENV = {"rn": 0, "rz": 0xC00, "rm": 0x400, "rp": 0x800}
if platform.machine() not in ("x86_64", "AMD64"):
    _FENV = {"rn": 0, "rz": 3 << 22, "rm": 2 << 22, "rp": 1 << 22}
"""The rounding modes of fenv.h, on x86-64 and on AArch64."""


@contextmanager
def rounding(mode: str) -> Iterator[None]:
    """Let the CPU round in a mode."""
    _LIBM.fesetround(_FENV[mode])
    try:
        yield
    finally:
        _LIBM.fesetround(0)


def in_mode(fn: Any, mode: str) -> Any:
    """A function of numpy, computed in a rounding mode."""

    def run(*args: Value) -> Value:
        with rounding(mode):
            return fn(*args)

    return fn if mode == "rn" else run


def canonical(x: Value) -> Value:
    """Replace NaNs of a float32 or float16 result by PTX's."""
    if x.ndim == 0:
        return x if x == x else (NAN32 if x.dtype == F32 else NAN16)
    if x.dtype == F32:
        probe = x.dot(x)  # NaN if any element is: one pass instead of two
        if probe == probe:
            return x
    bad = x != x
    return np.where(bad, NAN32 if x.dtype == F32 else NAN16, x) if np.count_nonzero(bad) else x


def flush(x: Value) -> Value:
    """Subnormal float32 or float16 to zero of the same sign (.ftz)."""
    if x.dtype == F16:
        half = x.view(U16)
        none = (half & np.uint16(0x7C00)) == 0
        return np.where(none, half & np.uint16(0x8000), half).astype(U16, copy=False).view(F16)
    bits = x.view(U32)
    small = (bits & np.uint32(0x7F800000)) == 0
    return np.where(small, bits & np.uint32(0x80000000), bits).astype(U32, copy=False).view(F32)


def flush64(x: Value) -> Value:
    """Subnormal float64 to zero of the same sign (rcp.approx.ftz.f64)."""
    bits = x.view(U64)
    none = (bits & np.uint64(0x7FF << 52)) == 0
    return np.where(none, bits & np.uint64(1 << 63), bits).astype(U64, copy=False).view(F64)


def saturate(x: Value) -> Value:
    """Clamp to [+0, 1]; NaN becomes +0 (.sat)."""
    one, zero = x.dtype.type(1), x.dtype.type(0)
    return np.where(x > 0, np.minimum(x, one), zero).astype(x.dtype, copy=False)


def odd(value: Value, error: Value) -> Value:
    """`value` (float64) with the sign of its rounding error known, rounded to odd instead."""
    even = (value.view(_I64) & 1) == 0
    fix = (error != 0) & even & np.isfinite(value)
    return np.where(fix, np.nextafter(value, np.copysign(np.inf, error)), value)


def two_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """a + b in float64 and its error, exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Value, b: Value) -> tuple[Value, Value]:
    p = a * b
    t = _SPLIT * a
    ah = t - (t - a)
    t = _SPLIT * b
    bh = t - (t - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def narrow(x: Value, to: np.dtype[Any], mode: str) -> Value:
    """float64 (exact or rounded to odd) to float32/float16 in rounding mode rn/rz/rm/rp."""
    r = x.astype(to)
    if mode == "rn":
        return r
    back = r.astype(F64)
    inf = to.type(np.inf)
    with np.errstate(all="ignore"):
        if mode == "rz":
            return np.where(np.abs(back) > np.abs(x), np.nextafter(r, to.type(0)), r)
        if mode == "rm":
            return np.where(back > x, np.nextafter(r, -inf), r)
        return np.where(back < x, np.nextafter(r, inf), r)


def to_bf16(x: Value, mode: str = "rn") -> Value:
    """float32 (exact or rounded to odd) to bfloat16 bits (uint16)."""
    bits = x.view(U32)
    if mode == "rn":
        r = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        r = bits >> np.uint32(16)
        if mode in ("rm", "rp"):
            away = ((bits & np.uint32(0xFFFF)) != 0) & ((x < 0) == (mode == "rm"))
            r = r + away.astype(U32)
    return np.where(x != x, NANB16, r.astype(U16)).astype(U16, copy=False)


def from_bf16(bits: Value) -> Value:
    """bfloat16 bits (uint16) to float32, exactly."""
    return (bits.astype(U32) << np.uint32(16)).view(F32)


def odd32(x: Value) -> Value:
    """float64 to float32 rounded to odd, for a second rounding to bfloat16."""
    r = narrow(x, F32, "rz").astype(F32, copy=False)
    inexact = (r.astype(F64) != x) & np.isfinite(r)
    return np.where(inexact, (r.view(U32) | np.uint32(1)).view(F32), r)


def fma32(a: Value, b: Value, c: Value, mode: str = "rn") -> Value:
    """a * b + c in float32, rounded once.

    The product of two float32 is exact in float64. The float64 sum, rounded to float32, is the
    right answer unless it lies exactly between two float32 or is subnormal as one: only those
    lanes take the slow way.
    """
    p = np.multiply(a, b, dtype=F64)
    s = np.add(p, c, dtype=F64)
    if mode == "rn":
        r = s.astype(F32)
        doubt = (s.view(_I64) & _BELOW_F32) == _TIE
        tiny = np.abs(r) <= _MIN_F32
        doubt = doubt | (tiny & (s != 0)) if np.count_nonzero(tiny) else doubt
        if not np.count_nonzero(doubt):  # which is faster than any()
            return canonical(r)
        return canonical(np.where(doubt, odd(*two_sum(p, c.astype(F64))).astype(F32), r))
    w = c.astype(F64)
    exact = odd(*two_sum(p, w))
    if mode == "rm":
        exact = np.where(exact == 0, negative_zero(exact, p, w), exact)
    return canonical(narrow(exact, F32, mode).astype(F32, copy=False))


def fma16(a: Value, b: Value, c: Value, mode: str = "rn") -> Value:
    """a * b + c in float16, rounded once."""
    s = odd(*two_sum(a.astype(F64) * b.astype(F64), c.astype(F64)))
    return canonical(narrow(s, F16, mode).astype(F16, copy=False))


def fma_bf16(a: Value, b: Value, c: Value) -> Value:
    """a * b + c on bfloat16 bits, rounded once to nearest."""
    product = from_bf16(a).astype(F64) * from_bf16(b).astype(F64)
    return to_bf16(odd32(odd(*two_sum(product, from_bf16(c).astype(F64)))))


def _fma64_exact(a: float, b: float, c: float) -> float:
    """One float64 fma by integers, for magnitudes where splitting over- or underflows."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of zero follows the same rule
    try:
        return float(exact.numerator / exact.denominator)
    except OverflowError:
        return float(np.copysign(np.inf, 1 if exact > 0 else -1))


def fma64(a: Value, b: Value, c: Value) -> Value:
    """a * b + c in float64, rounded once to nearest even."""
    plain = a * b + c
    a, b, c = np.broadcast_arrays(a, b, c)
    uh, ul = _two_product(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    z = odd(*two_sum(tl, vl))
    result = np.where(np.isfinite(plain) & np.isfinite(vh), vh + z, plain)
    size_a, size_b, size_c = np.abs(a), np.abs(b), np.abs(c)
    product = size_a * size_b
    hard = (size_a > 2.0**990) | (size_b > 2.0**990) | (product > 2.0**1000) | (size_c > 2.0**1000)
    hard |= (product < 2.0**-900) & (a != 0) & (b != 0)
    finite = np.isfinite(a) & np.isfinite(b)
    result = np.where(finite & np.isinf(c), c, result)
    hard &= finite & np.isfinite(c)
    zero = (plain == 0) & ((a == 0) | (b == 0))
    result = np.where(zero, plain, result)
    for lane in np.flatnonzero(hard & ~zero):
        result = np.array(result)
        result.reshape(-1)[lane] = _fma64_exact(
            float(a.reshape(-1)[lane]), float(b.reshape(-1)[lane]), float(c.reshape(-1)[lane])
        )
    return result if result.ndim else result[()]


def fma64_lanes(a: Value, b: Value, c: Value) -> Value:
    """a * b + c in float64, lane by lane in the rounding mode that the CPU is in."""
    return np.frompyfunc(_LIBM.fma, 3, 1)(a, b, c).astype(F64)


def negative_zero(s: Value, a: Value, b: Value) -> Value:
    """A sum that is exactly zero, toward minus infinity: -0 unless both terms are +0."""
    return np.where(np.signbit(a) | np.signbit(b), -np.abs(s), s)


def relu(x: Value) -> Value:
    """Negative numbers and -0 become +0, NaN stays (.relu)."""
    return np.where((x > 0) | (x != x), x, x.dtype.type(0))


def relu_bf16(bits: Value) -> Value:
    """The same on bfloat16 bits."""
    down = (bits >= np.uint16(0x8000)) & ((bits & np.uint16(0x7FFF)) <= np.uint16(0x7F80))
    return np.where(down, np.uint16(0), bits).astype(U16, copy=False)


def xorsign(pick: Any) -> Any:
    """min or max of magnitudes, with the product's sign (.xorsign.abs)."""

    def run(a: Value, b: Value, nan: bool) -> Value:
        u = _bits(a)
        top = u.type(1 << (8 * u.itemsize - 1))
        sign = (a.view(u) ^ b.view(u)) & top
        r = pick((a.view(u) & ~top).view(a.dtype), (b.view(u) & ~top).view(a.dtype), nan)
        bits = np.where(r == r, r.view(u) | sign, r.view(u)).astype(u, copy=False)
        return bits.view(a.dtype)

    return run


def from_nan(x: Value, r: Value) -> Value:
    """`r` with NaNs that keep the sign and the upper payload of the float64 NaN they come from."""
    bits = x.view(U64)
    drop, quiet, u = (29, 0x7FC00000, U32) if r.dtype == F32 else (42, 0x7E00, U16)
    width = 8 * r.dtype.itemsize
    sign = (bits >> np.uint64(63)) << np.uint64(width - 1)
    payload = (bits & np.uint64((1 << 52) - 1)) >> np.uint64(drop)
    nan = (sign | payload | np.uint64(quiet)).astype(u).view(r.dtype)
    return np.where(x != x, nan, r).astype(r.dtype, copy=False)


def _extreme(pick: Any, a: Value, b: Value, zero: Value, nan: bool) -> Value:
    """`pick` of a and b; `zero`: what it is of two zeros."""
    r = np.where((a == 0) & (b == 0), zero, pick(a, b)).astype(a.dtype, copy=False)
    lost = r != r
    if np.count_nonzero(lost):  # of two NaNs the second stays, made quiet [recorded, H200]
        r = np.where(lost, np.where(a != a, b * b.dtype.type(1), a), r)
    return np.where((a != a) | (b != b), a.dtype.type(np.nan), r) if nan else r


def minimum(a: Value, b: Value, nan: bool) -> Value:
    """PTX min: a NaN loses (unless .NaN), -0 is less than +0."""
    return _extreme(np.fmin, a, b, (a.view(_bits(a)) | b.view(_bits(a))).view(a.dtype), nan)


def maximum(a: Value, b: Value, nan: bool) -> Value:
    """PTX max: a NaN loses (unless .NaN), +0 is more than -0."""
    return _extreme(np.fmax, a, b, (a.view(_bits(a)) & b.view(_bits(a))).view(a.dtype), nan)


def with_nan(fn: Any, *order: int) -> Any:
    """A function on float64 with the GPU's NaNs: of the first operand that is one, made quiet."""

    def run(*args: Value) -> Value:
        r = fn(*args)
        lost = r != r
        if not np.count_nonzero(lost):
            return r
        nan: Value = np.uint64(0xFFF8 << 48)
        for x in (args[n] for n in reversed(order)):
            nan = np.where(x != x, x.view(U64) | np.uint64(1 << 51), nan)
        return np.where(lost, nan.astype(U64).view(F64), r)

    return run


def _bits(x: Value) -> np.dtype[Any]:
    return U16 if x.dtype == F16 else U32 if x.dtype == F32 else U64


def approx(op: str, x: Value) -> Value:
    """ex2, lg2, sin, cos, tanh, rsqrt, rcp, sqrt of float32, through float64."""
    wide = x.astype(F64)
    if op == "ex2":
        r = np.exp2(wide)
    elif op == "lg2":
        r = np.log2(wide)
    elif op == "rsqrt":
        r = 1.0 / np.sqrt(wide)
    elif op == "rcp":
        r = 1.0 / wide
    else:
        r = getattr(np, op)(wide)
    return r.astype(F32)
