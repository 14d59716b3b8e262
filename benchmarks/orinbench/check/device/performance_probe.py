"""Programs that time one choice of the driver's each; `performance.py` says which are compared.

They find numbers that end in a unit, and `memory` where the driver's memory ends.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

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
from orinbench.child import Child

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
COPY_SOURCE = """
extern "C" __global__ void copy(float4* out, const float4* in) {
  out[blockIdx.x * 256 + threadIdx.x] = in[blockIdx.x * 256 + threadIdx.x];
}"""


def l2(work: Work) -> Found:
    """Read a buffer again and again that the L2 could hold."""
    size, blocks = work.of(2 << 20, 128 << 10), work.of(*BLOCKS)
    read, (source, out) = program(READ_SOURCE, "read_all"), buffers(size, blocks * 256 * 16)

    def again() -> None:
        sizes_of = {"global_size": (blocks, 1, 1), "local_size": (256, 1, 1)}
        read(out, source, **sizes_of, vals=(size // 16, 256 * blocks))

    again()
    took = median(seconds_of(again) for _ in range(work.of(*LAUNCHES)))
    return {"read_gb_s": size / 1e9 / took}


def shared_memory(work: Work) -> Found:
    """A kernel of which an SM holds one block or several."""
    blocks, loops = work.of(*BLOCKS), work.of(4096, 4)
    sums, (out,) = program(SHARED_SOURCE, "shared_sums"), buffers(16 * blocks * 512)

    def launch() -> None:
        sums(out, global_size=(16 * blocks, 1, 1), local_size=(128, 1, 1), vals=(loops,))

    launch()
    return {"launch_us": 1e6 * median(seconds_of(launch) for _ in range(work.of(*LAUNCHES)))}


def preemption(work: Work) -> Found:
    """Short launches beside a process whose launches are long; `lived` says whether both did."""
    launches, seconds = work.of(*LAUNCHES), work.of(*RIVAL_SECONDS)
    short, (out,) = program(SPIN_SOURCE, "spin"), buffers(4096)

    def launch() -> None:
        short(out, **ONE_THREAD, vals=(64,))

    launch()
    alone = median(seconds_of(launch) for _ in range(launches))
    # The kernels that a switch has to stop are the rival's: it goes with the same choice.
    words = (os.devnull, "rival", work.size, work.choice)
    with Child([sys.executable, "-m", "orinbench.check.device.probe", *words]) as rival:
        time.sleep(seconds / 5)
        beside = [seconds_of(launch) for _ in range(launches)]
        status = rival.wait()
    worst = sorted(beside)[len(beside) * 99 // 100]
    found = {"alone_us": 1e6 * alone, "beside_us": 1e6 * median(beside), "worst_us": 1e6 * worst}
    return {**found, "lived": int(status == 0)}


def rival(work: Work) -> Found:
    """Launches of about 50 ms each, for the seconds that the other process measures."""
    long, (out,) = program(SPIN_SOURCE, "spin"), buffers(4096)
    loops, until = 1 << 10, time.monotonic() + work.of(*RIVAL_SECONDS)
    while time.monotonic() < until:
        took = seconds_of(partial(long, out, **ONE_THREAD, vals=(loops,)))
        loops = min(loops * 2, 1 << 28) if took < 0.05 else loops
    return {}


def rings(work: Work) -> Found:
    """Empty launches in a row: what a submit costs the host and the GPU."""
    launches, short = work.of(*LAUNCHES), program(SPIN_SOURCE, "spin")
    (out,) = buffers(4096)

    def row() -> None:
        for _ in range(launches):
            short(out, **ONE_THREAD, vals=(1,))

    row()
    return {"submit_us": 1e6 * median(seconds_of(row) for _ in range(5)) / launches}


def copies(work: Work) -> Found:
    """Copy a buffer: by the CPU's memmove, or by a kernel from another buffer."""
    size, gpu = work.of(16 << 20, 64 << 10), device()
    host, (target, source) = memoryview(bytearray(size)), buffers(size, size)
    by_kernel, blocks = program(COPY_SOURCE, "copy"), size // (256 * 16)

    def copy() -> None:
        if work.choice == "copy_by_a_kernel":
            by_kernel(target, source, global_size=(blocks, 1, 1), local_size=(256, 1, 1))
        else:
            gpu.allocator._copyin(target, host)

    copy()
    return {"copy_gb_s": size / 1e9 / median(seconds_of(copy) for _ in range(work.of(20, 3)))}


def decode(work: Work) -> Found:
    """A token and a prompt, with the clock of the GPU while they run."""
    from orinbench.measure.backends.tinygrad_paths import OneSequence, load_runner
    from orinbench.synth import cached_synthetic

    model = cached_synthetic(work.of("160m", "tiny"), "Q6_K", 0)
    executor = OneSequence(load_runner(str(model), work.of(2048, 32)))
    length, warm, timed = work.of(512, 4), work.of(3, 1), work.of(5, 1)

    def first(start: int) -> int:
        ids = [start, *range(100, 99 + length)]
        executor.fill(ids, 0, length - 1)
        executor.step(ids[-1], length - 1)
        return executor.token()

    def token() -> int:
        executor.step()
        return executor.token()

    for start in range(1, 1 + warm):  # captures
        first(start)
    starts = range(1 + warm, 1 + warm + timed)
    prompt_us = 1e6 * median(seconds_of(partial(first, start)) for start in starts)
    for _ in range(work.of(4, 1)):
        token()
    token_us = 1e6 * median(seconds_of(token) for _ in range(work.of(16, 1)))
    return {"token_us": token_us, "prompt_us": prompt_us, "gpu_mhz": clock_mhz()}


def clock_mhz() -> float | None:
    """Return the GPU's clock by devfreq, None where there is none."""
    for path in sorted(Path("/sys/class/devfreq").glob("17000000.*/cur_freq")):
        return int(path.read_text()) / 1e6
    return None


def memory(work: Work) -> Found:
    """Take memory until the driver says that there is no more; give it back.

    The reserve is 1 GiB (`TEGRA_RESERVE_MB`), so that a wrong answer leaves the board alive.
    """
    from tinygrad.device import BufferSpec

    gpu, step, spec = device(), 256 << 20, BufferSpec(nolru=True)
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


def take_choice(choice: str) -> None:
    """Make a choice of the process that the driver has no variable for; the device opens later."""
    if choice == "wait_for_idle":
        from tinygrad.runtime.support.nv.tegra import TegraIface

        TegraIface._share_the_gpu = lambda self, channel: None
    elif choice == "write_combined":
        from tinygrad.runtime.autogen import nvgpu
        from tinygrad.runtime.support.nv.tegra import TegraIface

        real = TegraIface._new_channel_buffer

        def write_combined(self: Any, size: int) -> Any:
            cached = nvgpu.NVMAP_HANDLE_INNER_CACHEABLE
            nvgpu.NVMAP_HANDLE_INNER_CACHEABLE = nvgpu.NVMAP_HANDLE_WRITE_COMBINE
            try:
                return real(self, size)
            finally:
                nvgpu.NVMAP_HANDLE_INNER_CACHEABLE = cached

        TegraIface._new_channel_buffer = write_combined


PROGRAMS = (l2, shared_memory, preemption, rival, rings, copies, decode, memory)
