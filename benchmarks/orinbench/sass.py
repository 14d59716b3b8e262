"""`orinbench sass`: the fused kernels of a model's shape compiled for a GPU that need not be here.

Registers, spills, shared memory and occupancy from ptxas, the instructions of each main loop from
nvdisasm, and from both a roofline that names what limits the kernel. Needs the patched tinygrad,
NVRTC, ptxas and nvdisasm (PyPI: nvidia-cuda-nvrtc-cu12, nvidia-cuda-nvcc-cu12,
nvidia-cuda-nvdisasm), and no GPU.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from orinbench.errors import BenchError
from orinbench.shapes import SHAPES, Shape, shape_named

# GGML's numbers
_TYPES = {"F16": 1, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
# Jetson AGX Orin 64 GB, MAXN: multiprocessors, Hz, bytes/s of the data sheet and the best published
# of an LLM on it. An SM 8.7 has 65536 registers, 48 warps, 16 blocks, 4 schedulers and 164 KiB of
# shared memory, of which the system takes 1 KiB a block; tinygrad's NV device gives a launch as
# much of them as its blocks use.
_SMS, _HERTZ, _SHEET, _BEST = 16, 1.3e9, 204.8e9, 168e9
_REGISTERS, _WARPS, _BLOCKS, _SHARED = 65536, 48, 16, 164 << 10
# Tokens of a prompt for which a GEMM turns a weight into halves once, and of a whole chunk.
_GEMM_TOKENS, _CHUNK_TOKENS = 64, 512


@dataclass(frozen=True)
class Compiled:
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


def _tool(name: str) -> str:
    """Return the path of a CUDA tool: on PATH, or in a wheel; raises BenchError without it."""
    if found := shutil.which(name) or _in_a_wheel(f"bin/{name}"):
        return found
    wheel = {"ptxas": "nvidia-cuda-nvcc-cu12", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    raise BenchError(f"{name} is neither on PATH nor in a wheel; pip install {wheel}")


def _in_a_wheel(pattern: str) -> str | None:
    """Return the path of the first such file of an installed CUDA wheel, or None."""
    for package in ("nvidia", "triton"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(place).rglob(pattern)):
                return str(path)
    return None


def _nvrtc(arch: str) -> Any:
    """Return tinygrad's compiler of CUDA C to PTX; raises BenchError without the library."""
    if library := _in_a_wheel("lib/libnvrtc.so.12"):
        os.environ.setdefault("NVRTC_PATH", library)  # where tinygrad looks
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

    try:
        return NVRTCCompiler(arch, ptx=True, cache_key="sass")
    except AttributeError as error:  # what tinygrad raises for a library that is missing
        wheel = "pip install nvidia-cuda-nvrtc-cu12, or set NVRTC_PATH to libnvrtc.so"
        raise BenchError(f"NVRTC cannot be loaded ({error}); {wheel}") from None


def kernels(
    nv: Any, shape: Shape, quant: str, device: str = "NV", batch: int = 1
) -> Iterator[tuple[Any, int]]:
    """Yield each kernel of a token and of a prompt's chunk once, with its number of weights.

    With `batch`, those of a token of that many sequences alone.
    """
    typ, dim, none = _TYPES[quant], shape.n_embd, _Bytes(0)
    group = shape.n_heads // shape.n_kv_heads
    h = nv.Heads(shape.head_dim, shape.n_kv_heads, group, 4096, True, False, "u16", batch)
    splits = nv.most_splits(device, h)
    extra = {
        "qkv": {"ahead": (h, none, none)},
        "out": {"parts": nv.Parts(h, splits, none, none, none)},
    }
    table = _weight(nv, quant, shape.vocab_size, dim)
    yield nv.embed(table, none, none, batch)[0], 0
    for role, mode, ws in [*_matrices(nv, shape, quant), ("head", "ARGMAX", [table])]:
        norm, tail = none if mode != "ADD" else None, [none] * 3 if mode == "ARGMAX" else None
        rows, biases = sum(w.rows for w in ws), [None] * len(ws)
        fits = (nv.plan_gemv(device, mode, typ, ws[0].cols, rows, n).depth for n in range(1, 5))
        columns = min(batch, sum(bool(depth) for depth in fits))
        args = (device, role, mode, ws, norm, biases, 1e-5, none, none, tail, batch, (0, columns))
        weights = sum(w.rows * w.cols for w in ws)
        yield nv.gemv(*args, **extra.get(role, {}))[0], weights
    parts = (none, none, none)
    yield nv.attention(h, splits, 1e-5, none, none, none, none, [], *parts, nv.FEW)[0], 0
    if batch > 1:
        return
    yield nv.embed_rows(table, none, none)[0], 0
    yield nv.norm_rows(dim, 1e-5, none, none, none, none)[0], 0
    yield from gemm_kernels(nv, shape, quant)
    yield nv.rope_rows(h, 1e-5, none, none, none, none, [], none)[0], 0
    yield nv.attention_rows(h, none, none, none, none)[0], 0


def gemm_kernels(nv: Any, shape: Shape, quant: str) -> Iterator[tuple[Any, int]]:
    """Yield each product of a prompt's chunk once, with its number of weights."""
    none = _Bytes(0)
    for role, mode, ws in _matrices(nv, shape, quant):
        for kernel, _ in nv.gemm(role, mode, ws, [None] * len(ws), none, none, none, 1.0):
            yield kernel, sum(w.rows * w.cols for w in ws)


def _matrices(nv: Any, shape: Shape, quant: str) -> list[tuple[str, str, list[Any]]]:
    """Return role, mode and weights of each projection of a layer."""
    dim, hidden = shape.n_embd, shape.n_ff
    q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    return [
        ("qkv", "STORE", [_weight(nv, quant, rows, dim) for rows in (q_rows, kv_rows, kv_rows)]),
        ("out", "ADD", [_weight(nv, quant, dim, q_rows)]),
        ("gate_up", "SWIGLU", [_weight(nv, quant, hidden, dim)] * 2),
        ("down", "ADD", [_weight(nv, quant, dim, hidden)]),
    ]


def _weight(nv: Any, quant: str, rows: int, cols: int) -> Any:
    _, width, size, _, _ = nv.TYPES[_TYPES[quant]]
    return nv.Weight(_Bytes(rows * cols // width * size), _TYPES[quant], rows, cols)


@dataclass(frozen=True)
class _Bytes:
    """Stands for a device buffer of this size: compiling needs no more of it."""

    nbytes: int


def main_loop(sass: str) -> list[str]:
    """Return the opcodes of the innermost loop that does the kernel's work.

    That is the smallest one with dot products or tensor-core instructions, else with asynchronous
    copies and float FMAs.
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
            return min(working, key=len)
    return opcodes


def load_bytes(loop: list[str]) -> str:
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


def compile_kernel(kernel: Any, weights: int, arch: str) -> Compiled:
    """Compile with NVRTC and ptxas, disassemble, count; raises BenchError if a tool fails."""
    ptx = _nvrtc(arch).compile(kernel.source)
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        text.write_bytes(ptx.rstrip(b"\0"))
        said = _run(_tool("ptxas"), f"-arch={arch}", "-v", "-o", str(cubin), str(text))
        loop = main_loop(_run(_tool("nvdisasm"), "-c", str(cubin)))
    numbers = {
        key: int(found[1]) if (found := re.search(pattern, said)) else 0
        for key, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("spill", r"(\d+) bytes spill stores"),
            ("shared", r"(\d+) bytes smem"),
        )
    }
    per_lane = 0
    if found := re.search(r"gemv<\w+, \d+, (\d+),", kernel.code):
        per_lane = 32 * int(found[1])
    elif kernel.name.startswith("gemm"):
        per_lane = 32  # a lane's two rows, a quarter of 64 weights of each
    each = len(loop) / per_lane if per_lane else None
    memory = kernel.est.mem / _BEST
    tokens = _CHUNK_TOKENS // _GEMM_TOKENS if kernel.name.startswith("gemm") else 1
    issue = weights * tokens * each / 32 / (_SMS * 4 * _HERTZ) if each else None
    limiter = "latency" if issue is None else "memory" if memory > issue else "instructions"
    blocks = blocks_per_sm(numbers["registers"], numbers["shared"], kernel.block)
    return Compiled(
        name=kernel.name,
        registers=numbers["registers"],
        spill_bytes=numbers["spill"],
        shared_bytes=numbers["shared"],
        blocks_per_sm=blocks,
        occupancy=blocks * (-(-kernel.block // 32)) / _WARPS,
        loop_instructions=len(loop),
        instructions_per_weight=each,
        load_bytes=load_bytes(loop),
        memory_s=memory,
        issue_s=issue,
        limiter=limiter,
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"{Path(command[0]).name}: {last}")
    return done.stdout + done.stderr


def markdown(rows: list[Compiled], title: str) -> str:
    """Return the table."""
    lines = [f"### {title}", ""]
    lines += ["| kernel | registers | spills | shared | blocks an SM | occupancy | loop |"]
    lines[-1] += " per weight | loads (n x"
    lines[-1] += " bytes) | memory us | issue us | limit |"
    lines += ["| --- |" + " ---: |" * 7 + " --- | ---: | ---: | --- |"]
    for r in rows:
        each = f"{r.instructions_per_weight:.1f}" if r.instructions_per_weight else ""
        issue = f"{r.issue_s * 1e6:.0f}" if r.issue_s is not None else ""
        lines.append(
            f"| {r.name} | {r.registers} | {r.spill_bytes} | {r.shared_bytes} | {r.blocks_per_sm} |"
            f" {100 * r.occupancy:.0f} % | {r.loop_instructions} | {each} | {r.load_bytes} |"
            f" {r.memory_s * 1e6:.0f} | {issue} | {r.limiter} |"
        )
    lines += [
        "",
        f"Memory at {_BEST / 1e9:.0f} GB/s (data sheet {_SHEET / 1e9:.1f}), issue on {_SMS} SMs at"
        f" {_HERTZ / 1e9:.1f} GHz; a loop is counted whole, with what only a row's end executes."
        f" Instructions a weight of a gemm are for {_GEMM_TOKENS} tokens, its times for"
        f" {_CHUNK_TOKENS}.",
    ]
    return "\n".join(lines)


@click.command("sass")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="1b", help="shape [1b]")
@click.option("--quant", type=click.Choice(list(_TYPES)), default="Q6_K", help="type [Q6_K]")
@click.option("--arch", default="sm_87", help="GPU [sm_87, every Orin]")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", help="form [md]")
def sass_command(shape: str, quant: str, arch: str, output: str) -> None:
    """Compile the fused kernels for an Orin, and show what limits each."""
    try:
        from tinygrad.llm.kernels import nv
    except ImportError:
        raise BenchError("this tinygrad has no fused kernels: tools/series install VENV") from None
    nv.multiprocessors = lambda device: _SMS
    rows = [compile_kernel(k, n, arch) for k, n in kernels(nv, shape_named(shape), quant)]
    title = f"{shape} {quant} for {arch}"
    click.echo(json.dumps([asdict(r) for r in rows]) if output == "json" else markdown(rows, title))
