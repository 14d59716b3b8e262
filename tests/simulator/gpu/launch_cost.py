"""Cost of a launch from doorbell to semaphore: `python -m tests.simulator.gpu.launch_cost`.

A kernel of 20 instructions on 32 threads, by a pushbuffer of its own with an acquire and a release,
as tinygrad submits one. CPU time of the process, client's side included.
"""

from __future__ import annotations

import statistics
import time

from tests.simulator.gpu.rig import FRESH, SIGNAL, WAIT, Rig, launch, semaphore, u32, u64


def cost(launches: int = 1000) -> float:
    """CPU microseconds a launch."""
    rig = Rig(entries=2 * launches)
    rig.setup()
    out = rig.alloc(256)
    qmd = rig.qmd("k_set", u64(out) + u32(7, 32))
    rig.release(qmd, 5)
    ready, done = semaphore(rig.signal + 64, 0, WAIT), semaphore(rig.signal + 128, 1, SIGNAL)
    words = [*ready, *FRESH, *launch(qmd), *done]
    va = rig.alloc(4 * len(words))
    rig.at(va, len(words))[:] = words
    start = time.process_time()
    for _ in range(launches):
        rig.publish(va | len(words) << 42 | 1 << 41)
    rig.done()
    spent = time.process_time() - start
    assert (rig.at(out, 32) == 7).all()
    assert rig.gpu.statistics()["launches"] == launches
    rig.close()
    return spent / launches * 1e6


if __name__ == "__main__":
    cost(4000)  # after which the kernel is compiled
    print(f"{statistics.median(cost() for _ in range(5)):.0f} us of CPU time a launch")
