"""`orinbench profile --arch`: main loops out of disassembly, occupancy, limits, missing tools."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.benchmarks.orinbench_command import Patch

from orinbench.errors import BenchError
from orinbench.measure.profiling import sass
from orinbench.measure.profiling.command import profile_command

# A copy loop, then a loop of dot products inside a longer one, as nvdisasm -c writes them.
SASS = """\
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   LDG.E R9, [R4.64] ;
.L_x_2:
        /*0040*/              @!P1 LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0050*/                   LDS R5, [R6] ;
        /*0060*/                   IDP.4A.S8.S8 R7, R5, R8, RZ ;
        /*0070*/               @P0 BRA `(.L_x_2) ;
        /*0080*/              @!P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
"""
PTXAS = "0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
PTXAS += "ptxas info    : Used 72 registers, used 1 barriers, 30496 bytes smem\n"


def test_the_main_loop_is_the_innermost_that_works() -> None:
    opcodes = [op.split(".")[0] for op in sass.main_loop_opcodes(SASS)]
    assert opcodes == ["LDGSTS", "LDS", "IDP", "BRA"]
    assert sass.main_loop_opcodes("        /*0000*/                   EXIT ;") == ["EXIT"]
    plain = SASS.replace("IDP.4A.S8.S8", "FFMA")
    assert "FFMA" in sass.main_loop_opcodes(plain)


def test_loads_by_their_bytes() -> None:
    loop = "LDG.E.U16 LDGSTS.E.BYPASS.128 LDGDEPBAR LD.E LDG.E LDS.128 LDG.E.U8 LDG.E.64".split()
    assert sass.load_sizes_text(loop) == "1x16, 1x8, 2x4, 1x2, 1x1"


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "blocks"),
    [
        (32, 1 << 10, 256, 6),  # 48 warps
        (72, 30496, 256, 3),  # registers; 93 KiB of 164 with the system's
        (128, 10 << 10, 128, 4),  # registers
        (255, 1 << 10, 256, 1),  # 65536 registers
        (32, 40 << 10, 128, 4),  # 164 KiB
        (16, 0, 32, 16),  # a multiprocessor's blocks
        (40, 0, 160, 6),  # five warps take the registers of eight
    ],
)
def test_blocks_of_a_multiprocessor(registers: int, shared: int, threads: int, blocks: int) -> None:
    assert sass.blocks_per_sm(registers, shared, threads) == blocks


class Compiler:
    """Stands for NVRTC: the tools behind it are replaced too."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def compile(self, source: str) -> bytes:
        return source.encode()


def test_limits_come_from_bytes_and_instructions(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tinygrad.runtime.support.compiler_cuda.NVRTCCompiler", Compiler)
    monkeypatch.setattr(sass, "_find_cuda_tool", lambda name: name)
    monkeypatch.setattr(sass, "_run_tool", lambda tool, *_: PTXAS if tool == "ptxas" else SASS)
    launch: Any = SimpleNamespace(
        name="gemv_x",
        cuda_source="",
        block=256,
        n_bytes=1e6,
        operations=2_000_000,
        constants=({"rows_per_item": 2},),
    )
    made = sass.compile_launch(launch, "sm_87")
    assert (made.registers, made.spill_bytes, made.shared_bytes) == (72, 4, 30496)
    assert made.instructions_per_weight == 4 / 64
    assert made.load_bytes == "1x16"
    assert made.limiter == "memory"
    assert made.issue_s == pytest.approx(1e6 * 4 / 64 / 32 / (16 * 4 * 1.3e9))
    launch.operations = 2 * 10**12
    assert sass.compile_launch(launch, "sm_87").limiter == "instructions"
    launch.name, launch.constants = "attention_x", ()
    assert sass.compile_launch(launch, "sm_87").limiter == "latency"
    row = "| gemv_x | 72 | 4 | 30496 | 3 | 50 % | 4 | 0.1 | 1x16 | 6 | 0 | | memory |"
    lines = [" ".join(line.split()) for line in sass.kernel_markdown([made], "title").splitlines()]
    assert row in lines


def test_a_tile_that_is_not_full_is_not_counted() -> None:
    few = SASS.replace("IDP.4A.S8.S8 R7", "HMMA.16816.F32 R7")
    full = few.replace(".L_x_", ".L_x_1").replace("LDS R5", "HMMA.16816.F32 R5")
    for text in (few + full, full + few):
        heads = [op.split(".")[0] for op in sass.main_loop_opcodes(text)]
        assert heads == ["LDGSTS", "HMMA", "HMMA", "BRA"]


def test_without_tools_it_says_which(monkeypatch: Patch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="pip install nvidia-cuda-nvdisasm"):
        sass._find_cuda_tool("nvdisasm")
    with pytest.raises(BenchError, match="false: it wrote nothing"):
        sass._run_tool("false")


def test_every_launch_of_a_shape_once(monkeypatch: Patch, tiny_path: Path) -> None:
    """Names and numbers of weights of a model that has a header and nothing else."""

    def compiled(launch: Any, arch: str) -> sass.CompiledKernel:
        weights = launch.operations / (2 * 512 if launch.name.startswith("gemm") else 2)
        return sass.CompiledKernel(launch.name, 1, 0, 1, 1, 1.0, 1, weights, "", 0.0, None, arch)

    monkeypatch.setattr(sass, "compile_launch", compiled)
    words = ["--arch", "sm_87", "--shape", "1b"]
    done = CliRunner().invoke(profile_command, [*words, "-o", "json"])
    assert done.exception is None
    rows = {row["name"]: row["instructions_per_weight"] for row in json.loads(done.output)}
    layer = "joined_qkv_attention_out_gate_up_down_q6_k_3072x2048"
    assert rows[layer] == (3072 + 2048 + 2 * 8192 + 8192) * 2048
    assert rows["gemm_qkv_q6_k_3072x2048"] == 3072 * 2048
    assert rows["gemv_head_q6_k_128256x2048"] == 128256 * 2048
    assert len(rows) == 14  # of a greedy token, of a drawn one, of a prompt and its last token
    assert "### 1b Q6_K for sm_87" in CliRunner().invoke(profile_command, words).output
    file = CliRunner().invoke(profile_command, ["--arch", "sm_87", "-m", str(tiny_path)])
    assert f"### {tiny_path} for sm_87" in file.output and "gemv_head_q6_k" in file.output
    both = CliRunner().invoke(profile_command, [*words, "--backend", "tinygrad:CUDA"])
    assert "nothing is measured" in str(both.exception)
