"""0028: what the collector frees in a thread of the CPU device does not wait for that thread."""

import json

import pytest
from tests.patches.conftest import Python
from tests.patches.tegra.device import Tegra

# A captured graph of four kernels, and a task of the CPU device that drops it and collects.
SCRIPT = """
import gc, json, os, sys, threading, time, weakref
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import dtypes
from tinygrad.runtime.graph.hcq import HCQGraph
from tinygrad.runtime.support import hcq

def watch():
    "Say when nothing moves: who waits for itself polls, with 3 % of a processor at most."
    def spent(): return sum(os.times()[:4])  # a compiler's time, too
    while True:
        before = spent()
        time.sleep(15)
        if spent() - before < 1: print("IT HANGS", file=sys.stderr, flush=True)
threading.Thread(target=watch, daemon=True).start()
gc.disable()
cpu = Device["CPU"]
def captured():
    @TinyJit
    def step(x, z): return tuple(((t + 1).contiguous() * 2).realize() for t in (x, z))
    x = Tensor([1.0, 2.0]).realize(), Tensor([5.0], device="CPU").realize()
    for _ in range(4): out = [t.tolist() for t in step(*x)]
    graph = next(o for o in gc.get_objects() if isinstance(o, HCQGraph))
    return step, x, out, weakref.ref(graph)
freed = []
def spy(allocator):
    do = allocator._free
    def free(buf, options=None):
        freed.append((allocator.dev.device, threading.current_thread().name))
        do(buf, options)
    allocator._free = free
step, x, out, graph = captured()
for device in graph().devices: spy(device.allocator)
held, names = {"step": step}, {d.device for d in graph().devices}
def other(): return (x[1] * 3).contiguous().realize()
other()
gate = threading.Event()
def drop(tid):
    gate.wait(10)
    held.clear()
    gc.collect()
    hcq.free_what_workers_left()  # here, too, it has to be left: a loop without an end
del step
"""
WAYS = {
    "freed in the worker": "cpu.tasks.put([drop, 1, 0])",
    "its replay is queued": "cpu.tasks.put([drop, 1, 0]); y = held['step'](*x)",
    "in a thread of the pool": "cpu.tasks.put([lambda tid: tid and drop(tid), 2, 0])",
    "a buffer": """
held["buffer"] = b = Buffer("CPU", 64, dtypes.int, options=BufferSpec(nolru=True)).allocate()
del b
cpu.tasks.put([drop, 1, 0])
""",
}
END = """
later = other()  # behind the task, so that the device is not idle when that frees
gate.set()
cpu.tasks.join()
Tensor([3.0]).realize()
cpu.synchronize()
x = None
gc.collect()
print(json.dumps([out, graph() is None, sorted({d for d, _ in freed}), sorted(names),
    sorted({t for _, t in freed[:len(names)]})]))
"""


def after(text: str) -> list[object]:
    out, gone, devices, wanted, _ = answer = json.loads(text.splitlines()[-1])
    assert out == [[4.0, 6.0], [12.0]] and gone and devices == wanted, answer
    return list(answer)


@pytest.mark.parametrize("way", WAYS)
def test_the_cpu_device_does_not_wait_for_itself(python: Python, way: str) -> None:
    done = python("-c", SCRIPT + WAYS[way] + END, DEV="CPU", give_up="IT HANGS")
    assert done.returncode == 0, done.stderr[-2000:]
    after(done.stdout)


@pytest.mark.parametrize("way", list(WAYS)[:3])
def test_mixed_graphs_leave_nothing_on_the_gpu(tegra: Tegra, way: str) -> None:
    run = tegra(
        SCRIPT
        + WAYS[way]
        + END.replace("print(json.dumps(", "say(answer=(").replace("])]))", "])])"),
        give_up="IT HANGS",
    )
    answer = after(json.dumps(run.said["answer"]))
    assert answer[3] == ["CPU", "NV"]
