"""0002, 0015: what a queue hands to the GPU stays as it was until the GPU has read it."""

from types import SimpleNamespace

import pytest
from tests.patches.tegra.device import Tegra

COUNT = 20
RESUBMIT = f"""
d = Device["NV"]
add_one = program(d, 'extern "C" __global__ void add_one(int* x) {{ x[0] += 1; }}', "add_one")
x = d.allocator.alloc(4096, BufferSpec())
count, seen = x.cpu_view().view(fmt="I"), []
value = UOp.variable("value", 0, 0xffffffff, dtype=dtypes.uint32)
done = d.new_signal(value=0)
queue = d.hw_compute_queue_t().wait(done, value - 1).memory_barrier()
for _ in range(2): queue.exec(add_one, add_one.fill_kernargs((x,)), (1, 1, 1), (1, 1, 1))
queue.signal(done, value)
for i in range(1, {COUNT} + 1): queue.submit(d, {{value.expr: i}})
for i in range(1, {COUNT} + 1):
    done.wait(i)
    seen.append(count[0])
time.sleep(0.2)
say(seen=seen, last=count[0])
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_late_consumer_releases_its_own_value(tegra: Tegra, seed: int) -> None:
    # Each run of the queue adds two and releases its number: a wait for run i that comes back has
    # to find at least 2 i, and all of them together exactly 2 COUNT.
    run = tegra(RESUBMIT, "--delay", "20", "--seed", str(seed))
    assert [n for i, n in enumerate(run.said["seen"], 1) if n < 2 * i] == []
    assert run.said["last"] == 2 * COUNT


def test_graphs_and_jit_with_a_late_consumer(tegra: Tegra) -> None:
    run = tegra(
        """
@TinyJit
def step(x): return ((x + 1).contiguous() * 2).contiguous().sum(0).realize()
rng, right = np.random.default_rng(0), []
for _ in range(8):
    x = rng.integers(0, 9, (8, 8)).astype(np.int32)
    right.append(bool((step(Tensor(x).realize()).numpy() == ((x + 1) * 2).sum(0)).all()))
say(right=right)
""",
        *("--delay", "5", "--poison", "--order", "--place", "random"),
    )
    assert run.said["right"] == [True] * 8


@pytest.mark.parametrize("ring", ["kernargs_offset_allocator", "cmdq_allocator"])
def test_rings_of_arguments_wait(tegra: Tegra, ring: str) -> None:
    # The rings are made small, so that 300 launches go round several times before the first runs.
    run = tegra(f"""
d = Device["NV"]
source = 'extern "C" __global__ void mark(int* x, int i) {{{{ x[i] += 1; }}}}'
mark = program(d, source.replace("{{{{", "{{").replace("}}}}", "}}"), "mark")
x = d.allocator.alloc(4096, BufferSpec())
d.synchronize()
d.{ring}.size = 0x10000 if "{ring}" == "kernargs_offset_allocator" else 0x1000
block = d.new_signal(value=0)
d.hw_compute_queue_t().wait(block, 1).submit(d)
release_later(block, 1.0)
for i in range(300): mark(x, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(i,))
d.synchronize()
marks = x.cpu_view().view(size=1200, fmt="I")[:]
say(once=sum(m == 1 for m in marks))
""")
    assert run.said["once"] == 300


def test_a_ring_forgets_values_of_the_timeline_before(tegra: Tegra) -> None:
    # The timeline begins anew at 2^31. Then nothing that it had before is waited for.
    run = tegra("""
d = Device["NV"]
mark = program(d, 'extern "C" __global__ void mark(int* x, int i) { x[i] += 1; }', "mark")
x = d.allocator.alloc(4096, BufferSpec())
ctypes.memset(int(x.va_addr), 0, 4096)
d.synchronize()
d.kernargs_offset_allocator.size = ring = 16 * 4 * mark.kernargs_alloc_size
d.timeline_value = (1 << 31) + 1
d.timeline_signal.value = 1 << 31
for i in range(64): mark(x, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(i,))
d.synchronize()
block, first = d.new_signal(value=0), d.timeline_value
d.hw_compute_queue_t().wait(block, 1).submit(d)
for i in range(64, 80): mark(x, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(i,))
block.value = 1
d.synchronize()
say(first=first, once=sum(m == 1 for m in x.cpu_view().view(size=320, fmt="I")[:]))
""", HCQDEV_WAIT_TIMEOUT_MS="5000")  # fmt: skip
    assert run.said == {"first": 1, "once": 80}


class Ring:
    """A ring of 16 parts of 100 bytes; `waited` are the values that its allocations waited for."""

    def __init__(self) -> None:
        self.timeline_value, self.waited = 1, list[int]()
        self.timeline_signal = SimpleNamespace(wait=self.waited.append)
        from tinygrad.runtime.support.hcq import HCQRingAllocator  # 0015's

        self.ring = HCQRingAllocator(self, 1600, before_next_timeline=True)

    def launch(self, size: int) -> int:
        """Allocate for a launch and submit it; returns the place."""
        place: int = self.ring.alloc(size)
        self.timeline_value += 1
        return place


def test_a_launch_over_three_parts_is_waited_for_in_each() -> None:
    ring = Ring()
    places = [ring.launch(size) for size in (250, *[100] * 14)]
    assert places[-2:] == [1450, 0]  # the ring has gone round
    assert ring.waited[-1] == 1
    assert ring.launch(100) == 100 and ring.waited[-1] == 1  # the middle part of the first launch
    assert ring.launch(100) == 200 and ring.waited[-1] == 2  # its last part is the second's too


def test_a_launch_waits_for_its_middle_part_where_the_last_is_unused() -> None:
    ring = Ring()
    sizes = (*[100] * 15, 150, *[100] * 12)  # the one of 150 bytes does not fit into the last part
    places = [ring.launch(size) for size in sizes]
    assert places[14:16] == [1400, 0]
    assert ring.launch(250) == 1350 and ring.waited[-1] >= 15  # launch 15 lay at 1400


def test_what_is_not_submitted_is_not_waited_for() -> None:
    ring = Ring()
    for _ in range(40):  # a list of launches that is made before the first is submitted
        ring.ring.alloc(100)
    assert len(ring.waited) > 30 and max(ring.waited) == 0


def test_a_launch_over_two_parts_of_the_ring(tegra: Tegra) -> None:
    # A part of the ring is an allocation of `wide`, a bit more than one of `mark`: the last launch
    # of a part ends in the next one. When the ring has gone round, `wide` takes the whole part.
    run = tegra(
        """
d = Device["NV"]
source = 'extern "C" __global__ void NAME(int* x, int i PARAMS) { x[i] += 1; }'
mark = program(d, source.replace("NAME", "mark").replace("PARAMS", ""), "mark")
params = "".join(f", int p{n}" for n in range(64))
wide = program(d, source.replace("NAME", "wide").replace("PARAMS", params), "wide")
x = d.allocator.alloc(4096, BufferSpec())
ctypes.memset(int(x.va_addr), 0, 4096)
d.synchronize()
ring, part = d.kernargs_offset_allocator, wide.kernargs_alloc_size
ring.size, ring.ptr = ring.PARTS * part, 0
count = ring.size // mark.kernargs_alloc_size
one = dict(global_size=(1, 1, 1), local_size=(1, 1, 1))
for i in range(count): mark(x, vals=(i,), **one)
for i in range(count, count + 12): wide(x, vals=(i, *range(64)), **one)
d.synchronize()
marks = x.cpu_view().view(size=4 * (count + 12), fmt="I")[:]
say(part=part - mark.kernargs_alloc_size, count=count, once=sum(m == 1 for m in marks))
""",
        *("--delay", "20"),
    )
    assert (run.said["part"], run.said["count"]) == (0x100, 17)
    assert run.said["once"] == run.said["count"] + 12
