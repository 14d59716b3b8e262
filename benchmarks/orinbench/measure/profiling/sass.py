"""`orinbench profile --arch`: a model's fused kernels compiled for a GPU that need not be here.

Registers, spills, shared memory and occupancy from ptxas, the instructions of each main loop from
nvdisasm, and from both a roofline that names what limits the kernel. Needs the patched tinygrad,
NVRTC, ptxas and nvdisasm (PyPI: nvidia-cuda-nvrtc-cu12, nvidia-cuda-nvcc-cu12,
nvidia-cuda-nvdisasm), and no GPU.
"""

import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orinbench.child import run_command
from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.show.markdown import markdown_table
from orinbench.synth import write_model_of_zeros
from orinllm.gpu.host_compiler import find_cuda_wheel_file

if TYPE_CHECKING:
    from orinllm.gpu.launch import Launch

# Tokens of the context for which kernels are made.
_CONTEXT = 4096
# Jetson AGX Orin 64 GB, MAXN: multiprocessors, Hz, bytes/s of the data sheet and the best published
# of an LLM on it. An SM 8.7 has 65536 registers, 48 warps, 16 blocks, 4 schedulers and 164 KiB of
# shared memory, of which the system takes 1 KiB a block; tinygrad's NV device gives a launch as
# much of them as its blocks use.
_SMS, _HERTZ, _SHEET, _BEST = 16, 1.3e9, 204.8e9, 168e9
_REGISTERS, _WARPS, _BLOCKS, _SHARED = 65536, 48, 16, 164 << 10
# Tokens of a whole chunk of a prompt.
_CHUNK_TOKENS = 512
# Half-precision operations a second of the tensor cores, dense: a quarter of the data sheet's 170
# sparse int8 TOPS.
_TENSOR = 42.5e12


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's resources and main loop; times are of one launch on the Orin, in seconds."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    occupancy: float
    loop_instructions: int
    instructions_per_weight: float | None
    load_bytes: str
    memory_s: float
    issue_s: float | None
    limiter: str
    tensor_s: float | None = None  # of a prompt's products on tensor cores


def _find_cuda_tool(name: str) -> str:
    if found := shutil.which(name) or find_cuda_wheel_file(f"bin/{name}"):
        return str(found)
    wheel = {"ptxas": "nvidia-cuda-nvcc-cu12", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    raise BenchError(f"{name} is neither on PATH nor in a wheel; pip install {wheel}")


def synthetic_model_launches(
    shape: str, quant: str, arch: str, sequences: int = 1
) -> list["Launch"]:
    """Return each different launch of a token, and of a prompt's chunk, of a synthetic model.

    The model is an outline: a file with its header alone, on a disk that keeps no zeros.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outline.gguf"
        write_model_of_zeros(path, shape, quant)
        return model_launches(path, arch, sequences)


def model_launches(path: Path, arch: str, sequences: int = 1) -> list["Launch"]:
    """Return each different launch of a token, and of a prompt's chunk, of a GGUF file."""
    from orinllm.gpu.compile_ahead import checked_target_gpu, launches_to_compile
    from orinllm.loader import Network

    network = Network.read(path, min(_CONTEXT, open_model(path).context_length))
    found = launches_to_compile(network, checked_target_gpu(arch, None), sequences)
    return list({launch.name: launch for launch in found}.values())


def main_loop_opcodes(sass: str) -> list[str]:
    """Return the opcodes of the innermost loop that does the kernel's work.

    That is the smallest one with dot products, with the most tensor-core instructions (copies of
    the loop for prompts that fill no tile have fewer), else with asynchronous copies and FMAs.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(opcodes)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)(.*);", line):
            if found[1].startswith("BRA") and (to := re.search(r"`\((\.L_x_\d+)\)", found[2])):
                branches.append((len(opcodes), to[1]))
            opcodes.append(found[1])
    loops = [opcodes[labels[to] : at + 1] for at, to in branches if labels.get(to, at + 1) <= at]

    def heads(loop: list[str]) -> set[str]:
        return {op.split(".")[0] for op in loop}

    for wanted in ({"IDP"}, {"HMMA"}, {"LDGSTS", "FFMA"}, {"FFMA"}):
        if working := [loop for loop in loops if wanted <= heads(loop)]:
            return min(working, key=lambda loop: (-sum("HMMA" in op for op in loop), len(loop)))
    return opcodes


def load_sizes_text(loop: list[str]) -> str:
    """Return how many loads from memory of how many bytes a loop has, as "4x16, 12x4"."""
    sizes = Counter(
        16 if ".128" in op else 8 if ".64" in op else 2 if "16" in op else 1 if "8" in op else 4
        for op in loop
        if op.split(".")[0] in ("LD", "LDG", "LDGSTS")  # LD: by an address that may be of any kind
    )
    return ", ".join(f"{n}x{size}" for size, n in sorted(sizes.items(), reverse=True))


def blocks_per_sm(registers: int, shared: int, threads: int) -> int:
    """Return how many blocks of a launch by tinygrad's NV device a multiprocessor holds at once."""
    warps = -(-threads // 32)
    per_block = -(-registers * 32 // 256) * 256 * (-(-warps // 4) * 4)  # warps come in fours
    usage = -(-(shared + 1024) // 128) * 128
    return min(_REGISTERS // per_block, _SHARED // usage, _WARPS // warps, _BLOCKS)


def compile_launch(launch: "Launch", arch: str) -> CompiledKernel:
    """Compile with NVRTC and ptxas, disassemble, count; raises BenchError if a tool fails."""
    from orinllm.gpu.device import nvrtc_compiler

    ptx = nvrtc_compiler(arch, ptx=True).compile(launch.cuda_source)
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        text.write_bytes(ptx.rstrip(b"\0"))
        said = _run_tool(
            _find_cuda_tool("ptxas"), f"-arch={arch}", "-v", "-o", str(cubin), str(text)
        )
        loop = main_loop_opcodes(_run_tool(_find_cuda_tool("nvdisasm"), "-c", str(cubin)))
    registers = _ptxas_number(r"Used (\d+) registers", said)
    shared = _ptxas_number(r"(\d+) bytes smem", said)
    tile = next((c for c in launch.constants if "row_tiles" in c), None)
    rows = next((int(c["rows_per_item"]) for c in launch.constants if "rows_per_item" in c), 0)
    per_lane, passes, tensor = 32 * rows, 1, None
    weights = launch.operations // 2
    if tile is not None:  # a lane has two rows of each row tile, 16 weights of each
        per_lane = 32 * int(tile["row_tiles"])
        passes = _CHUNK_TOKENS // (8 * int(tile["token_groups"]))
        weights //= _CHUNK_TOKENS
        tensor = launch.operations / _TENSOR
    each = len(loop) / per_lane if per_lane else None
    memory = launch.n_bytes / _BEST
    issue = weights * passes * each / 32 / (_SMS * 4 * _HERTZ) if each else None
    times = {"memory": memory, "instructions": issue or 0.0, "tensor cores": tensor or 0.0}
    limiter = "latency" if issue is None else max(times, key=lambda name: times[name])
    blocks = blocks_per_sm(registers, shared, launch.block)
    return CompiledKernel(
        name=launch.name,
        registers=registers,
        spill_bytes=_ptxas_number(r"(\d+) bytes spill stores", said),
        shared_bytes=shared,
        blocks_per_sm=blocks,
        occupancy=blocks * (-(-launch.block // 32)) / _WARPS,
        loop_instructions=len(loop),
        instructions_per_weight=each,
        load_bytes=load_sizes_text(loop),
        memory_s=memory,
        issue_s=issue,
        limiter=limiter,
        tensor_s=tensor,
    )


def _run_tool(*command: str) -> str:
    done = run_command(command)
    if done.status:
        raise BenchError(f"{Path(command[0]).name}: {done.last_error_line}")
    return done.out + done.err


def _ptxas_number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    return int(found[1]) if found else 0


_TITLES = (
    "kernel, registers, spills, shared, blocks an SM, occupancy, loop, per weight, "
    "loads (n x bytes), memory us, issue us, tensor us, limit"
).split(", ")
_WORDS = ("kernel", "loads (n x bytes)", "limit")


def _table_cells(r: CompiledKernel) -> list[str]:
    counts = (r.registers, r.spill_bytes, r.shared_bytes, r.blocks_per_sm)
    times = ("" if s is None else f"{s * 1e6:.0f}" for s in (r.memory_s, r.issue_s, r.tensor_s))
    each = f"{r.instructions_per_weight:.1f}" if r.instructions_per_weight else ""
    share, loop = f"{100 * r.occupancy:.0f} %", str(r.loop_instructions)
    return [r.name, *map(str, counts), share, loop, each, r.load_bytes, *times, r.limiter]


def kernel_markdown(rows: list[CompiledKernel], title: str) -> str:
    """Return the table."""
    table = markdown_table(_TITLES, [_table_cells(row) for row in rows], {*_TITLES} - {*_WORDS})
    return (
        f"### {title}\n\n{table}\n\n"
        f"Memory at {_BEST / 1e9:.0f} GB/s (data sheet {_SHEET / 1e9:.1f}), issue on {_SMS} SMs at"
        f" {_HERTZ / 1e9:.1f} GHz; a loop is counted whole, with what only a row's end executes."
        f" Of a gemm: instructions a weight of one tile of tokens, times of {_CHUNK_TOKENS}."
    )
