"""Programs that compute on a board's GPU, that provoke its faults, and that watch its queue."""

import platform
import threading
import time
from collections.abc import Callable

import numpy as np

from orinbench.check.device.gpu import (
    ONE_THREAD,
    SPIN_SOURCE,
    Found,
    Work,
    buffers,
    device,
    program,
    seconds_of,
)

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
# A QMD of version 3 (Ampere): cla6c0qmd.h and the 256-byte slots of SEND_PCAS.
QMD_BYTES = 256
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


def ring(times_over: float, long_kernels: bool) -> Found:
    """Time launches, in microseconds of each: as many as half the ring holds, and several rings.

    A kernel takes the GPU several times longer than a launch takes the host (`host_us`), so that
    the ring fills; `full` counts the launches that found it so.
    """
    gpu, work, (out,) = device(), program(SPIN_SOURCE, "spin"), buffers(4096)
    fifo, loops, full = gpu.compute_gpfifo, 1, 0

    def launch(launches: int) -> None:
        nonlocal full
        for _ in range(launches):
            full += fifo.gpget[0] == (fifo.put_value + 1) % fifo.entries_count
            work(out, **ONE_THREAD, vals=(loops,))

    def each_us(launches: int) -> float:
        return 1e6 * seconds_of(lambda: launch(launches)) / launches

    each_us(8)
    begun = time.perf_counter()
    launch(64)
    host_us = 1e6 * (time.perf_counter() - begun) / 64
    while long_kernels and each_us(16) < 6 * host_us and loops < 1 << 24:
        loops *= 2
    half_us, full = each_us(fifo.entries_count // 2), 0
    over_us = each_us(int(fifo.entries_count * times_over))
    found = {"entries": fifo.entries_count, "full": full, "host_us": host_us}
    return {**found, "half_us": half_us, "over_us": over_us, "ratio": over_us / half_us}


def qmd(times: int) -> Found:
    """Launch with the release in the QMD, and clear the QMD when the release is seen.

    What is in it afterwards has been written by the GPU behind its release; `written` counts the
    QMDs that the GPU had changed until then.
    """
    gpu, work, (out,) = device(), program(SPIN_SOURCE, "spin"), buffers(4096)
    done, written, late = gpu.new_signal(value=0), 0, 0
    for turn in range(1, times + 1):
        queue = gpu.hw_compute_queue_t().wait(gpu.timeline_signal, gpu.timeline_value - 1)
        arguments = work.fill_kernargs((out,), (turn,))
        queue.memory_barrier().exec(work, arguments, (1, 1, 1), (1, 1, 1))
        view = queue.active_qmd_buf.cpu_view()
        queue.qmd_release = True
        queue.signal(done, turn)
        queue.qmd_release = False
        queue.signal(gpu.timeline_signal, gpu.next_timeline())
        given = bytes(view[:QMD_BYTES])
        queue.submit(gpu)
        done.wait(turn)
        written += bytes(view[:QMD_BYTES]) != given
        view[:QMD_BYTES] = bytes(QMD_BYTES)
        gpu.synchronize()
        time.sleep(0.002)
        late += any(view[:QMD_BYTES])
    return {"launches": times, "written": written, "written_after_release": late}


def queue(work: Work) -> Found:
    """Queue behaviour that only hardware decides: a full ring, and writes into a QMD."""
    return {"ring": ring(work.of(3.0, 1.1), work.of(True, False)), "qmd": qmd(work.of(500, 3))}


# Around a line of the L2, a page, what the driver caches, and the L2 of an AGX Orin.
COHERENCE_SIZES = (100, 128, 132, 4092, 4096, 4100, 65536, (4 << 20) - 4, 4 << 20, 6 << 20)
MOVE_SOURCE = """
extern "C" __global__ void move(int* y, const int* x, int n, int add) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = x[i] + add;
}"""


def coherence(work: Work) -> Found:
    """Wrong ints that CPU and GPU read of each other, by direction; the L2 by TEGRA_L2.

    With the choice no_flush the CPU touches the shared buffer without the driver's flush.
    """
    from tinygrad.device import BufferSpec
    from tinygrad.helpers import to_mv

    gpu, move = device(), program(MOVE_SOURCE, "move")
    sizes = COHERENCE_SIZES if work.size == "board" else COHERENCE_SIZES[:7]
    shared, evict = buffers(8 << 20, 8 << 20)
    mail = gpu.allocator.alloc(8 << 20, BufferSpec(cpu_access=True))  # never cached
    own = np.frombuffer(gpu.allocator._as_buffer(mail), np.int32)
    both = np.frombuffer(to_mv(int(shared.va_addr), 8 << 20), np.int32)

    def launch(to: object, source: object, count: int, add: int) -> None:
        where = {"global_size": (-(-count // 256), 1, 1), "local_size": (256, 1, 1)}
        move(to, source, **where, vals=(count, add), wait=True)

    def cpu_next() -> None:
        gpu.synchronize()
        if work.choice != "no_flush":
            gpu.allocator._as_buffer(shared)

    wrong = dict.fromkeys(("cpu_then_gpu", "gpu_then_cpu", "cpu_over_gpu"), 0)
    for turn, size in enumerate(sizes * work.of(3, 1), 1):
        n, count = size // 4, np.arange(size // 4, dtype=np.int32)
        launch(mail, shared, n, 0)  # the GPU has read what the CPU then writes
        cpu_next()
        both[:n] = count + turn
        launch(mail, shared, n, 1)
        wrong["cpu_then_gpu"] += int((own[:n] != count + turn + 1).sum())
        own[:n] = count
        launch(shared, mail, n, 7 * turn)
        cpu_next()
        wrong["gpu_then_cpu"] += int((both[:n] != count + 7 * turn).sum())
        launch(shared, mail, n, 9 * turn)
        cpu_next()
        both[:n] = count - turn
        launch(evict, shared, work.of(2 << 20, 1 << 10), 0)
        gpu.invalidate_caches()  # whatever is dirty is written back, over the CPU's stores
        wrong["cpu_over_gpu"] += int((both[:n] != count - turn).sum())
    return {**wrong, "wrong": sum(wrong.values()), "compared": 3 * sum(sizes) // 4 * work.of(3, 1)}


PROGRAMS = (smoke, computes, coherence, misaligned, unmapped, hang, queue)
