"""Programs that show each patch's effect; `switches.py` says which patch has which.

Each runs on the series with a patch and without it: names of tinygrad that patches bring are used
only where their absence is the answer. They find counts of what is wrong, and numbers that end in a
unit.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from orinbench.device_check import gpu_probe
from orinbench.device_check.gpu import (
    ONE_THREAD,
    Found,
    Work,
    buffers,
    device,
    program,
    seconds_of,
)

# Seconds for which the GPU is kept from its work.
_HELD_S = 1.0
# A depot of 256 ints that the index keeps out of registers; the loop makes it last.
SPILL_SOURCE = """
extern "C" __global__ void spill(int* out, int n) {
  int a[256];
  for (int i = 0; i < 256; i++) a[i] = i + threadIdx.x;
  for (int k = 0; k < n; k++) for (int i = 0; i < 256; i++) a[(i * 7 + k) & 255] += 1;
  int sum = 0;
  for (int i = 0; i < 256; i++) sum += a[(i * n) & 255];
  out[threadIdx.x] = sum;
}"""
MARK_SOURCE = 'extern "C" __global__ void mark(int* x, int i) { x[i] += 1; }'
ADD_SOURCE = 'extern "C" __global__ void add_one(int* x) { x[0] += 1; }'


def resubmitted(work: Work) -> Found:
    """Submit one bound queue again and again; each run adds two and releases its number.

    A wait for run i has to find 2 i at least (`early` counts those that do not), and all together
    exactly two a run (`missing`).
    """
    from tinygrad import dtypes
    from tinygrad.uop.ops import UOp

    gpu, add_one, (x,) = device(), program(ADD_SOURCE, "add_one"), buffers(4096)
    count, early = x.cpu_view().view(fmt="I"), 0
    count[0] = 0
    value = UOp.variable("value", 0, 0xFFFFFFFF, dtype=dtypes.uint32)
    done = gpu.new_signal(value=0)
    queue = gpu.hw_compute_queue_t().wait(done, value - 1).memory_barrier()
    for _ in range(2):
        queue.exec(add_one, add_one.fill_kernargs((x,)), (1, 1, 1), (1, 1, 1))
    queue.signal(done, value)
    for run in range(1, work.sizes.resubmissions + 1):
        queue.submit(gpu, {value.expr: run})
    for run in range(1, work.sizes.resubmissions + 1):
        done.wait(run)
        early += count[0] < 2 * run
    time.sleep(0.2)
    missing = 2 * work.sizes.resubmissions - count[0]
    return {"early": early, "missing": missing, "wrong": early + abs(missing)}


def copies(work: Work) -> Found:
    """Copy to the device and back."""
    from tinygrad import dtypes
    from tinygrad.device import Buffer

    size = work.sizes.copied
    host = memoryview(bytearray(size))
    buffer = Buffer(device().device, size, dtypes.uint8).allocate()

    def gb_s(copy: Callable[[memoryview], object]) -> float:
        copy(host)
        return (
            size / 1e9 / median(seconds_of(lambda: copy(host)) for _ in range(work.sizes.samples))
        )

    return {"copy_in_gb_s": gb_s(buffer.copyin), "copy_out_gb_s": gb_s(buffer.copyout)}


def growing_local_memory(work: Work) -> Found:
    """Let local memory grow while a kernel that spills into it has not run yet.

    The block that goes is the next of its size; the kernel must be through before somebody has it.
    """
    gpu, (out,) = device(), buffers(4096)
    spill = program(SPILL_SOURCE, "spill")
    shape: dict[str, Any] = {"global_size": (1, 1, 1), "local_size": (32, 1, 1), "vals": (3,)}
    spill(out, **shape)
    gpu.synchronize()
    size, held = gpu.shader_local_mem.size, gpu.new_signal(value=0)
    gpu.hw_compute_queue_t().wait(held, 1).submit(gpu)
    spill(out, **shape)
    queued = gpu.timeline_value - 1
    _release_later(held, _HELD_S)
    gpu._ensure_has_local_memory(gpu.slm_per_thread * 4)
    recycled = gpu.allocator.alloc(size)
    early = gpu.timeline_signal.value < queued
    ctypes.memset(int(recycled.va_addr), 0xDB, size)
    gpu.synchronize()
    kept = bytes(recycled.cpu_view()[:size]) == b"\xdb" * size
    return {"wrong": int(early) + int(not kept)}


def _release_later(signal: Any, seconds: float) -> None:
    def release() -> None:
        signal.value = 1

    threading.Timer(seconds, release).start()


def wrapped_arguments(work: Work) -> Found:
    """Launch more than a small ring of arguments holds, before the GPU runs the first."""
    gpu, mark, (x,) = device(), program(MARK_SOURCE, "mark"), buffers(4096)
    marks = x.cpu_view().view(size=1200, fmt="I")
    marks.view(fmt="B")[:] = bytes(1200)
    gpu.synchronize()
    gpu.kernargs_offset_allocator.size = 0x10000
    held = gpu.new_signal(value=0)
    gpu.hw_compute_queue_t().wait(held, 1).submit(gpu)
    _release_later(held, _HELD_S)
    for index in range(300):
        mark(x, **ONE_THREAD, vals=(index,))
    gpu.synchronize()
    return {"wrong": sum(mark != 1 for mark in marks[:])}


def named_fault(work: Work) -> Found:
    """Provoke a misaligned load: what the error says, and when it comes."""
    said = gpu_probe.misaligned(work)
    named = "misaligned address" in (said["error"] or "")
    return {"says": said["error"], "unnamed": int(not named), "wait_s": said["seconds"]}


def freed_after_a_fault(work: Work) -> Found:
    """Give a buffer back on a device that has failed: `wrong` if that raises its error again."""
    from tinygrad.device import BufferSpec

    gpu, spec = device(), BufferSpec(nolru=True)
    buffer = gpu.allocator.alloc(4096, spec)
    said = gpu_probe.misaligned(work)
    try:
        gpu.allocator.free(buffer, 4096, spec)
    except RuntimeError:
        return {"wrong": 1}
    return {"wrong": int(said["error"] is None)}


def matvec(work: Work) -> Found:
    """A matrix of halves times a vector through casts: what the matvec rule matches."""
    from tinygrad import Tensor, TinyJit, dtypes

    side = work.sizes.side
    weights = Tensor.ones(side, side, dtype=dtypes.half).contiguous().realize()
    vector = Tensor.ones(side).contiguous().realize()
    product = TinyJit(lambda v: (weights.float() * v).sum(1).realize())
    for _ in range(3):
        product(vector)
    found = [1e6 * seconds_of(lambda: product(vector)) for _ in range(work.sizes.samples)]
    return {"matvec_us": median(found)}


def odd_view(work: Work) -> Found:
    """Double a slice that begins at byte 4."""
    from tinygrad import Tensor

    given = np.arange(2048, dtype=np.float32)
    view = Tensor(given).realize()[1:1025].contiguous().realize()
    return {"wrong": int((np.asarray((view * 2).numpy()) != 2 * given[1:1025]).sum())}


def cache(work: Work) -> Found:
    """Load a model as tinygrad.llm runs it: bytes of its keys and values."""
    from tinygrad import Tensor
    from tinygrad.llm.model import Transformer

    transformer, _ = Transformer.from_gguf(Path(work.model), work.sizes.context)
    token = Tensor.zeros(1, 1)
    for block in transformer.blk:
        block._init_state(token)
    return {"cache_bytes": sum(block.cache_kv.nbytes() for block in transformer.blk)}


PROGRAMS = (
    copies,
    matvec,
    cache,
    resubmitted,
    wrapped_arguments,
    growing_local_memory,
    odd_view,
    named_fault,
    freed_after_a_fault,
)
