"""Programs for a board's GPU, each in a process of its own: `probes OUT NAME SIZE CHOICE`.

They compute, provoke faults, watch the queue, and time one choice of the driver's each: numbers end
in a unit. What one finds is one JSON object in the file OUT; from an exception that is `failed`,
and the exit status is 1. It runs on the device that DEV names.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from orinbench.check.device.driver_choices import patch_driver
from orinbench.child import ChildProcess

T = TypeVar("T")
Found = dict[str, Any]
ONE_THREAD: dict[str, Any] = {"global_size": (1, 1, 1), "local_size": (1, 1, 1)}

# One thread whose time grows with n.
SPIN_SOURCE = """
extern "C" __global__ void spin(int* out, int n) {
  int x = out[0];
  for (int i = 0; i < n; i++) x = x * 1664525 + 1013904223;
  out[0] = x;
}"""


@dataclass(frozen=True)
class ProbeSettings:
    """A program's settings: how much it does, and the driver's choice that it tries."""

    size: str  # "board", or "tiny": the little that a simulated GPU can do beside it
    choice: str = "-"

    def amount_for_size(self, board: T, tiny: T) -> T:
        """Return the amount of work on a board, or the one of a simulated GPU."""
        return board if self.size == "board" else tiny


def open_device() -> Any:
    """Return the default device, opened."""
    from tinygrad import Device

    return Device[Device.DEFAULT]


def compile_cuda(source: str, name: str) -> Any:
    """Compile CUDA C for the device and load it."""
    from tinygrad.runtime.ops_nv import NVProgram

    gpu = open_device()
    return NVProgram(gpu, name, gpu.compiler.compile(source))


def new_buffers(*sizes: int) -> list[Any]:
    """Allocate buffers of so many bytes on the device."""
    from tinygrad.device import BufferSpec

    return [open_device().allocator.alloc(size, BufferSpec()) for size in sizes]


def time_launch(launch: Callable[[], object]) -> float:
    """Return the seconds of a launch and of waiting for it, on an idle device."""
    gpu = open_device()
    gpu.synchronize()
    begun = time.perf_counter()
    launch()
    gpu.synchronize()
    return time.perf_counter() - begun


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


def probe_smoke(work: ProbeSettings) -> Found:
    """Sums, a matrix product, copies both ways, both windows; each against numpy."""
    from tinygrad import Device, Tensor

    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    product = (Tensor(a) @ Tensor(b)).numpy()
    bytes_ = draw.integers(0, 256, 1 << 20, dtype=np.uint8)
    gpu = open_device()
    return {
        "device": Device.DEFAULT,
        "arch": str(getattr(gpu, "arch", "")),
        "interface": type(getattr(gpu, "iface", None)).__name__,
        "machine": platform.machine(),
        **probe_addition(work),
        "product_error": float(abs(product - a @ b).max()),
        "copy": bool((Tensor(bytes_).contiguous().realize().numpy() == bytes_).all()),
        "windows": _memory_windows_work(),
        "sms": int(getattr(gpu, "num_sms", 0)),
        "events": _waits_end_by_events(),
    }


def probe_addition(work: ProbeSettings) -> Found:
    """The device opens and adds."""
    from tinygrad import Tensor

    return {"sum": (Tensor.ones(4).contiguous().realize() + 1).tolist() == [2.0] * 4}


def _waits_end_by_events() -> bool:
    """Return true if waits of some milliseconds have ended by an event of the driver's."""
    gpu = open_device()
    for _ in range(3):
        block = gpu.new_signal(value=0)
        queue = gpu.hw_compute_queue_t().wait(block, 1)
        queue.signal(gpu.timeline_signal, gpu.next_timeline()).submit(gpu)
        threading.Timer(0.01, lambda block=block: setattr(block, "value", 1)).start()
        gpu.synchronize()
    return bool(getattr(gpu.iface, "has_events", False))


def _memory_windows_work() -> bool:
    """True if a kernel with shared and with local memory computes what numpy does."""
    given = np.arange(65, dtype=np.float32)
    add = compile_cuda(WINDOWS_SOURCE, "windows")
    out, source = new_buffers(256, 260)
    gpu = open_device()
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


def _time_failing_launch(launch: Callable[[], None]) -> Found:
    """Wait for a launch that fails; return what tinygrad says and how long that took."""
    begun = time.perf_counter()
    try:
        launch()
        open_device().synchronize()
    except RuntimeError as error:
        return {"error": str(error), "seconds": time.perf_counter() - begun}
    return {"error": None, "seconds": time.perf_counter() - begun}


def probe_misaligned(work: ProbeSettings) -> Found:
    """Load a float4 from an address that is not aligned."""
    load, (out, source) = compile_cuda(MISALIGNED_SOURCE, "odd_float4"), new_buffers(4096, 4096)
    sizes = {"global_size": (1, 1, 1), "local_size": (32, 1, 1)}
    return _time_failing_launch(lambda: load(out, source, **sizes))


def probe_unmapped(work: ProbeSettings) -> Found:
    """Store to memory that has been given back."""
    from tinygrad.device import BufferSpec

    store, gpu = compile_cuda(STORE_SOURCE, "store"), open_device()
    spec = BufferSpec(nolru=True)
    buffer = gpu.allocator.alloc(4096, spec)
    gone = buffer.offset(0)
    gpu.allocator.free(buffer, 4096, spec)
    return _time_failing_launch(lambda: store(gone, **ONE_THREAD))


def probe_hang(work: ProbeSettings) -> Found:
    """Wait on the GPU for a signal that nobody gives (HCQDEV_WAIT_TIMEOUT_MS bounds it)."""
    gpu = open_device()
    block = gpu.new_signal(value=0)

    def launch() -> None:
        queue = gpu.hw_compute_queue_t().wait(block, 1)
        queue.signal(gpu.timeline_signal, gpu.next_timeline()).submit(gpu)

    return _time_failing_launch(launch)


def time_full_ring(times_over: float, long_kernels: bool) -> Found:
    """Time launches, in microseconds of each: as many as half the ring holds, and several rings.

    A kernel takes the GPU several times longer than a launch takes the host (`host_us`), so that
    the ring fills; `full` counts the launches that found it so.
    """
    gpu, work, (out,) = open_device(), compile_cuda(SPIN_SOURCE, "spin"), new_buffers(4096)
    fifo, loops, full = gpu.compute_gpfifo, 1, 0

    def launch(launches: int) -> None:
        nonlocal full
        for _ in range(launches):
            full += fifo.gpget[0] == (fifo.put_value + 1) % fifo.entries_count
            work(out, **ONE_THREAD, vals=(loops,))

    def each_us(launches: int) -> float:
        return 1e6 * time_launch(lambda: launch(launches)) / launches

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


def count_late_qmd_writes(times: int) -> Found:
    """Launch with the release in the QMD, and clear the QMD when the release is seen.

    What is in it afterwards has been written by the GPU behind its release; `written` counts the
    QMDs that the GPU had changed until then.
    """
    gpu, work, (out,) = open_device(), compile_cuda(SPIN_SOURCE, "spin"), new_buffers(4096)
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


def probe_queue(work: ProbeSettings) -> Found:
    """Queue behaviour that only hardware decides: a full ring, and writes into a QMD."""
    return {
        "ring": time_full_ring(work.amount_for_size(3.0, 1.1), work.amount_for_size(True, False)),
        "qmd": count_late_qmd_writes(work.amount_for_size(500, 3)),
    }


# Around a line of the L2, a page, what the driver caches, and the L2 of an AGX Orin.
COHERENCE_SIZES = (100, 128, 132, 4092, 4096, 4100, 65536, (4 << 20) - 4, 4 << 20, 6 << 20)
MOVE_SOURCE = """
extern "C" __global__ void move(int* y, const int* x, int n, int add) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = x[i] + add;
}"""


def probe_coherence(work: ProbeSettings) -> Found:
    """Wrong ints that CPU and GPU read of each other, by direction; the L2 by TEGRA_L2.

    With the choice no_flush the CPU touches the shared buffer without the driver's flush.
    """
    from tinygrad.device import BufferSpec
    from tinygrad.helpers import to_mv

    gpu, move = open_device(), compile_cuda(MOVE_SOURCE, "move")
    sizes = COHERENCE_SIZES if work.size == "board" else COHERENCE_SIZES[:7]
    shared, evict = new_buffers(8 << 20, 8 << 20)
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
    for turn, size in enumerate(sizes * work.amount_for_size(3, 1), 1):
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
        launch(evict, shared, work.amount_for_size(2 << 20, 1 << 10), 0)
        gpu.invalidate_caches()  # whatever is dirty is written back, over the CPU's stores
        wrong["cpu_over_gpu"] += int((both[:n] != count - turn).sum())
    return {
        **wrong,
        "wrong": sum(wrong.values()),
        "compared": 3 * sum(sizes) // 4 * work.amount_for_size(3, 1),
    }


# Amounts on a board, and on a simulated GPU.
LAUNCHES, BLOCKS = (200, 2), (64, 2)
RIVAL_SECONDS = (5.0, 0.0)  # for which the other process launches
# Each pass reads the whole buffer, half of the L2 of an AGX Orin. tinygrad gives kernels no
# gridDim and blockDim.
READ_SOURCE = """
extern "C" __global__ void read_all(float4* out, const float4* in, int n, int threads) {
  float4 sum = make_float4(0, 0, 0, 0);
  for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += threads) {
    float4 v = in[i];
    sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
  }
  out[blockIdx.x * 256 + threadIdx.x] = sum;
}"""
# 12 KiB of shared memory a block, of which one is small enough for the smallest split.
SHARED_SOURCE = """
extern "C" __global__ void __launch_bounds__(128) shared_sums(float* out, int n) {
  __shared__ float s[3072];
  for (int i = threadIdx.x; i < 3072; i += 128) s[i] = i;
  __syncthreads();
  float sum = 0;
  for (int k = 0; k < n; k++) sum += s[(threadIdx.x * 33 + k * 129 + (int)sum) % 3072];
  out[blockIdx.x * 128 + threadIdx.x] = sum;
}"""


def time_l2_reads(work: ProbeSettings) -> Found:
    """Read a buffer again and again that the L2 could hold."""
    size, blocks = work.amount_for_size(2 << 20, 128 << 10), work.amount_for_size(*BLOCKS)
    read, (source, out) = (
        compile_cuda(READ_SOURCE, "read_all"),
        new_buffers(size, blocks * 256 * 16),
    )

    def again() -> None:
        sizes_of = {"global_size": (blocks, 1, 1), "local_size": (256, 1, 1)}
        read(out, source, **sizes_of, vals=(size // 16, 256 * blocks))

    again()
    took = median(time_launch(again) for _ in range(work.amount_for_size(*LAUNCHES)))
    return {"read_gb_s": size / 1e9 / took}


def time_shared_memory_kernel(work: ProbeSettings) -> Found:
    """A kernel of which an SM holds one block or several."""
    blocks, loops = work.amount_for_size(*BLOCKS), work.amount_for_size(4096, 4)
    sums, (out,) = compile_cuda(SHARED_SOURCE, "shared_sums"), new_buffers(16 * blocks * 512)

    def launch() -> None:
        sums(out, global_size=(16 * blocks, 1, 1), local_size=(128, 1, 1), vals=(loops,))

    launch()
    return {
        "launch_us": 1e6
        * median(time_launch(launch) for _ in range(work.amount_for_size(*LAUNCHES)))
    }


def time_beside_rival(work: ProbeSettings) -> Found:
    """Short launches beside a process whose launches are long; `lived` says whether both did."""
    launches, seconds = work.amount_for_size(*LAUNCHES), work.amount_for_size(*RIVAL_SECONDS)
    short, (out,) = compile_cuda(SPIN_SOURCE, "spin"), new_buffers(4096)

    def launch() -> None:
        short(out, **ONE_THREAD, vals=(64,))

    launch()
    alone = median(time_launch(launch) for _ in range(launches))
    # The kernels that a switch has to stop are the rival's: it goes with the same choice.
    words = (os.devnull, "rival", work.size, work.choice)
    with ChildProcess([sys.executable, "-m", "orinbench.check.device.probes", *words]) as rival:
        time.sleep(seconds / 5)
        beside = [time_launch(launch) for _ in range(launches)]
        status = rival.wait()
    worst = sorted(beside)[len(beside) * 99 // 100]
    found = {"alone_us": 1e6 * alone, "beside_us": 1e6 * median(beside), "worst_us": 1e6 * worst}
    return {**found, "lived": int(status == 0)}


def launch_as_rival(work: ProbeSettings) -> Found:
    """Launches of about 50 ms each, for the seconds that the other process measures."""
    long, (out,) = compile_cuda(SPIN_SOURCE, "spin"), new_buffers(4096)
    loops, until = 1 << 10, time.monotonic() + work.amount_for_size(*RIVAL_SECONDS)
    while time.monotonic() < until:
        took = time_launch(partial(long, out, **ONE_THREAD, vals=(loops,)))
        loops = min(loops * 2, 1 << 28) if took < 0.05 else loops
    return {}


def time_submits(work: ProbeSettings) -> Found:
    """Empty launches in a row: what a submit costs the host and the GPU."""
    launches, short = work.amount_for_size(*LAUNCHES), compile_cuda(SPIN_SOURCE, "spin")
    (out,) = new_buffers(4096)

    def row() -> None:
        for _ in range(launches):
            short(out, **ONE_THREAD, vals=(1,))

    row()
    return {"submit_us": 1e6 * median(time_launch(row) for _ in range(5)) / launches}


def exhaust_memory(work: ProbeSettings) -> Found:
    """Take memory until the driver says that there is no more; give it back.

    The reserve is 1 GiB (`TEGRA_RESERVE_MB`), so that a wrong answer leaves the board alive.
    """
    from tinygrad.device import BufferSpec

    gpu, step, spec = open_device(), 256 << 20, BufferSpec(nolru=True)
    taken, said = [], ""
    before = gpu.iface.memory_available()
    try:
        while True:
            taken.append(gpu.allocator.alloc(step, spec))
    except MemoryError as error:
        said = str(error.__cause__ or error)
    left = gpu.iface.memory_available()
    for buffer in taken:
        gpu.allocator.free(buffer, step, spec)
    after = gpu.iface.memory_available()
    found = {"taken_mb": len(taken) * step >> 20, "before_mb": before >> 20, "left_mb": left >> 20}
    given_back = int(after >= before - step)
    return {**found, "given_back": given_back, "says": said, "named": int("available" in said)}


PROGRAMS = {
    "smoke": probe_smoke,
    "computes": probe_addition,
    "coherence": probe_coherence,
    "misaligned": probe_misaligned,
    "unmapped": probe_unmapped,
    "hang": probe_hang,
    "queue": probe_queue,
    "l2": time_l2_reads,
    "shared_memory": time_shared_memory_kernel,
    "preemption": time_beside_rival,
    "rival": launch_as_rival,
    "rings": time_submits,
    "memory": exhaust_memory,
}


def main(out: str, name: str, size: str, choice: str) -> int:
    """Run a program and write what it found; returns the exit status."""
    try:
        patch_driver(choice)
        found = PROGRAMS[name](ProbeSettings(size, choice))
    except Exception as error:  # of a device that does not open, of a kernel that faults
        found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    Path(out).write_text(json.dumps(found))
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
