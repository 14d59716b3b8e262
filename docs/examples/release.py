"""Cost of a tinygrad release on the host: `PARALLEL=0 CCACHE=0 python docs/examples/release.py`.

CPU time, which other programs on the machine hardly change: of a product on the CPU device by
thread, of scheduling and code generation for decoder blocks, where nothing is computed, and of a
copy into a buffer of the host and out of it, where nothing but tinygrad's own work is left. Where a
release runs the parts of a kernel one after the other, the product is also shown with threads for
them, and the copy by the allocator's own functions.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint64
from pathlib import Path
from typing import Any

from tinygrad import Context, Tensor, TinyJit, dtypes, nn
from tinygrad.device import Buffer
from tinygrad.engine.realize import compile_linear
from tinygrad.runtime.ops_cpu import CPUProgram

from orinllm.gpu.compiler import provide_compiler

SIZE, CALLS, BLOCKS, WIDTH = 1024, 5, 2, 1024
POOL = ThreadPoolExecutor()


def threads() -> dict[str, int]:
    """CPU time of each thread of this process so far, in hundredths of a second (proc(5))."""
    stats = {task.name: (task / "stat").read_text() for task in Path("/proc/self/task").iterdir()}
    fields = {name: stat.rpartition(")")[2].split() for name, stat in stats.items()}
    return {name: int(values[11]) + int(values[12]) for name, values in fields.items()}


def product() -> None:
    """Say which threads multiply two matrices."""
    with Context(DEV="CPU"):
        a, b = (Tensor.rand(SIZE, SIZE).realize() for _ in range(2))
        multiply = TinyJit(lambda a, b: (a @ b).realize())
        for _ in range(3):
            multiply(a, b).numpy()
        before = threads()
        for _ in range(CALLS):
            multiply(a, b).numpy()
        spent = sorted((n - before.get(name, 0) for name, n in threads().items()), reverse=True)
    each = ", ".join(f"{n / 100 / CALLS:.2f}" for n in spent if n > 0.05 * sum(spent))
    print(f"a product of {SIZE} x {SIZE} floats: CPU seconds by thread: {each}")


def run_parts(program: Any, *bufs: Any, global_size: Any = (1, 1, 1), vals: Any = (),
              **_: object) -> None:  # fmt: skip
    """Be 0.14.0's `CPUProgram.__call__` with a thread for each part of a kernel."""
    values = [*(buf.va_addr for buf in bufs), *vals]
    core = program.runtimevars.get("core_id")

    def part(n: int) -> None:
        program.fxn(*(c_uint64(n if i == core else v) for i, v in enumerate(values)))

    list(POOL.map(part, range(global_size[0])))


def block(x: Tensor) -> Tensor:
    """Norm, attention over the positions of x, and a gated feed-forward part."""
    q, k, v = (nn.Linear(WIDTH, WIDTH)(nn.RMSNorm(WIDTH)(x)) for _ in range(3))
    heads = (t.reshape(-1, 16, WIDTH // 16).transpose(0, 1) for t in (q, k, v))
    mixed = Tensor.scaled_dot_product_attention(*heads).transpose(0, 1).reshape(-1, WIDTH)
    x = (x + nn.Linear(WIDTH, WIDTH)(mixed)).contiguous()
    gate, up = (nn.Linear(WIDTH, 4 * WIDTH)(nn.RMSNorm(WIDTH)(x)) for _ in range(2))
    return (x + nn.Linear(4 * WIDTH, WIDTH)((gate.silu() * up).contiguous())).contiguous()


def kernels() -> None:
    """Say what scheduling and code generation of decoder blocks cost."""
    with Context(DEV="NULL"):
        x = Tensor.empty(8, WIDTH)
        start = time.process_time()
        for _ in range(BLOCKS):
            x = block(x)
        linear, _ = x.linear_with_vars()
        scheduled = time.process_time()
        compile_linear(linear)
        done = time.process_time()
    print(f"{BLOCKS} blocks, {len(linear.src)} calls: CPU seconds: schedule "
          f"{scheduled - start:.2f}, code generation {done - scheduled:.2f}")  # fmt: skip


def copies() -> None:
    """Say what 256 bytes into a buffer and out of it cost."""
    buffer, calls = Buffer("PYTHON", 256, dtypes.uint8).allocate(), list[Callable[[], object]]()
    given, taken = memoryview(bytearray(256)), memoryview(bytearray(256))
    if hasattr(buffer, "copyin"):  # 0.13.0
        calls += [lambda: buffer.copyin(given), lambda: buffer.copyout(taken)]
    else:  # 0.14.0
        source, target = (Buffer("PYTHON", 256, dtypes.uint8, opaque=m) for m in (given, taken))
        calls += [lambda: buffer.copy_from(source), lambda: target.copy_from(buffer)]
    print(f"256 bytes in and out: {microseconds(calls):.1f} us")
    allocator, memory = buffer.allocator, buffer._buf
    direct = [lambda: allocator._copyin(memory, given), lambda: allocator._copyout(taken, memory)]
    print(f"by the allocator: {microseconds(direct):.1f} us")


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the CPU time of these calls in turn, in microseconds: the least of ten tries."""
    spent = []
    for _ in range(10):
        start = time.process_time()
        for _ in range(50):
            for call in calls:
                call()
        spent.append(time.process_time() - start)
    return 1e6 * min(spent) / 50


provide_compiler()
product()
if not hasattr(Buffer, "copyin"):  # 0.14.0
    CPUProgram.__call__ = run_parts
    product()
kernels()
copies()
