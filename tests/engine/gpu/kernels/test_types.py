"""Every GGML type in the kernels against `gguf`'s dequantization, in float64.

The CUDA C runs on the CPU (`cuda_emulation`). Three readers of packed weights: one weight
(packed.cuh), the inner product with int8 or half activations (dot.cuh, in the whole GEMV), and
halves for tensor cores (unpack.cuh; test_gemm.py has the whole GEMM).
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray
from tests.engine.gpu import cuda_emulation
from tests.engine.sources import flat

from orinllm.file.ggml import GgmlType, KernelGgmlType, kernel_ggml_types

Array = NDArray[Any]
TYPES = sorted(kernel_ggml_types().values(), key=lambda t: t.id)
# Offsets of the blocks' scales and minima, all halves.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
ROWS, LARGE, SMALL = 5, 1536, 256  # weights of a row: a whole unit of the GEMV and a tail; a tail
SMEM = 48 << 10


ENTRY = """
template<int K> struct Gemved {{
  static constexpr int TYPE = {name}, COLS = K, ROWS_PER_ITEM = 2, DEPTH = 2, MODE = STORE,
    SEGMENTS = 1, WARPS = 2, GRID = 2, COLUMNS = 2, OUT_STRIDE = {rows},
    ACTIVATION = SILU;
  static constexpr bool NORM = false;
}};
template<int K> DI void rows_times_x(u8* smem, float* out, const u8* w, const float* x) {{
  const Seg seg[] = {{{{w, {rows}}}}};
  const float* const bias[] = {{0}};
  Best best[2];
  gemv<Gemved<K>>(Gemv<Plain<K>, Nothing>{{
    smem, out, Plain<K>{{x}}, 0, seg, bias, 0.f, 1.f, best, Nothing{{}}}});
}}
extern "C" __global__ void __launch_bounds__(64, 1) entry(
    const int* what, float* out, const u8* w, const void* in) {{
  constexpr int T = {name};
  __shared__ u8 __align__(16) smem[{smem}];
  const int tid = threadIdx.x, first = blockIdx.x == 0;
  for (int i = tid; i < {smem}; i += 64) smem[i] = 0xff;  // as a GPU may leave it: no numbers
  __syncthreads();
  if (*what == 0 && first)
    for (int r = 0; r < {rows}; r++)
      for (int k = tid; k < {large}; k += 64)
        out[r * {large} + k] = dequant<T>(w + r * {large} / Packed<T>::BW * Packed<T>::BB, k);
  if (*what == 1 && first && tid < 4)
    for (int r = 0; r < {rows}; r++)
      for (int i = 0; i < 2 * {large} / 64; i++) {{
        const u8* row = w + r * {large} / Packed<T>::BW * Packed<T>::BB;
        u32 h[4];
        to_half<T>(load_raw<T>(row, i / 2, tid), row, i / 2, i % 2, h);
        for (int k = 0; k < 8; k++)
          out[r * {large} + i / 4 * 128 + quarter_of<T>(i / 2, i % 2) * 32 + run_at<T>(i % 2, tid) +
            k] = f16<T>(h[k / 2] >> (16 * (k % 2)));
      }}
  if (*what == 2) rows_times_x<{large}>(smem, out, w, (const float*)in);
  if (*what == 3) rows_times_x<{small}>(smem, out, w, (const float*)in);
}}
"""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    entry = ENTRY.format(name=name, rows=ROWS, large=LARGE, small=SMALL, smem=SMEM)
    path = cuda_emulation.compile_emulated(flat("gemv.cu", "unpack.cuh") + "\n" + entry)
    return ctypes.CDLL(path.decode())


@dataclass
class Packed:
    """Rows at the least alignment that their type has, in memory that ends with them."""

    type: KernelGgmlType
    rows: Array

    def values(self) -> Array:
        found: Array = quants.dequantize(self.rows, GGMLQuantizationType(self.type.id))
        return found.astype(np.float64)

    def run(self, what: int, size: int, given: Array, grid: int = 1) -> Array:
        pad = self.type.alignment
        space = np.full(self.rows.size + 256, 0xFF, np.uint8)  # NaN as float and as half
        start = -space.ctypes.data % 64 + 64 + pad
        space[start : start + self.rows.size] = self.rows.reshape(-1)
        out = np.full(size, np.nan, np.float32)
        code = np.array([what], np.int32)
        arrays = [a.ctypes.data for a in (code, out)] + [space.ctypes.data + start]
        held = np.zeros(given.nbytes + 64, np.uint8)
        at = -held.ctypes.data % 64
        held[at : at + given.nbytes] = given.reshape(-1).view(np.uint8)
        pointers = (ctypes.c_void_p * 4)(*arrays, held.ctypes.data + at)
        three = ctypes.c_int * 3
        library(self.type.name).emulated_launch(pointers, three(grid, 1, 1), three(64, 1, 1))
        return out.astype(np.float64)


def random_rows(rng: np.random.Generator, type_: KernelGgmlType, cols: int) -> Packed:
    """Random quants and scales; normal d of either sign."""
    n = ROWS * cols // type_.block_values
    if type_.name == "F16":
        rows = rng.standard_normal((ROWS, cols)).astype(np.float16).view(np.uint8)
    elif type_.name == "BF16":
        words = rng.standard_normal((ROWS, cols)).astype(np.float32).view(np.uint16)
        rows = np.ascontiguousarray(words[:, 1::2]).view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (n, type_.block_bytes), dtype=np.uint8)
        for at in SCALES.get(type_.name, ()):
            d = (rng.standard_normal((n, 1)) * 0.01).astype(np.float16)
            blocks[:, at : at + 2] = d.view(np.uint8)
        if type_.name == "MXFP4":
            blocks[:, 0] = rng.integers(108, 130, n)
        rows = blocks.reshape(ROWS, -1)
    return Packed(type_, rows)


def extreme_rows(type_: KernelGgmlType, cols: int) -> Packed:
    """All bits set with d negative, subnormal and large, and blocks of zeros."""
    n = ROWS * cols // type_.block_values
    blocks = np.full((n, type_.block_bytes), 0xFF, np.uint8)
    for at in SCALES.get(type_.name, ()):
        ds = np.resize(np.array([-0.75, 6e-8, 100.0, 0.0], np.float16), n)
        blocks[:, at : at + 2] = ds.view(np.uint8).reshape(-1, 2)
    if type_.name == "MXFP4":
        blocks[:, 0] = np.resize(np.array([127, 1, 140, 2], np.uint8), n)
    blocks[3::4] = 0
    return Packed(type_, blocks.reshape(ROWS, -1))


def seen_by_gemv(type_: KernelGgmlType, x: Array) -> Array:
    """Activations as the GEMV has them: int8 or halves, a float scale for 32."""
    groups = x.reshape(-1, 32).astype(np.float32)
    top = np.abs(groups).max(1, keepdims=True)
    safe = np.where(top > 1e-30, top, 1)
    if type_.activation_bytes == 1:
        units, largest = np.rint(groups * (np.float32(127) / safe)), 127
    else:
        units, largest = (groups * (np.float32(1024) / safe)).astype(np.float16), 1024
    scaled = units.astype(np.float64) * (top / np.float32(largest)).astype(np.float64)
    return np.where(top > 1e-30, scaled, 0).reshape(x.shape)


def close(got: Array, want: Array, magnitude: Array, tolerance: float) -> None:
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - want) / (magnitude + 1e-30))
    assert worst <= tolerance, f"worst error {worst:.2e} of the magnitudes, allowed {tolerance:.0e}"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261122)


QUANTIZED = [t for t in TYPES if t.name not in ("F16", "BF16")]
by_name = pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
quantized_by_name = pytest.mark.parametrize("type_", QUANTIZED, ids=lambda t: t.name)


def test_sizes_are_those_of_gguf() -> None:
    own = {kind.name: (int(kind), kind.block_values, kind.block_bytes) for kind in GgmlType}
    assert own == {kind.name: (int(kind), *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    for type_ in QUANTIZED:
        assert own[type_.name] == (type_.id, type_.block_values, type_.block_bytes)


@by_name
def test_one_weight(type_: KernelGgmlType, rng: np.random.Generator) -> None:
    packed = random_rows(rng, type_, LARGE)
    want = packed.values().reshape(-1)
    # A minimum is subtracted from a product: two roundings of the larger of them.
    close(packed.run(0, want.size, np.zeros(1)), want, np.abs(want) + np.abs(want).max(), 2e-7)


@quantized_by_name
def test_one_weight_of_extreme_blocks(type_: KernelGgmlType) -> None:
    packed = extreme_rows(type_, LARGE)
    want = packed.values().reshape(-1)
    got = packed.run(0, want.size, np.zeros(1))
    np.testing.assert_allclose(got, want, rtol=3e-7)


@by_name
def test_halves(type_: KernelGgmlType, rng: np.random.Generator) -> None:
    packed = random_rows(rng, type_, LARGE)
    want = packed.values()
    got = packed.run(1, want.size, np.zeros(1)).reshape(want.shape)
    if type_.activation_bytes == 2:
        assert (got == want).all()
        return
    # The scale, the product and the minimum are each rounded to a half. Of a minimum, the block's
    # largest weight tells the size.
    blocks = np.abs(want).reshape(-1, 32 if type_.block_values == 32 else 256)
    size = np.broadcast_to(blocks.max(1, keepdims=True), blocks.shape).reshape(want.shape)
    minimum = type_.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    close(got / 256, want, np.abs(want) + (2 * size if minimum else 0) + 2.0**-33, 2.0**-10)
    if type_.name == "MXFP4":
        assert (got == want * 256).all()


@pytest.mark.parametrize("cols", [LARGE, SMALL])
@by_name
def test_gemv(type_: KernelGgmlType, cols: int, rng: np.random.Generator) -> None:
    packed = random_rows(rng, type_, cols)
    x = rng.standard_normal((2, cols)).astype(np.float32)
    got = packed.run(2 if cols == LARGE else 3, 2 * ROWS, x, 2).reshape(2, ROWS)
    seen, weights = seen_by_gemv(type_, x), packed.values()
    close(got, seen @ weights.T, np.abs(seen) @ np.abs(weights).T, 2e-6)


@quantized_by_name
def test_gemv_of_extreme_blocks(type_: KernelGgmlType, rng: np.random.Generator) -> None:
    """Largest sums of int8 products, an outlier that takes its group's scale, groups of zeros."""
    packed = extreme_rows(type_, LARGE)
    x = np.where(np.arange(LARGE) % 96 < 32, 0, rng.standard_normal(LARGE) * 1e4)
    x[40] = 3e4
    x = np.stack([x, np.full(LARGE, 127.0)]).astype(np.float32)
    got = packed.run(2, 2 * ROWS, x, 2).reshape(2, ROWS)
    seen, weights = seen_by_gemv(type_, x), packed.values()
    close(got, seen @ weights.T, np.abs(seen) @ np.abs(weights).T, 2e-6)
