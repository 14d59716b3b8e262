"""Programs for tinygrad's GPU, each run in a process of its own: `gpu_probe.py OUT NAME`.

What a program finds is one JSON object in the file OUT. The device is the one that DEV names.
"""

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# A reduction through shared memory and a spill into local memory: both shader windows are used.
WINDOWS_SOURCE = """
extern "C" __global__ void windows(float* out, const float* in) {
  __shared__ float part[64];
  float mine[64];
  for (int i = 0; i < 64; i++) mine[(i * 7 + threadIdx.x) % 64] = in[(i + threadIdx.x) % 64];
  part[threadIdx.x] = mine[threadIdx.x] + mine[(int)in[64] % 64];
  __syncthreads();
  out[threadIdx.x] = part[63 - threadIdx.x];
}"""
MISALIGNED_SOURCE = """
extern "C" __global__ void odd_float4(float4* out, char* in) {
  out[threadIdx.x] = *(float4*)(in + 4);
}"""
STORE_SOURCE = 'extern "C" __global__ void store(int* x) { x[0] = 1; }'


def _device() -> Any:
    from tinygrad import Device

    return Device[Device.DEFAULT]


def _program(source: str, name: str) -> Any:
    """Compile CUDA C for the device and load it."""
    from tinygrad.runtime.ops_nv import NVProgram

    device = _device()
    return NVProgram(device, name, device.compiler.compile(source))


def _buffers(*sizes: int) -> list[Any]:
    from tinygrad.device import BufferSpec

    return [_device().allocator.alloc(size, BufferSpec()) for size in sizes]


def smoke() -> dict[str, Any]:
    """Sums, a matrix product, copies both ways, both windows; each against numpy."""
    from tinygrad import Device, Tensor

    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    product = (Tensor(a) @ Tensor(b)).numpy()
    bytes_ = draw.integers(0, 256, 1 << 20, dtype=np.uint8)
    device = _device()
    return {
        "device": Device.DEFAULT,
        "arch": str(getattr(device, "arch", "")),
        "interface": type(getattr(device, "iface", None)).__name__,
        "machine": platform.machine(),
        "sum": (Tensor.ones(4).contiguous().realize() + 1).tolist() == [2.0] * 4,
        "product_error": float(abs(product - a @ b).max()),
        "copy": bool((Tensor(bytes_).contiguous().realize().numpy() == bytes_).all()),
        "windows": _windows(),
    }


def _windows() -> bool:
    """Whether a kernel with shared and with local memory computes what numpy does."""
    given = np.arange(65, dtype=np.float32)
    program = _program(WINDOWS_SOURCE, "windows")
    out, source = _buffers(256, 260)
    device = _device()
    device.allocator._copyin(source, memoryview(bytearray(given.tobytes())))
    program(out, source, global_size=(1, 1, 1), local_size=(64, 1, 1), wait=True)
    room = bytearray(256)
    device.allocator._copyout(memoryview(room), out)
    thread = np.arange(64)
    mine = np.empty((64, 64), np.float32)
    for i in range(64):
        mine[thread, (i * 7 + thread) % 64] = given[(i + thread) % 64]
    part = mine[thread, thread] + mine[:, int(given[64]) % 64]
    return bool((np.frombuffer(room, np.float32) == part[::-1]).all())


def _error_of(launch: Callable[[], None]) -> dict[str, Any]:
    """Wait for a launch that fails; return what tinygrad says and how long that took."""
    begun = time.perf_counter()
    try:
        launch()
        _device().synchronize()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.perf_counter() - begun}
    return {"error": None, "seconds": time.perf_counter() - begun}


def misaligned() -> dict[str, Any]:
    """Load a float4 from an address that is not aligned."""
    program, (out, source) = _program(MISALIGNED_SOURCE, "odd_float4"), _buffers(4096, 4096)
    return _error_of(lambda: program(out, source, global_size=(1, 1, 1), local_size=(32, 1, 1)))


def unmapped() -> dict[str, Any]:
    """Store to memory that has been given back."""
    from tinygrad.device import BufferSpec

    program, device = _program(STORE_SOURCE, "store"), _device()
    spec = BufferSpec(nolru=True)
    buffer = device.allocator.alloc(4096, spec)
    gone = buffer.offset(0)
    device.allocator.free(buffer, 4096, spec)
    return _error_of(lambda: program(gone, global_size=(1, 1, 1), local_size=(1, 1, 1)))


def hang() -> dict[str, Any]:
    """Wait on the GPU for a signal that nobody gives (HCQDEV_WAIT_TIMEOUT_MS bounds it)."""
    device = _device()
    block = device.new_signal(value=0)

    def launch() -> None:
        queue = device.hw_compute_queue_t().wait(block, 1)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)

    return _error_of(launch)


def ladder() -> dict[str, float]:
    """Figures that patches change, each the best of some rounds: GB/s, microseconds, counts."""
    from tinygrad import Tensor, TinyJit, dtypes
    from tinygrad.device import Buffer

    found: dict[str, float] = {}
    size = 16 << 20
    host = memoryview(bytearray(size))
    buffer = Buffer(_device().device, size, dtypes.uint8).allocate()
    for name, copy in (("copy_in_gb_s", buffer.copyin), ("copy_out_gb_s", buffer.copyout)):
        found[name] = max(size / 1e9 / _seconds(lambda copy=copy: copy(host)) for _ in range(5))  # type: ignore[misc]
    step = TinyJit(lambda x: (x + 1).realize())
    one = Tensor.zeros(1).contiguous().realize()
    for _ in range(3):
        step(one)
    found["launch_us"] = min(1e6 * _seconds(lambda: step(one)) for _ in range(50))
    # Two kernels whose second reads the first, resubmitted: a reused QMD shows as a wrong number.
    chain = TinyJit(lambda x: ((x + 1).contiguous() * 2).realize())
    wrong = 0
    for turn in range(200):
        value = Tensor([float(turn)]).realize()
        wrong += chain(value).item() != 2 * (turn + 1)
    found["wrong_of_200"] = float(wrong)
    # A matrix of halves times a vector through casts: what the matvec rule matches.
    weights = Tensor.ones(2048, 2048, dtype=dtypes.half).contiguous().realize()
    vector = Tensor.ones(2048).contiguous().realize()
    product = TinyJit(lambda v: (weights.float() * v).sum(1).realize())
    for _ in range(3):
        product(vector)
    found["matvec_us"] = min(1e6 * _seconds(lambda: product(vector)) for _ in range(20))
    return found


def _seconds(launch: Callable[[], object]) -> float:
    device = _device()
    device.synchronize()
    begun = time.perf_counter()
    launch()
    device.synchronize()
    return time.perf_counter() - begun


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "smoke": smoke,
    "misaligned": misaligned,
    "unmapped": unmapped,
    "hang": hang,
    "ladder": ladder,
}


def main(out: str, name: str) -> None:
    """Run a program and write what it found to `out`."""
    Path(out).write_text(json.dumps(PROGRAMS[name]()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
