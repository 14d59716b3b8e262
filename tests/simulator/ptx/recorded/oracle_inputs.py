"""Inputs of the oracle's kernels: the same bytes for ever.

Corner values come first, every pair of them, then random bit patterns of SHAKE.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

LANES = 1024
"""Threads of a kernel, and values of an input."""

F32 = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
    0x7F812345, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x3F000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x4B000001, 0x4F000000, 0xCF000000, 0x4F800000,
    0x34000000, 0x33800000, 0x3F800001, 0x42FE0000, 0xC3160000, 0x5F000000,
]  # fmt: skip
F64 = [
    0, 1 << 63, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000, 0xFFF0000000000000,
    0x7FF8000000000000, 0xFFF8000000012345, 1, 0x800FFFFFFFFFFFFF, 0x0010000000000000,
    0x7FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0x4004000000000000, 0xC004000000000000,
    0x41DFFFFFFFC00000, 0x43E0000000000000, 0xC3E0000000000000, 0x3CA0000000000000,
    0x3FF0000000000001, 0x47EFFFFFF0000000, 0x380FFFFFFFFFFFFF,
]  # fmt: skip
F16 = [
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE12, 0x0001, 0x83FF, 0x0400, 0x7BFF,
    0xFBFF, 0x3800, 0x3E00, 0x4100, 0xC100, 0x1400, 0x1000, 0x3C01, 0x5BFF, 0x6400,
]  # fmt: skip
BF16 = [
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0001, 0x807F, 0x0080, 0x7F7F,
    0xFF7F, 0x3F00, 0x3FC0, 0x4020, 0xC020, 0x3400, 0x3B80, 0x3F81, 0x4F00, 0x5F00,
]  # fmt: skip


def _ints(bits: int) -> list[int]:
    m = (1 << bits) - 1
    top = 1 << bits - 1
    small = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255]
    return [v & m for v in [*small, m, m - 1, top, top - 1, top + 1, 0x5555555555555555]]


def _corners(kind: str) -> list[int]:
    table = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}
    if kind in table:
        return table[kind]
    if kind in ("f16x2", "bf16x2"):
        half = table[kind[:-2]]
        return [a | b << 16 for a, b in zip(half, half[3:] + half[:3], strict=True)]
    return _ints(width(kind))


def width(kind: str) -> int:
    """Bits of a memory type."""
    return 32 if kind.endswith("x2") else int(kind.lstrip("abfsu"))


def random_bits(name: str, bits: int, count: int) -> NDArray[np.uint64]:
    """`count` values of `bits` random bits that depend on `name` alone."""
    data = hashlib.shake_128(name.encode()).digest(count * bits // 8)
    return np.frombuffer(data, f"<u{bits // 8}").astype(np.uint64)


def inputs(name: str, kinds: list[str], limit: str = "") -> tuple[NDArray[np.generic], ...]:
    """Corner pairs (or triples, drawn) first, then random bits; one array per input."""
    pools = [_corners(k) for k in kinds]
    out = []
    pairs = min(len(pools[0]) * (len(pools[1]) if len(pools) > 1 else 1), LANES // 2)
    step = 1 if len(pools) < 2 else max(1, len(pools[0]) * len(pools[1]) // pairs)
    for n, (kind, pool) in enumerate(zip(kinds, pools, strict=True)):
        bits = width(kind)
        values = random_bits(f"{name}/{n}", bits, LANES)
        index = np.arange(pairs) * step
        if n == 1:
            index = index // len(pools[0])
        elif n > 1:
            index = index * 7 + n
        values[:pairs] = np.array(pool, np.uint64)[index % len(pool)]
        if kind == "f32" and n < 3:  # magnitudes that meet: half of the random part near 1
            near = values[-LANES // 4 :]
            near[:] = (near & np.uint64(0x807FFFFF)) | np.uint64(0x3E800000) + (
                (near >> np.uint64(29) & np.uint64(3)) << np.uint64(23)
            )
        raw = values.astype(f"<u{bits // 8}")
        if limit:
            raw = _limited(raw, kind, limit)
        out.append(raw)
    return tuple(out)


def _limited(raw: NDArray[np.generic], kind: str, limit: str) -> NDArray[np.generic]:
    """Inputs whose results PTX defines: shift amounts, arguments of sin, finite numbers."""
    if limit == "angle":
        single = raw.view("<f4")
        x = np.where(np.isfinite(single), single, np.float32(1)).astype(np.float64)
        return np.remainder(x, 6.28).astype("<f4").view("<u4")
    if limit == "small" and width(kind) >= 32:
        return (raw.view(f"<u{width(kind) // 8}") % np.array(80, raw.dtype)).astype(raw.dtype)
    return raw
