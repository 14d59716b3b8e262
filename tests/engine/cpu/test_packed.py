"""The CPU's C for this machine, and for older ones whose instructions it has, too.

Weights of every type as cpu/packed.c and rows.c read them, against `gguf`'s own dequantization, and
encoders of pictures (cpu/encoder.c), against `transformers` and numpy.
"""

import ctypes
import functools
import itertools
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray
from PIL import Image
from tests.engine.vision import tiny

from orinllm.cpu.native import SOURCES
from orinllm.cpu.picture_encoder import CpuPictureEncoder, StageStruct
from orinllm.cpu.weight_layout import PACKED, floats_for_rounded_inputs
from orinllm.file.ggml import GgmlType
from orinllm.mmproj import read_mmproj
from orinllm.network.vision.patches import query_blocks_with_keys
from orinllm.network.vision.prepare import tiles_and_grid

RECORDED = np.load(Path(tiny.__file__).with_name("recorded.npz"))
# As many rows as a tile has at most.
ROWS, COLS, TOKENS = 16, 512, 5
# Where the 16-bit floats of a block lie; 16 bits drawn at random could be no number.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
# What a test calls: a row as floats, a tile of rows times tokens, and a stage of an encoder.
ENTRIES = """
void row(i64 type, const u8* packed, i64 cols, float* out) {
  const Layout layout = {0, type};
  unpack(&layout, packed, cols, out);
}
void times(i64 type, const u8* packed, i64 row_bytes, const float* x, i64 n, i64 cols,
           float* space, float* out) {
  const Layout layout = {row_bytes, type};
  const u8* rows[ROWS];
  Input in[8];
  float_rows sums[8];
  const i64 size = floats_for_rounded_inputs(cols);
  for (i64 t = 0; t < n; t++) in[t] = rounded(x + t * cols, cols, space + t * size);
  for (int first = 0; first < 16; first += ROWS) {
    for (int r = 0; r < ROWS; r++) rows[r] = packed + (first + r) * row_bytes;
    tile(&layout, rows, in, n, cols, sums);
    for (i64 t = 0; t < n; t++) __builtin_memcpy(out + 16 * t + first, sums + t, sizeof *sums);
  }
}
void stage(const StageStruct* stage, float* scratch) {
  for (i64 unit = 0; unit < stage_units(stage); unit++) encode(stage, scratch, unit);
}
"""


def machines() -> list[str]:
    """This one, and x86-64 with AVX2 and without, if this one has it: one of each kind of loop."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    older = {"x86-64-v3": "avx2", "x86-64-v2": "ssse3"}
    return ["native", *(name for name, flag in older.items() if f" {flag} " in flags)]


def clang() -> list[str]:
    found = shutil.which("clang")
    return [found] if found else [sys.executable, "-m", "ziglang", "clang"]


@functools.cache
def compiled(machine: str) -> ctypes.CDLL:
    """Compile the sources but decoder.c, with ENTRIES, for a machine."""
    text = "".join(source.read_text() for source in SOURCES[:-1]) + ENTRIES
    arm = platform.machine() == "aarch64" and machine == "native"
    flag = f"-mcpu={machine}" if arm else f"-march={machine}"
    with tempfile.TemporaryDirectory() as made:
        source, out = Path(made) / "rows.c", Path(made) / "rows.so"
        source.write_text(text)
        flags = ["-O2", "-w", "-fPIC", "-shared", "-fno-math-errno", flag]
        subprocess.run([*clang(), *flags, str(source), "-o", str(out)], check=True)
        return ctypes.CDLL(str(out))


def drawn(type_: GgmlType) -> NDArray[np.uint8]:
    """Return ROWS rows of COLS random weights."""
    draws, values = np.random.default_rng(7), type_.block_values
    blocks = draws.integers(0, 256, (ROWS * COLS // values, type_.block_bytes), np.uint8)
    for at in HALVES.get(type_.name, (0,)):
        halves = draws.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    if type_.name == "MXFP4":
        blocks[:, 0] = draws.integers(100, 140, len(blocks))
    return blocks.reshape(ROWS, -1)


def times(
    machine: str, type_: GgmlType, packed: NDArray[np.uint8], x: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return rows times tokens: (tokens, rows)."""
    space = np.zeros(len(x) * floats_for_rounded_inputs(COLS), np.float32)
    out = np.zeros((len(x), ROWS), np.float32)
    at = [ctypes.c_void_p(array.ctypes.data) for array in (packed, x, space, out)]
    sizes = [ctypes.c_int64(n) for n in (type_, packed.shape[1], len(x), COLS)]
    kind, row_bytes, n, cols = sizes
    compiled(machine).times(kind, at[0], row_bytes, at[1], n, cols, at[2], at[3])
    return out


@pytest.mark.parametrize("machine", machines())
def test_every_type(machine: str) -> None:
    """Floats are exact; a token has the same sums alone and among others, and they are right."""
    x = np.random.default_rng(3).normal(size=(TOKENS, COLS)).astype(np.float32)
    x[2, 7] = 1000  # one large activation, as real models have them
    for type_ in sorted(PACKED):
        packed = drawn(type_)
        wanted, got = dequantize(packed, type_), np.zeros((ROWS, COLS), np.float32)
        for row, out in zip(packed, got, strict=True):
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (row, out)]
            cols = ctypes.c_int64(COLS)
            compiled(machine).row(ctypes.c_int64(type_), pointers[0], cols, pointers[1])
        np.testing.assert_array_equal(got, wanted, type_.name)
        together = times(machine, type_, packed, x)
        alone = [times(machine, type_, packed, one[None])[0] for one in x]
        np.testing.assert_array_equal(together, alone, type_.name)
        # Half a step of 16 bits for each activation, of the largest of its 32.
        steps = np.abs(x).reshape(TOKENS, -1, 32).max(axis=2).repeat(32, axis=1) / 32639
        most = (0.5 * steps) @ np.abs(wanted.T.astype(np.float64))
        exact = x.astype(np.float64) @ wanted.T
        floats = 1e-5 * (np.abs(x) @ np.abs(wanted.T))  # of the sums themselves
        assert (np.abs(together - exact) <= most + floats).all(), type_.name


def test_what_is_no_number_stays_so() -> None:
    packed = drawn(GgmlType.Q4_K)
    x = np.ones((3, COLS), np.float32)
    x[1, 40], x[2, 300] = np.nan, np.inf
    found = np.isfinite(times("native", GgmlType.Q4_K, packed, x))
    assert found[0].all() and not found[1:].any()


@pytest.mark.parametrize("kind", ["gemma3", "qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("machine", machines()[1:])
def test_an_encoder(
    machine: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(encoder: CpuPictureEncoder, stages: list[StageStruct], scratch: int) -> None:
        space = np.empty(scratch, np.float32)
        for stage in stages:
            compiled(machine).stage(ctypes.byref(stage), ctypes.c_void_p(space.ctypes.data))

    monkeypatch.setattr(CpuPictureEncoder, "_run_stages", run)
    tiny.write_mmproj(tmp_path / "mmproj.gguf", kind)
    gguf, projector = read_mmproj(tmp_path / "mmproj.gguf")
    tiles = [
        np.asarray(tile)
        for picture in tiny.pictures(kind)
        for tile in tiles_and_grid(Image.fromarray(picture), projector.way, projector.sizes)[0]
    ]
    assert (
        np.abs(CpuPictureEncoder(gguf, projector.encoder)(tiles) - RECORDED[f"{kind}.rows"]).max()
        < 1e-4
    )


@pytest.mark.parametrize("machine", machines())
def test_a_product_of_more_rows_and_columns_than_a_unit(machine: str) -> None:
    """Nothing is written beside a value, and what is behind its inputs is no part of it."""
    draw = np.random.default_rng(5).normal
    x, w = draw(size=(530, 24)).astype(np.float32), draw(size=(37, 24)).astype(np.float32)
    x[:, 21:] = np.nan
    out, bias = np.ones((530, 48), np.float32), draw(size=37).astype(np.float32)
    space = np.empty((32 + 4) * 21, np.float32)
    stage = StageStruct(
        kind=0, rows=517, cols=21, in_stride=24, out_stride=48, row_bytes=96, type=-1
    )
    setattr(stage, "in", x.ctypes.data)
    stage.out, stage.weights, stage.bias = (a.ctypes.data for a in (out, w, bias))
    stage.width, stage.epilogue = 37, 1
    compiled(machine).stage(ctypes.byref(stage), ctypes.c_void_p(space.ctypes.data))
    wanted = 1 + x[:517, :21] @ w[:, :21].T + bias
    np.testing.assert_allclose(out[:517, :37], wanted, atol=2e-5)
    assert (out[517:] == 1).all() and (out[:, 37:] == 1).all()


@pytest.mark.parametrize("machine", machines())
def test_attention_of_more_keys_than_are_mixed_at_once(machine: str) -> None:
    """A window of 590 rows and one of 10, two heads of 20, which are no whole blocks."""
    heads, n, size = 2, 600, 20
    qkv = np.random.default_rng(5).normal(size=(3, heads, n, size)).astype(np.float32)
    parts = np.full((3 * heads * n + 12, 40), np.nan, np.float32)
    parts[: 3 * heads * n, :size] = qkv.reshape(-1, size)
    windows = [slice(0, 590), slice(590, n)]
    blocks, out = query_blocks_with_keys(windows, 32), np.ones((n, 44), np.float32)
    space = np.empty(32 * (2 * size + n + 12), np.float32)
    stage = StageStruct(
        kind=5, rows=n, cols=size, in_stride=40, out_stride=44, heads=heads, factor=0.3
    )
    setattr(stage, "in", parts.ctypes.data)
    stage.out, stage.blocks, stage.n_blocks = out.ctypes.data, blocks.ctypes.data, len(blocks)
    compiled(machine).stage(ctypes.byref(stage), ctypes.c_void_p(space.ctypes.data))
    for head, window in itertools.product(range(heads), windows):
        q, k, v = qkv[:, head, window].astype(np.float64)
        weights = np.exp(0.3 * q @ k.T)
        wanted = weights @ v / weights.sum(axis=1, keepdims=True)
        found = out[window, head * size : (head + 1) * size]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert (out[:, heads * size :] == 1).all()


def test_another_processor_compiles_it() -> None:
    """An Orin's cores: tbl is assembly there."""
    text = "".join(source.read_text() for source in SOURCES)
    flags = "--target=aarch64-none-unknown-elf -mcpu=cortex-a78 -ffreestanding -nostdlib -O1"
    with tempfile.TemporaryDirectory() as made:
        command = [*clang(), *flags.split(), "-c", "-x", "c", "-", "-o", str(Path(made) / "rows.o")]
        subprocess.run(command, input=text.encode(), check=True)
