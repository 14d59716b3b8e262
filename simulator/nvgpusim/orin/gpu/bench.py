"""Speed of the simulator: `python -m nvgpusim.orin.gpu.bench`.

Two kernels: a naive fp32 matmul of 256 x 256 x 256, one thread an output
element, and one that does nothing, for the cost of a launch.
"""

from __future__ import annotations

import json
import platform
import statistics
import struct
import sys
import time

import numpy as np

from ...memory import DmaBuf, GpuAddressSpace, Mapping
from ...ptx import Launch, parse, translate_kernel

MATMUL = """.version 7.5
.target sm_87
.address_size 64
.visible .entry matmul(.param .u64 c, .param .u64 a, .param .u64 b)
{
.reg .pred %p;
.reg .f32 %acc, %x, %y;
.reg .b32 %i, %j, %k, %t, %n;
.reg .b64 %pa, %pb, %pc, %o;
mov.u32 %t, %tid.x;
mov.u32 %i, %ctaid.x;
mov.u32 %n, %ctaid.y;
mad.lo.u32 %j, %n, 128, %t;
ld.param.u64 %pc, [c];
ld.param.u64 %pa, [a];
ld.param.u64 %pb, [b];
mul.wide.u32 %o, %i, 1024;
add.u64 %pa, %pa, %o;
add.u64 %pc, %pc, %o;
mul.wide.u32 %o, %j, 4;
add.u64 %pb, %pb, %o;
add.u64 %pc, %pc, %o;
mov.f32 %acc, 0f00000000;
mov.u32 %k, 0;
LOOP:
ld.global.nc.f32 %x, [%pa];
ld.global.nc.f32 %y, [%pb];
fma.rn.f32 %acc, %x, %y, %acc;
add.u64 %pa, %pa, 4;
add.u64 %pb, %pb, 1024;
add.u32 %k, %k, 1;
setp.lt.u32 %p, %k, 256;
@%p bra LOOP;
st.global.f32 [%pc], %acc;
ret;
}
.visible .entry nothing(.param .u64 c) { ret; }
"""
N = 256


def measure_speed(repetitions: int = 5) -> dict[str, float | int | str]:
    """Measure; raises RuntimeError when the product is wrong."""
    vm, (c, a, b) = GpuAddressSpace("bench"), (n << 24 for n in (1, 2, 3))
    for at in (c, a, b):
        buf = DmaBuf(4 * N * N, f"matrix at {at:#x}")
        buf.array = np.zeros(buf.size, np.uint8)
        vm.add_mapping(Mapping(at, buf.size, buf))
    rng = np.random.default_rng(0)
    arrays = [np.frombuffer(vm.view_bytes(at, 4 * N * N, "write"), np.float32) for at in (c, a, b)]
    for array in arrays[1:]:
        array[:] = rng.normal(size=N * N)
    module = parse(MATMUL)
    bank = bytes(0x160) + struct.pack("<3Q", c, a, b)
    code = translate_kernel(module, module.kernels["matmul"])
    seconds, cpu, instructions = [], [], 0
    for _ in range(repetitions):
        launch = Launch(code, vm, (N, 2, 1), (128, 1, 1), {0: bank})
        start, cpu_start = time.perf_counter(), time.thread_time()
        launch.run_all_blocks()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - cpu_start)
        instructions = launch.thread_instrs
    want = arrays[1].reshape(N, N).astype(np.float64) @ arrays[2].reshape(N, N)
    if not np.allclose(arrays[0].reshape(N, N), want, atol=1e-3):
        raise RuntimeError("the matmul kernel gave a wrong product")
    empty = translate_kernel(module, module.kernels["nothing"])
    start = time.thread_time()
    for _ in range(1000):
        Launch(empty, vm, (1, 1, 1), (32, 1, 1), {0: bank}).run_all_blocks()
    launches = 1000 / (time.thread_time() - start)
    median = statistics.median(seconds)
    return {
        "matmul 256x256x256 fp32, seconds (median)": round(median, 3),
        "matmul, seconds (min)": round(min(seconds), 3),
        "matmul, seconds (max)": round(max(seconds), 3),
        "matmul, CPU seconds (median)": round(statistics.median(cpu), 3),
        "thread instructions per CPU second": round(instructions / statistics.median(cpu)),
        "empty launches per CPU second": round(launches),
        "repetitions": repetitions,
        "machine": f"{platform.machine()}, {platform.python_implementation()} "
        f"{platform.python_version()}, numpy {np.__version__}",
    }


if __name__ == "__main__":
    json.dump(measure_speed(), sys.stdout, indent=1)
    print()
