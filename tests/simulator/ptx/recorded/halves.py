"""A kernel for each function that cuda_fp16.h and cuda_bf16.h declare, read from the headers.

Inputs and results are 64-bit words, whose low bytes hold the function's types.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADERS = {"FP16": "cuda_fp16.h", "BF16": "cuda_bf16.h"}
LANES = 384
CORNERS = [
    0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF,
    0x3800, 0x3E00, 0x4100, 0xC100, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x4049, 0xC2FE, 0x5BFF,
]  # fmt: skip
"""Halves and bfloat16s: zeros, ones, infinities, NaNs, subnormals, the largest, ties."""
_LINE = r"__CUDA_(?:HOSTDEVICE_)?{}_DECL__\s+([^;{{}}]*?)\b(\w+)\(([^;{{}}]*)\)\s*;"
_REMOVED = ("__shfl", "__shfl_up", "__shfl_down", "__shfl_xor")
"""Without a mask: CUDA has none of them from sm_70 on."""
_DEPRECATED = r"|__CUDA_\w+_DEPRECATED__\(\w+\(\w+\)\)"
_NOISE = re.compile(r"__NV_TL(?:_BUILTIN)?__|\bconst\b")


@dataclass(frozen=True)
class Function:
    """A declaration: the kernel's name, result, name, (type, name) of parameters."""

    kernel: str
    result: str
    name: str
    params: tuple[tuple[str, str], ...]

    @property
    def signature(self) -> str:
        """Name and types: what tells overloads apart."""
        return f"{self.name}({', '.join(kind for kind, _ in self.params)})"

    @property
    def words(self) -> int:
        """Words of its output: an atomic's are memory and what it returned."""
        return LANES * (2 if self.name == "atomicAdd" else 1)


def functions(header: str, text: str) -> list[Function]:
    """The functions that a header's text declares for devices of sm_87."""
    noise = r"/\*.*?\*/|//[^\n]*|^\s*#(?:[^\n\\]|\\\n|\\.)*" + _DEPRECATED
    text = re.sub(noise, "", text, flags=re.S | re.M)
    out: list[Function] = []
    for result, name, params in re.findall(_LINE.format(header), text):
        if name in _REMOVED:
            continue
        given = []
        for param in filter(None, (p.split("=")[0].strip() for p in params.split(","))):
            kind, _, called = " ".join(_NOISE.sub(" ", param).split()).rpartition(" ")
            stars = "*" * called.count("*")
            given.append((kind.replace(" *", "*") + stars, called.lstrip("*")))
        result = " ".join(_NOISE.sub(" ", result).split())
        out.append(Function(f"{header.lower()}_{len(out)}", result, name, tuple(given)))
    return out


def _value(kind: str, called: str, at: int) -> tuple[str, str]:
    """Statements that read parameter `at`, and the argument."""
    word = f"{'abc'[min(at, 2)]}[i]"
    if called == "mask":
        return "", "0xffffffffu"
    if called == "width":
        return "", "32"
    if called in ("srcLane", "delta", "laneMask"):
        return "", f"({kind})(i * 7 % 32)" if called == "srcLane" else f"({kind})5"
    if kind.endswith("*"):
        base = kind[:-1].strip()
        place = (
            "(out + i)" if called == "address" or (at == 0 and "ptr" not in called) else "(a + i)"
        )
        return "", f"({base}*){place}"
    return f"const {kind} x{at} = *({kind}*)&{word};", f"x{at}"


def kernel(f: Function) -> str:
    """CUDA C of one function's kernel."""
    reads, given = [], []
    for at, (kind, called) in enumerate(f.params):
        read, argument = _value(kind, called, at)
        if f.result == "void" and kind.endswith("*"):
            argument = f"({kind})(out + i)"
        reads.append(read)
        given.append(argument)
    call = f"{f.name}({', '.join(given)})"
    tail = f"{call};"
    if f.result != "void":
        goal = "out + i" if f.name != "atomicAdd" else f"out + {LANES} + i"
        # No memcpy: ptxas 13.0 stores a half's bytes as if it were to be converted to .u8.
        tail = f"*({f.result}*)({goal}) = {call};"
    return (
        f'extern "C" __global__ void {f.kernel}(unsigned long long* out, unsigned long long* a, '
        "unsigned long long* b, unsigned long long* c) {\n"
        f"  const int i = threadIdx.x;\n  {' '.join(reads)}\n  {tail}\n}}\n"
    )


def source(include: Path) -> tuple[str, list[Function]]:
    """A CUDA program's text with all kernels, and what they are of."""
    found = [f for h, name in HEADERS.items() for f in functions(h, (include / name).read_text())]
    head = "".join(f"#include <{name}>\n" for name in HEADERS.values())
    return head + "".join(map(kernel, found)), found


def inputs(f: Function) -> tuple[NDArray[np.uint64], ...]:
    """Three arrays: corner values in every part first, then random bits; the same for ever."""
    out = []
    for n in range(3):
        seed = hashlib.shake_128(f"{f.name}/{n}".encode()).digest(8 * LANES)
        words = np.frombuffer(seed, "<u8").copy()
        corner = np.array(CORNERS, np.uint64)
        lanes = np.arange(len(corner) ** 2 // 2)
        low = corner[(lanes if n == 0 else lanes // len(corner) + 3 * n) % len(corner)]
        high = corner[(lanes + 5 * n + 1) % len(corner)]
        pair = low | high << np.uint64(16)
        words[: len(lanes)] = pair | pair << np.uint64(32)
        kinds = {k for k, _ in f.params}
        if "float" in kinds or "float2" in kinds:  # numbers that a half can hold
            some = words[-LANES // 4 :].view("<u4")
            some[:] = some & np.uint32(0x87FFFFFF) | np.uint32(0x38000000)
        if "double" in kinds:
            far = words[-LANES // 4 :]
            far[:] = far & np.uint64(0x80FFFFFFFFFFFFFF) | np.uint64(0x3F00000000000000)
        out.append(words)
    return tuple(out)


def load(path: Path) -> list[Function]:
    """Functions that `python halves.py` has left beside a program."""
    return [
        Function(f["kernel"], f["result"], f["name"], tuple((k, n) for k, n in f["params"]))
        for f in json.loads(path.read_text())
    ]


def main(include: str, goal: str) -> None:
    """Write GOAL.cu, for nvcc -ptx -arch=compute_87, and GOAL.json of the headers in a folder."""
    text, found = source(Path(include))
    Path(f"{goal}.cu").write_text(text)
    Path(f"{goal}.json").write_text(json.dumps([asdict(f) for f in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
