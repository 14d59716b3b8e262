"""Kernels out of what tinygrad prints with DEBUG=2, and the classes that they fall into."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# tinygrad/engine/realize.py, track_stats: "*** CUDA  12 name  arg 3 mem 1.02 GB tm 9.63us/ 0.10ms
# (  12 GFLOPS  540|540 GB/s) ['linear', ...]"
_KERNEL = re.compile(
    r"^\*\*\* (?P<device>\S+)\s+\d+ (?P<name>\S.*?)\s+arg\s+\d+ mem\s+[\d.]+ GB"
    r" tm\s+(?P<time>[\d.]+)(?P<unit>us|ms|s)\s*/\s*[\d.]+ms"
    r" \(\s*(?P<flops>[\d.]+) (?P<fu>[GT])FLOPS\s+(?P<mem>[\d.]+)\|[\d.]+\s*(?P<mu>[GT])B/s\)"
    r"\s*(?P<metadata>.*)$"
)
_SECTION = re.compile(r"^=== orinbench (?P<section>.+)$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_GIGA = {"G": 1e9, "T": 1e12}
# The names of the engine's launches: gemv_ROLE_QUANT_ROWSxCOLS; roles and quants have "_". Of a
# joined launch: joined_ROLE_ROLE..., then what the first one's name ends with.
_MATRIX = re.compile(
    r"^gem[vm]_(?P<role>qkv|out|gate_up|down|head)_(?P<quant>.+)_(?P<rows>\d+)x(?P<cols>\d+)$"
)
_JOINED = re.compile(
    r"^joined_(?P<roles>(?:(?:qkv|attention|out|gate_up|down)_)+)(?P<quant>.+?_)?[0-9]+x"
)


@dataclass(frozen=True)
class KernelTime:
    """One launch: seconds on the device, bytes it must move by tinygrad's estimate (0: unknown)."""

    section: str
    name: str
    kind: str
    seconds: float
    n_bytes: float


def kernel_class(name: str, metadata: str = "") -> str:
    """Return the class of a kernel: GEMV or GEMM by role and type, attention, norm, copy, other.

    The fused kernels carry it in their names, the general path's in the tensor functions that
    tinygrad lists behind the time; without them it is reduction (r_) or elementwise (E_).
    """
    if found := _MATRIX.match(name):
        kind = "GEMV" if name.startswith("gemv") else "GEMM"
        return f"{kind} {found['role']} {found['quant'].upper()}"
    if found := _JOINED.match(name):
        roles, quant = found["roles"].rstrip("_"), (found["quant"] or "").rstrip("_")
        return f"joined {roles} {quant.upper()}".rstrip()
    for prefix, kind in (
        ("attention", "attention"),
        ("rope", "attention"),
        ("norm", "norm"),
        ("embed", "embedding"),
        ("copy", "copy"),
        ("batched", "graph"),
    ):
        if name.startswith(prefix):
            return kind
    for function, kind in (
        ("scaled_dot_product_attention", "attention"),
        ("softmax", "attention"),
        ("linear", "matmul"),
        ("__matmul__", "matmul"),
        ("dot", "matmul"),
        ("embedding", "embedding"),
        ("rsqrt", "norm"),
        ("argmax", "sampling"),
    ):
        if f"'{function}'" in metadata or f"{function} " in metadata:
            return kind
    return {"r": "reduction", "E": "elementwise"}.get(name.split("_")[0], "other")


def parse_log(lines: Iterable[str]) -> list[KernelTime]:
    """Return the kernels of a log in order; lines of anything else are passed over.

    `=== orinbench NAME` lines (worker.py) begin the section NAME.
    """
    kernels: list[KernelTime] = []
    section = ""
    for raw in lines:
        line = _ANSI.sub("", raw).rstrip()
        if found := _SECTION.match(line):
            section = found["section"]
        elif found := _KERNEL.match(line):
            seconds = float(found["time"]) * _SECONDS[found["unit"]]
            rate = float(found["mem"]) * _GIGA[found["mu"]]
            name = found["name"]
            kind = kernel_class(name, found["metadata"])
            kernels.append(KernelTime(section, name, kind, seconds, rate * seconds))
    return kernels
