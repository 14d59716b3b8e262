"""What a tinygrad release costs on the host: `PARALLEL=0 CCACHE=0 python docs/examples/release.py`.

CPU seconds, which other programs on the machine do not change: of a product on the CPU device by
thread, and of scheduling and code generation for decoder blocks, where nothing is computed.
"""

import time
from pathlib import Path

from tinygrad import Context, Tensor, TinyJit, nn
from tinygrad.engine.realize import compile_linear

from orinllm.compiler import provide_compiler

SIZE, CALLS, BLOCKS, WIDTH = 1024, 5, 2, 1024


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


provide_compiler()
product()
kernels()
