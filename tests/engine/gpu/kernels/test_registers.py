"""Every kernel of 1B and 8B by NVRTC and ptxas: no spills, no more registers than there are.

The same text gives the same registers with the same compilers, so what they made is recorded
beside this file, by digest; kernels that the record does not know are compiled.
UPDATE_REGISTERS=1 compiles all and writes the record anew.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.engine.sources import flat
from tests.patches.conftest import wheel_file
from tinygrad import dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

from orinbench.measure.profiling import sass
from orinllm.file.ggml import GgmlType, kernel_ggml_types
from orinllm.gpu.compile_ahead import checked_target_gpu
from orinllm.gpu.device import register_null_as_target
from orinllm.gpu.kernels.buffers import PackedMatrix
from orinllm.gpu.kernels.gemm import RowProduct, chunk_product_launches
from orinllm.gpu.kernels.picture_encoder import (
    PaddedColumns,
    PaddedHeads,
    encoder_norm_launch,
    interpolate_rows_launch,
    pool_rows_launch,
    range_attention_launch,
    split_heads_launch,
)
from orinllm.gpu.kernels.recurrent import (
    GateVectors,
    StatePlaces,
    StridedRows,
    convolution_launch,
    copy_states_launch,
    delta_net_launch,
    mamba2_launches,
)
from orinllm.gpu.launch import Launch, source_with_includes
from orinllm.network.layer import Convolve, GatedDeltaNet, SelectiveScan

# On an Orin one type of each way of unpacking, on the GPU of the benchmarks the commonest.
CASES = [
    *(
        (quant, "sm_87")
        for quant in ("Q6_K", "Q4_K", "Q5_K", "Q8_0", "F16", "Q4_0", "IQ4_XS", "MXFP4")
    ),
    ("Q6_K", "sm_90"),
]
RECORD = Path(__file__).with_name("registers.json")
ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def launches(quant: str, arch: str) -> list[Launch]:
    """Different kernels of one token and a prompt; of Q6_K all files, on an Orin at all sizes."""
    cases = [("8b", 1)]
    if quant == "Q6_K":
        cases += [("1b", 1), ("1b", 4), ("1b", 32)]
    if (quant, arch) == ("Q6_K", "sm_87"):
        cases += [("8b", 4), ("1b", 8), ("1b", 16)]
    found = {
        kind_of(launch): launch
        for shape, sequences in cases
        for launch in sass.synthetic_model_launches(shape, quant, arch, sequences)
        if quant == "Q6_K"
        or launch.file in ("joined.cu", "gemv.cu", "gemm.cu", "batch.cu", "embed.cu")
    }
    return list(found.values())


def kind_of(launch: Launch) -> object:
    """Return what products of prompts have in common that differ in sizes alone.

    These bound a loop, and take most of the compilers' time.
    """
    if launch.file != "gemm.cu":
        return launch.cuda_source
    (constants,) = launch.constants
    alike = constants | {"cols": 0, "out_stride": 0}
    return tuple(alike.items()), launch.per_sm


def allowed(kernel: Launch) -> int:
    """Registers of a thread: a prompt's tiles fill a multiprocessor by themselves.

    Of others two blocks of 256 threads must fit (BOUNDS_126 in cuda/gpu.cuh).
    """
    if kernel.file in ("gemm.cu", "attention_prompt.cu", "moe_prompt.cu", "attention_all.cu"):
        return min(255, (64 << 10) // (kernel.block * kernel.per_sm) // 8 * 8)
    return 126


@functools.cache
def compilers() -> str:
    """The versions of NVRTC and ptxas."""
    return " ".join(version(f"nvidia-cuda-{name}-cu12") for name in ("nvrtc", "nvcc"))


def digest(kernel: Launch, arch: str) -> str:
    """A name for what registers depend on: a kernel's whole text, compilers, architecture."""
    return hashlib.sha256(f"{compilers()} {arch} {kernel.cuda_source}".encode()).hexdigest()[:24]


def used(kernels: list[Launch], arch: str, folder: Path) -> dict[str, tuple[int, int]]:
    """Registers and spilled bytes of each kernel, by its name and place in the list."""
    record: dict[str, list[int]] = json.loads(RECORD.read_text())
    update = bool(os.environ.get("UPDATE_REGISTERS"))
    keys = [digest(kernel, arch) for kernel in kernels]
    new = [k for k, key in zip(kernels, keys, strict=True) if update or key not in record]
    if new:
        made = zip(
            [digest(k, arch) for k in new], compiled(new, arch, folder).values(), strict=True
        )
        record |= {key: list(use) for key, use in made}
    if update:
        lines = ",\n".join(f'"{key}": {use}' for key, use in sorted(record.items()))
        RECORD.write_text(f"{{\n{lines}\n}}\n")
    return {
        f"{kernel.name} {i}": (record[key][0], record[key][1])
        for i, (kernel, key) in enumerate(zip(kernels, keys, strict=True))
    }


def compiled(kernels: list[Launch], arch: str, folder: Path) -> dict[str, tuple[int, int]]:
    """The same, asked of the compilers; one compilation reads the shared code once."""
    parts = [flat(*dict.fromkeys(kernel.file for kernel in kernels))]
    names = {}
    for i, kernel in enumerate(kernels):
        own = kernel.cuda_source.removeprefix(source_with_includes(kernel.file))
        names[f"k{i}"] = f"{kernel.name} {i}"
        parts.append(f"namespace n{i} {{\n{own.replace(f' {kernel.name}(', f' k{i}(')}}}")
    ptx = NVRTCCompiler(arch, ptx=True, cache_key="none").compile("\n".join(parts))
    (folder / "kernels.ptx").write_bytes(ptx.rstrip(b"\0"))
    done = subprocess.run(
        [
            *(wheel_file("cuda_nvcc/bin/ptxas"), f"-arch={arch}", "-v"),
            *("-o", folder / "kernels.cubin", folder / "kernels.ptx"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found = {names[k]: (int(r), int(a) + int(b)) for k, a, b, r in ENTRY.findall(done.stderr)}
    assert len(found) == len(kernels)
    return {name: found[name] for name in names.values()}


@pytest.mark.parametrize(("quant", "arch"), CASES)
def test_registers_and_spills(quant: str, arch: str, tmp_path: Path) -> None:
    kernels = launches(quant, arch)
    found = used(kernels, arch, tmp_path)
    most = {f"{kernel.name} {i}": allowed(kernel) for i, kernel in enumerate(kernels)}
    assert {name: use for name, use in found.items() if use[0] > most[name] or use[1]} == {}


def test_what_a_product_is_added_to_is_read_before_it() -> None:
    """Memory is waited for once, and not for the one behind the other."""
    kernels = sass.synthetic_model_launches("1b", "Q6_K", "sm_87")
    (kernel,) = (kernel for kernel in kernels if kernel.name.startswith("joined_"))
    assert kernel.name.startswith("joined_qkv_attention_out_gate_up_down_")
    ptx = NVRTCCompiler("sm_87", ptx=True, cache_key="none").compile(kernel.cuda_source).decode()
    for role, part in (("out", 2), ("down", 4)):
        # Behind the wait for the part before; a wait loads once, and again in its loop.
        own = ptx.split("ld.acquire")[2 * part]
        products = own[own.index("dp4a") :]
        assert "ld.global.f32" not in products[: products.index("st.global.f32")], role
        assert "ld.global.f32" in own[: -len(products)], role


def recurrent_launches(tokens: int) -> list[Launch]:
    """Qwen3.5 9B's delta net, Nemotron Nano 9B v2's Mamba-2, LFM2 1.2B's convolution.

    Of one token of each of two sequences, or of a chunk.
    """
    device = register_null_as_target(checked_target_gpu("sm_87", None))

    def some(size: int, dtype: DType = dtypes.float32) -> Buffer:
        return Buffer(device, size, dtype).allocate()

    chunk = tokens > 1
    count = some(2 + tokens, dtypes.int32) if chunk else 2
    places = StatePlaces(
        some(1 << 20), 1 << 20, some(2, dtypes.int32), some(4, dtypes.int32), count
    )
    net = GatedDeltaNet("o", "c", "p", 8192, "g", 32, 16, 128)
    mamba = SelectiveScan("o", "c", "p", 128, 80, 8, 128)
    short = Convolve("o", "p", "w", 2048, 3, gated=True)
    first = Convolve("o", "p", "w", 8192, 4)
    out, rows = some(1 << 20, dtypes.uint16 if chunk else dtypes.float32), some(1 << 20)
    gates = GateVectors(rows, rows, rows, 1e-6, rows)
    projected = StridedRows(rows, mamba.input_width + mamba.output_width + mamba.heads)
    return [
        delta_net_launch(
            net,
            places,
            out,
            (StridedRows(rows, 8192), StridedRows(rows, 12288), StridedRows(rows, 64)),
            gates,
        ),
        *mamba2_launches(
            mamba,
            places,
            (some(1 << 20), out),
            (StridedRows(rows, mamba.input_width), projected),
            gates,
        ),
        convolution_launch(short, places, out, StridedRows(rows, 3 * 2048), rows, None),
        convolution_launch(first, places, some(1 << 20), StridedRows(rows, 12288), rows, rows),
        copy_states_launch(rows, 1 << 20, some(2, dtypes.int32)),
    ]


@pytest.mark.parametrize("tokens", [1, 512])
def test_layers_with_states_spill_nothing(tokens: int, tmp_path: Path) -> None:
    """A head's state stays in registers, of which two blocks of 256 threads find enough."""
    kernels = recurrent_launches(tokens)
    found = used(kernels, "sm_87", tmp_path)
    assert found == compiled(kernels, "sm_87", tmp_path)  # the record says what compilers say
    assert {name: use for name, use in found.items() if use[0] > 126 or use[1]} == {}


def encoder_launches() -> list[Launch]:
    """Those of an encoder of pictures that a language model has none of.

    Heads are Qwen3-VL's, SigLIP's and Qwen2.5-VL's; tiles of products those of a large picture, a
    small one and a tiny one.
    """
    device = register_null_as_target(checked_target_gpu("sm_87", None))

    def some(size: int, dtype: DType = dtypes.float32) -> Buffer:
        return Buffer(device, size, dtype).allocate()

    x, halves, columns = some(1 << 20), some(1 << 20, dtypes.uint16), PaddedColumns(1152, 1152)
    found = [
        interpolate_rows_launch(x, x, (some(4, dtypes.int32), x), (64, 1152)),
        pool_rows_launch(x, halves, (16, 1152), 16),
        encoder_norm_launch(halves, x, (x, x), 1e-6, (64, columns)),
        encoder_norm_launch(halves, x, (x, None), 1e-6, (64, columns)),
    ]
    for head, turned in ((64, True), (72, False), (80, True)):
        heads = PaddedHeads(16, head, 16 * head, 3 * 16 * head, 16 * head)
        three = halves, halves, halves
        found.append(split_heads_launch(three, x, x if turned else None, heads, 64))
        found.append(range_attention_launch(halves, three, some(4, dtypes.int32), heads, 1))
    f16 = kernel_ggml_types()[int(GgmlType.F16)]
    for activation, rows, patches in (
        ("EXACT_GELU", 4096, 4096),
        ("EXACT_GELU", 1280, 256),
        ("EXACT_GELU", 1280, 64),
        ("QUICK_GELU", 4096, 4096),
        ("GELU", 4096, 4096),
    ):
        weight, count = PackedMatrix(x, f16, rows, 1280), some(2 + patches, dtypes.int32)
        found += chunk_product_launches(
            RowProduct(
                *("up", "ACTIVATED", (weight,), halves, halves, count),
                biases=(x,),
                activation=activation,
            )
        )
    return found


def test_encoders_of_pictures_spill_nothing(tmp_path: Path) -> None:
    kernels = encoder_launches()
    tiles = {kind_of(kernel) for kernel in kernels if kernel.file == "gemm.cu"}
    assert len(tiles) == 5
    found = used(kernels, "sm_87", tmp_path)
    most = {f"{kernel.name} {i}": allowed(kernel) for i, kernel in enumerate(kernels)}
    assert {name: use for name, use in found.items() if use[0] > most[name] or use[1]} == {}
