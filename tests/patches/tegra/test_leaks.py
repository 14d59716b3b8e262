"""0001: what a process takes it gives back: allocations, captures, devices that close and open."""

from tests.patches.tegra.device import Tegra

FDS = """
def fds(): return len(os.listdir("/proc/self/fd"))
"""


def test_a_thousand_allocations(tegra: Tegra) -> None:
    run = tegra(
        FDS
        + """
d, options, fail = Device["NV"], BufferSpec(nolru=True), FailAt()
sizes = [int(n) for n in np.random.default_rng(0).integers(1, 1 << 18, 1000)]
before, held, kept = fds(), fail.held(), []
for n in sizes:
    kept.append((d.allocator.alloc(n, options), n))
    if len(kept) > 20: d.allocator.free(*kept.pop(n % 20), options)
for buf, n in kept: d.allocator.free(buf, n, options)
say(fds=fds() - before, same=fail.held() == held)
"""
    )
    assert run.said == {"fds": 0, "same": True}
    assert run.calls("ioctl AS_UNMAP_BUFFER") >= 1000
    assert run.calls("ioctl NVMAP_FREE") == run.calls("ioctl NVMAP_CREATE_64")


def test_thirty_captures(tegra: Tegra) -> None:
    run = tegra(
        FDS
        + """
d, fail = Device["NV"], FailAt()
x = Tensor(np.arange(64, dtype=np.int32)).realize()
def capture(i):
    jit = TinyJit(lambda x: ((x + i).contiguous() * 2).contiguous().realize())
    return [jit(x).numpy().tolist() for _ in range(3)][-1]
def taken():
    gc.collect()
    d.allocator.free_cache()
    return [fds(), len(d.signal_pool[d.peer_group]), fail.held()]
capture(-1)
before = taken()
right = [capture(i % 4) == [(n + i % 4) * 2 for n in range(64)] for i in range(30)]
say(right=all(right), before=before, after=taken())
"""
    )
    assert run.said["right"]
    # Programs stay in tinygrad's cache: the four kernels that add, the one that multiplies.
    before, after = run.said["before"], run.said["after"]
    assert after[:2] == before[:2]
    mapped = [int(next(h for h in held if "GPU mappings" in h).split()[0]) for _, _, held in
              (before, after)]  # fmt: skip
    assert mapped[1] - mapped[0] == 4


def test_devices_close_and_open(tegra: Tegra) -> None:
    # Graphs of a closed device live on, with the collector off: their signals' page was unmapped.
    run = tegra("""
from tinygrad.runtime.ops_nv import NVDevice
gc.disable()
fail, held, kept, values, pages = FailAt(), [], [], [], []
for i in range(40):
    dev = NVDevice("NV")
    kept.append(dev.new_signal(value=i))
    dev.hw_compute_queue_t().signal(dev.timeline_signal, dev.next_timeline()).submit(dev)
    dev.finalize()
    values.append(kept[-1].value)
    pages.append(sum("usermode" in line for line in open("/proc/self/maps")))
    with fail.kernel.lock:
        fail.kernel.release_closed_files()
        held += fail.kernel.leak_lines()
kept[0].wait(1 << 40)
known = sum(map(len, NVDevice.peer_groups.values())) + sum(map(len, NVDevice.signal_pages.values()))
say(held=held, reached=min(values) == (1 << 64) - 1, pages=pages[-1] - pages[0], known=known)
""")
    assert run.said == {"held": [], "reached": True, "pages": 0, "known": 0}  # pages: doorbells
    assert run.calls("open ctrl") == run.calls("close ctrl") == 40


def test_more_buffers_than_descriptors(tegra: Tegra) -> None:
    # They are alive when the process ends; closing the device gives them back.
    run = tegra(
        FDS
        + """
import resource
d, options = Device["NV"], BufferSpec(nolru=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before, most, bufs = fds(), 0, []
for i in range(1000):
    bufs.append(d.allocator.alloc(4096, options))
    bufs[-1].cpu_view().view(fmt="I")[0] = i
    if i % 100 == 0: most = max(most, fds())
say(most=most - before, right=[b.cpu_view().view(fmt="I")[0] for b in bufs] == [*range(1000)])
"""
    )
    assert run.said == {"most": 0, "right": True}
