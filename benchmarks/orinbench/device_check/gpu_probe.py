"""Programs that compute on a board's GPU, and those that provoke its faults."""

import platform
import threading
import time
from collections.abc import Callable

import numpy as np

from orinbench.device_check.gpu import ONE_THREAD, Found, Work, buffers, device, program

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


def smoke(work: Work) -> Found:
    """Sums, a matrix product, copies both ways, both windows; each against numpy."""
    from tinygrad import Device, Tensor

    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    product = (Tensor(a) @ Tensor(b)).numpy()
    bytes_ = draw.integers(0, 256, 1 << 20, dtype=np.uint8)
    gpu = device()
    return {
        "device": Device.DEFAULT,
        "arch": str(getattr(gpu, "arch", "")),
        "interface": type(getattr(gpu, "iface", None)).__name__,
        "machine": platform.machine(),
        **computes(work),
        "product_error": float(abs(product - a @ b).max()),
        "copy": bool((Tensor(bytes_).contiguous().realize().numpy() == bytes_).all()),
        "windows": _windows(),
        "sms": int(getattr(gpu, "num_sms", 0)),
        "events": _events(),
    }


def computes(work: Work) -> Found:
    """The device opens and adds."""
    from tinygrad import Tensor

    return {"sum": (Tensor.ones(4).contiguous().realize() + 1).tolist() == [2.0] * 4}


def _events() -> bool:
    """Return true if waits of some milliseconds have ended by an event of the driver's."""
    gpu = device()
    for _ in range(3):
        block = gpu.new_signal(value=0)
        queue = gpu.hw_compute_queue_t().wait(block, 1)
        queue.signal(gpu.timeline_signal, gpu.next_timeline()).submit(gpu)
        threading.Timer(0.01, lambda block=block: setattr(block, "value", 1)).start()
        gpu.synchronize()
    return bool(getattr(gpu.iface, "has_events", False))


def _windows() -> bool:
    """True if a kernel with shared and with local memory computes what numpy does."""
    given = np.arange(65, dtype=np.float32)
    add = program(WINDOWS_SOURCE, "windows")
    out, source = buffers(256, 260)
    gpu = device()
    gpu.allocator._copyin(source, memoryview(bytearray(given.tobytes())))
    add(out, source, global_size=(1, 1, 1), local_size=(64, 1, 1), wait=True)
    room = bytearray(256)
    gpu.allocator._copyout(memoryview(room), out)
    thread = np.arange(64)
    mine = np.empty((64, 64), np.float32)
    for i in range(64):
        mine[thread, (i * 7 + thread) % 64] = given[(i + thread) % 64]
    part = mine[thread, thread] + mine[:, int(given[64]) % 64]
    return bool((np.frombuffer(room, np.float32) == part[::-1]).all())


def _error_of(launch: Callable[[], None]) -> Found:
    """Wait for a launch that fails; return what tinygrad says and how long that took."""
    begun = time.perf_counter()
    try:
        launch()
        device().synchronize()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.perf_counter() - begun}
    return {"error": None, "seconds": time.perf_counter() - begun}


def misaligned(work: Work) -> Found:
    """Load a float4 from an address that is not aligned."""
    load, (out, source) = program(MISALIGNED_SOURCE, "odd_float4"), buffers(4096, 4096)
    return _error_of(lambda: load(out, source, global_size=(1, 1, 1), local_size=(32, 1, 1)))


def unmapped(work: Work) -> Found:
    """Store to memory that has been given back."""
    from tinygrad.device import BufferSpec

    store, gpu = program(STORE_SOURCE, "store"), device()
    spec = BufferSpec(nolru=True)
    buffer = gpu.allocator.alloc(4096, spec)
    gone = buffer.offset(0)
    gpu.allocator.free(buffer, 4096, spec)
    return _error_of(lambda: store(gone, **ONE_THREAD))


def hang(work: Work) -> Found:
    """Wait on the GPU for a signal that nobody gives (HCQDEV_WAIT_TIMEOUT_MS bounds it)."""
    gpu = device()
    block = gpu.new_signal(value=0)

    def launch() -> None:
        queue = gpu.hw_compute_queue_t().wait(block, 1)
        queue.signal(gpu.timeline_signal, gpu.next_timeline()).submit(gpu)

    return _error_of(launch)


PROGRAMS = (smoke, computes, misaligned, unmapped, hang)
