"""The Orin envelope: so many multiprocessors of a larger GPU, as an Orin has 16 (`--sms`).

tinygrad's CUDA device gets a green context, and its kernels are planned for what that has.
llama.cpp gets the same by a library that is preloaded, `green_context.c`, built here on demand.
"""

import ctypes
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from orinbench.child import run_command
from orinbench.errors import BenchError

#: Of a worker's or llama.cpp's environment: how many, and where the library says what it did.
SMS, REPORT = "ORINBENCH_SMS", "ORINBENCH_SMS_REPORT"
SOURCE = Path(__file__).with_name("green_context.c")
# An AGX Orin 64GB: its GPU's highest clock, and 256 bits of LPDDR5 at 6400 MT/s
# (Jetson AGX Orin Series Data Sheet).
ORIN_MHZ = 1300.0
ORIN_GB_S = 204.8
# cuda.h of 12.4 to 13.0: CU_DEV_RESOURCE_TYPE_SM, CU_GREEN_CTX_DEFAULT_STREAM, and where a
# CUdevResource of 144 bytes has its smCount.
_TYPE_SM, _DEFAULT_STREAM, _SM_COUNT = 1, 1, 96
_BUILD_SECONDS = 120


class GreenContext:
    """A green context for tinygrad's CUDA device; `sms` is how many it was given."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.sms = wanted, 0

    def cu_ctx_create(self, pointer: Any, flags: int, device: Any) -> int:
        """Stand in for cuCtxCreate_v2; raises RuntimeError, one line, where there is none."""
        driver = ctypes.CDLL("libcuda.so.1")
        ordinal = int(getattr(device, "value", device))

        def call(name: str, *arguments: Any) -> None:
            if (function := getattr(driver, name, None)) is None:
                raise RuntimeError(f"the CUDA driver has no {name}: green contexts need 12.4")
            if status := function(*arguments):
                raise RuntimeError(f"{name}: CUDA error {status}")

        # Larger than any release's structure.
        whole, part, rest = (ctypes.create_string_buffer(4096) for _ in range(3))
        primary, description, green, context = (ctypes.c_void_p() for _ in range(4))
        groups = ctypes.c_uint(1)
        split = (part, ctypes.byref(groups), whole, rest, 0, self.wanted)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), ordinal)
        call("cuDeviceGetDevResource", ordinal, whole, _TYPE_SM)
        call("cuDevSmResourceSplitByCount", *split)
        call("cuDevResourceGenerateDesc", ctypes.byref(description), part, 1)
        call("cuGreenCtxCreate", ctypes.byref(green), description, ordinal, _DEFAULT_STREAM)
        call("cuCtxFromGreenCtx", ctypes.byref(context), green)
        call("cuCtxSetCurrent", context)
        ctypes.memmove(pointer, ctypes.byref(context), ctypes.sizeof(context))
        self.sms = ctypes.c_uint.from_buffer_copy(part.raw, _SM_COUNT).value
        return 0


def limit_sms_from_environment() -> GreenContext | None:
    """Let this process's tinygrad take a green context, if its environment asks for one.

    Comes before the device is opened. This imports tinygrad.
    """
    if not (wanted := os.environ.get(SMS)):
        return None
    from tinygrad import Device
    from tinygrad.runtime.autogen import cuda

    from orinllm.gpu.device import override_multiprocessors

    green = GreenContext(int(wanted))
    cuda.cuCtxCreate_v2 = green.cu_ctx_create

    def granted(device: str) -> int:
        Device[device]  # opens it
        return green.sms

    override_multiprocessors("CUDA", granted)
    return green


class GreenContextPreload:
    """The library for llama.cpp, in a folder; `environment` is what its programs need."""

    def __init__(self, sms: int, folder: Path) -> None:
        self._report = folder / "report"
        library = build_preload_library(folder)
        before = os.environ.get("LD_PRELOAD")
        self.environment = {
            "LD_PRELOAD": f"{library}:{before}" if before else str(library),
            SMS: str(sms),
            REPORT: str(self._report),
        }

    def pop_reported_sm_count(self) -> int:
        """Return how many multiprocessors the last program got; forgets it.

        Raises BenchError, one line, where its streams were not in a green context.
        """
        try:
            lines = self._report.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        self._report.unlink(missing_ok=True)
        if error := next((line for line in lines if line.startswith("error ")), None):
            raise BenchError(f"--sms: {error.removeprefix('error ')}")
        if not lines:
            raise BenchError(
                "--sms: llama.cpp made no stream through libcudart.so, so it used the whole GPU; "
                "it must run on CUDA and be linked with the shared runtime library"
            )
        return int(lines[-1].removeprefix("sms "))


def build_preload_library(folder: Path) -> Path:
    """Build the library with the system's C compiler; raises BenchError, one line, if it cannot."""
    compiler = _compiler_command()
    library = folder / "green_context.so"
    command = [*compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        done = run_command([*command, "-lpthread"], _BUILD_SECONDS)
    except OSError as error:
        raise BenchError(f"--sms: {compiler[0]} does not build its library: {error}") from None
    if done.status != 0:
        said = next(
            (line for line in done.err.splitlines() if "error" in line), done.last_error_line
        )
        raise BenchError(f"--sms: {compiler[0]} does not build its library: {said}")
    return library


def _compiler_command() -> list[str]:
    if asked := os.environ.get("CC"):
        return asked.split()
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise BenchError(
        "--sms: llama.cpp needs a library that is built here, and there is no C compiler: install "
        "gcc, or leave llama.cpp out with --backend tinygrad:CUDA"
    )


def orin_ms_fields(
    milliseconds: float, sms: int, mhz: float | None, read_bytes: float
) -> dict[str, float | int | None]:
    """Return what the record says of a time in the envelope: `extra.envelope`.

    `mhz` is the clock it was measured at, None where NVML does not say; `read_bytes` is what must
    come from memory at least. The two that begin with orin_ are estimates.
    """
    return {
        "sms": sms,
        "ms": milliseconds,
        "clock_mhz": mhz,
        "orin_ms": milliseconds * mhz / ORIN_MHZ if mhz else None,
        "orin_memory_floor_ms": read_bytes / ORIN_GB_S / 1e6,
    }
