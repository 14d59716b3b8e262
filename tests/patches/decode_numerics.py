"""What the tests of the decode kernels share: buffers, packed weights, float64 references."""

import importlib
import importlib.util
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from tests.patches import cuda_emulation
from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.engine.realize import run_linear
from tinygrad.uop.ops import Ops, UOp

nv: Any = None
# Without the patch each test fails, not only the import of all.
if importlib.util.find_spec("tinygrad.llm.kernels"):
    nv = importlib.import_module("tinygrad.llm.kernels.nv")
    cuda_emulation.install()

Array = NDArray[Any]
F16, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 1, 8, 12, 13, 14, 30
TYPES = [F16, Q8_0, Q4_K, Q5_K, Q6_K]
DTYPES = {"f4": dtypes.float32, "u1": dtypes.uint8, "i4": dtypes.int32, "u2": dtypes.uint16}


def buffer(a: Array) -> Any:
    a = np.ascontiguousarray(a)
    dtype = DTYPES["u2" if a.dtype == np.float16 else a.dtype.str[1:]]
    return Buffer("EMU", a.size, dtype).allocate().copyin(a.view(np.uint8).data.cast("B"))


def read(b: Any, dtype: Any = np.float32) -> Array:
    out = np.empty(b.nbytes // np.dtype(dtype).itemsize, dtype)
    b.copyout(out.data.cast("B"))
    return out


def run(kernel: Any, args: list[Any]) -> None:
    call = nv.program("EMU", kernel).call(*[UOp.from_buffer(b) for b in args])
    run_linear(UOp(Ops.LINEAR, dtypes.void, (call,)), jit=True)


def random_weights(rng: np.random.Generator, typ: int, rows: int, cols: int) -> Array:
    """Random valid blocks: random quants and scales, normal d of either sign."""
    _, width, size, _, _ = nv.TYPES[typ]
    n = rows * cols // width
    if typ == F16:
        return rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8)
    if typ == BF16:
        words = rng.standard_normal((rows, cols)).astype(np.float32).view(np.uint16)
        return np.ascontiguousarray(words[:, 1::2]).view(np.uint8)
    w = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in {Q8_0: (0,), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,)}[typ]:
        w[:, at : at + 2] = (rng.standard_normal((n, 1)) * 0.01).astype(np.float16).view(np.uint8)
    return w.reshape(rows, -1)


def adversarial_weights(typ: int, rows: int, cols: int) -> Array:
    """Largest quants and scales with d negative, subnormal and largest; and zero blocks."""
    _, width, size, _, _ = nv.TYPES[typ]
    w = np.full((rows * cols // width, size), 0xFF, np.uint8)
    if typ == F16:
        values = np.array([-65504, 6e-8, 65504, 0], np.float16)
        return np.resize(values, (rows, cols)).view(np.uint8)
    ds = np.array([-0.75, 6e-8, 100.0, 0.0], np.float16)
    for at in {Q8_0: (0,), Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,)}[typ]:
        w[:, at : at + 2] = np.resize(ds, len(w)).view(np.uint8).reshape(-1, 2)
    if typ == Q6_K:
        w[:, 192:208] = np.resize(np.array([127, -128], np.int8), 16).view(np.uint8)
    w[3::4] = 0
    return w.reshape(rows, -1)


def dequantized(typ: int, w: Array) -> Array:
    found: Array = quants.dequantize(w, GGMLQuantizationType(typ)).astype(np.float64)
    return found


def weight(typ: int, w: Array, cols: int) -> Any:
    """A weight that begins in the middle of a file, at the least alignment that its type has."""
    pad = nv.TYPES[typ][4]
    whole = buffer(np.concatenate([np.full(pad, 0xEE, np.uint8), w.reshape(-1)]))
    view = whole.view(w.size, dtypes.uint8, pad).ensure_allocated()
    return nv.Weight(view, typ, len(w), cols)


def quantized(typ: int, x: Array) -> Array:
    """The activations as the kernels see them: int8 (or halves) per 32, in float64."""
    groups = np.pad(x, (0, -len(x) % 32)).reshape(-1, 32).astype(np.float32)
    top = np.abs(groups).max(1, keepdims=True)
    safe = np.where(top > 1e-30, top, 1)
    if nv.TYPES[typ][3] == 1:
        q = np.rint(groups * (np.float32(127) / safe).astype(np.float32)).astype(np.float64)
        scaled = q * (top / np.float32(127)).astype(np.float64)
    else:
        q = (groups * (np.float32(1024) / safe)).astype(np.float16).astype(np.float64)
        scaled = q * (top / np.float32(1024)).astype(np.float64)
    return np.where(top > 1e-30, scaled, 0).reshape(-1)[: len(x)]


def close(got: Array, want: Array, magnitude: Array, tolerance: float) -> None:
    """Within the tolerance of the sum of magnitudes: what rounding of a sum may cost."""
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - want) / (magnitude + 1e-20))
    assert worst <= tolerance, f"worst error {worst:.2e} of the magnitudes, allowed {tolerance:.0e}"


def rotated(v: Array, freqs: Array, interleaved: bool, norm: Array | None) -> Array:
    """A head in float64 as the model's general path has it: half-split, normed, rotated."""
    v = v.astype(np.float64)
    if interleaved:
        v = np.concatenate([v[0::2], v[1::2]])
    if norm is not None:
        v = v / np.sqrt((v**2).mean() + 1e-6) * norm
    half = len(v) // 2
    a, b, c, s = v[:half], v[half:], freqs[:half], freqs[half:]
    return np.concatenate([a * c - b * s, b * c + a * s])


def attend(q: Array, k: Array, v: Array) -> Array:
    s = k.astype(np.float64) @ q / np.sqrt(len(q))
    p = np.exp(s - s.max())
    return np.asarray(p @ v.astype(np.float64) / p.sum())


# head dimension, KV heads, group, halves in the cache, interleaved rows, norms of q and k
HEADS = [
    (64, 2, 1, False, True, False),
    (64, 2, 4, False, True, False),
    (64, 1, 7, True, False, False),
    (80, 2, 2, False, True, False),
    (96, 1, 3, False, False, True),
    (96, 1, 8, True, True, False),
    (128, 2, 4, True, False, True),
    (128, 1, 5, False, True, False),
    (128, 1, 6, False, False, False),
]
