"""Run the oracle's kernels on an NVIDIA GPU and write oracle.npz or grammar.npz.

    python tests/simulator/ptx/recorded/record_oracle.py [--out FILE]
        [--kernels | --grammar | --halves PTX]

Needs numpy and the CUDA driver (libcuda.so.1); PTX for sm_80 is compiled by the driver for the GPU
at hand. `--kernels` instead compiles kernels.cu to kernels.ptx with NVRTC (no GPU needed).
`--grammar` runs every form of grammar.py that is not in the file's list of refused ones, `--halves`
the functions of cuda_fp16.h and cuda_bf16.h: PTX and FILE.json are of `halves.py` and nvcc.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3]))
from tests.simulator.ptx.recorded import grammar, halves  # noqa: E402
from tests.simulator.ptx.recorded.oracle_cases import Case, cases  # noqa: E402


def compile_kernels() -> None:
    """kernels.cu -> kernels.ptx with NVRTC (LD_LIBRARY_PATH must find libnvrtc.so.12)."""
    lib = ctypes.CDLL("libnvrtc.so.12")
    prog = ctypes.c_void_p()
    source = (HERE / "kernels/kernels.cu").read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(prog), source, b"kernels.cu", 0, None, None)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=compute_80")
    status = lib.nvrtcCompileProgram(prog, 1, options)
    size = ctypes.c_size_t()
    if status:
        lib.nvrtcGetProgramLogSize(prog, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(prog, log)
        raise SystemExit(log.value.decode())
    lib.nvrtcGetPTXSize(prog, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetPTX(prog, text)
    (HERE / "kernels/kernels.ptx").write_bytes(text.value)


class Driver:
    """The few driver calls that are needed."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.name, self.version = name.value.decode(), version.value

    def call(self, name: str, *args: Any) -> None:
        """Call, or raise with the error's number."""
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def run(self, case: Case) -> np.ndarray[Any, Any]:
        """Run one case; returns the output's raw bits."""
        log = ctypes.create_string_buffer(4096)
        keys = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), 4096)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self.call(
                "cuModuleLoadDataEx",
                ctypes.byref(module),
                case.ptx.encode() + b"\0",
                2,
                keys,
                values,
            )
        except RuntimeError as e:
            raise RuntimeError(f"{case.name}: {e}: {log.value.decode()}") from e
        self.call("cuModuleGetFunction", ctypes.byref(function), module, case.entry.encode())
        out = np.zeros(case.out_count, f"<u{case.out_bits // 8}")
        extra = case.initial if case.initial is not None else np.zeros(4, "<u4")
        arrays = [out, *case.inputs, *[extra] * (3 - len(case.inputs))]
        pointers = []
        for array in arrays:
            pointer = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes))
            raw = np.ascontiguousarray(array)
            self.call(
                "cuMemcpyHtoD_v2",
                pointer,
                ctypes.c_void_p(raw.ctypes.data),
                ctypes.c_size_t(raw.nbytes),
            )
            pointers.append(pointer)
        params = (ctypes.c_void_p * 4)(*[ctypes.addressof(p) for p in pointers])
        self.call(
            "cuLaunchKernel", function, case.grid, 1, 1, case.block, 1, 1, 0, None, params, None
        )
        self.call("cuCtxSynchronize")
        if case.initial is not None:
            out = np.zeros_like(case.initial)
            pointers[0] = pointers[3]
        self.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(out.ctypes.data),
            pointers[0],
            ctypes.c_size_t(out.nbytes),
        )
        self.call("cuModuleUnload", module)
        return out


def grammar_cases() -> list[tuple[list[Any], Case]]:
    """The forms of the grammar, a kernel for each group."""
    out = []
    for n, group in enumerate(grammar.groups(grammar.forms())):
        kind, ins, limit = group[0].signature
        bits = grammar.width(kind)
        text = grammar.HEAD + grammar.kernel("k", group)
        arrays = tuple(grammar.inputs(ins, limit))
        count = grammar.LANES * len(group)
        case = Case(f"g{n}", text, arrays, bits, count, kind, grid=1, block=grammar.LANES)
        out.append((group, case))
    return out


def record_grammar(driver: Driver) -> tuple[dict[str, Any], list[str]]:
    """Results by group, and the names of the forms in each."""
    results: dict[str, Any] = {}
    names, failed = [], []
    for group, case in grammar_cases():
        try:
            results[case.name] = driver.run(case)
            names.append([f.name for f in group])
        except RuntimeError as e:
            failed.append(str(e))
    results["forms"] = np.frombuffer(json.dumps(names).encode(), np.uint8)

    return results, failed


def record_halves(driver: Driver, ptx: Path) -> tuple[dict[str, Any], list[str]]:
    """Results by signature of the functions in the headers beside which the PTX was compiled."""
    # A driver reads no PTX newer than itself; nothing newer is used.
    text = re.sub(r"(?m)^\.version .*$", ".version 8.0", ptx.read_text())
    results: dict[str, Any] = {}
    failed = []
    for f in halves.load(ptx.with_suffix(".json")):
        try:
            case = Case(f.signature, text, halves.inputs(f), 64, f.words, "u64", entry=f.kernel)
            results[f.signature] = driver.run(replace(case, grid=1, block=halves.LANES))
        except RuntimeError as e:
            failed.append(f"{f.signature}: {e}")
    return results, failed


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grammar", action="store_true", help="the forms of grammar.py")
    parser.add_argument("--kernels", action="store_true", help="compile kernels.cu to kernels.ptx")
    parser.add_argument("--halves", type=Path, metavar="PTX", help="halves.py's kernels")
    args = parser.parse_args()
    if args.kernels:
        compile_kernels()
        return
    driver = Driver()
    results: dict[str, Any] = {}
    failed: list[str] = []
    if args.grammar:
        results, failed = record_grammar(driver)
    elif args.halves:
        results, failed = record_halves(driver, args.halves)
    for case in () if args.grammar or args.halves else cases():
        try:
            results[case.name] = driver.run(case)
        except RuntimeError as e:
            failed.append(str(e))
    about = {
        "command": "python tests/simulator/ptx/recorded/record_oracle.py"
        + (" --grammar" if args.grammar else " --halves PTX" if args.halves else ""),
        "machine": driver.name,
        "driver": driver.version,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "failed": failed,
    }
    results["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    name = "grammar.npz" if args.grammar else "halves.npz" if args.halves else "oracle.npz"
    out = args.out or HERE / name
    np.savez_compressed(out, allow_pickle=False, **results)
    print(json.dumps(about, indent=1), len(results), "arrays", out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
