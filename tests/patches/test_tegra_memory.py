"""0003, 0004, 0016: unified memory is copied by the CPU, and no kernel loses memory it runs on."""

import pytest
from tests.patches.tegra import Tegra, tegra  # noqa: F401

STAGING = 64 << 20
# A depot of 256 ints that the index keeps out of registers; the loop makes it last.
SPILL = """
source = '''
extern "C" __global__ void spill(int* out, int n) {
  int a[256];
  for (int i = 0; i < 256; i++) a[i] = i + threadIdx.x;
  for (int k = 0; k < n; k++) for (int i = 0; i < 256; i++) a[(i * 7 + k) & 255] += 1;
  int sum = 0;
  for (int i = 0; i < 256; i++) sum += a[(i * n) & 255];
  out[threadIdx.x] = sum;
}'''
more = source.replace("spill", "spill_more").replace("256", "1024").replace("255", "1023")
d = Device["NV"]
"""


def test_copies_need_no_channel_and_no_staging(tegra: Tegra) -> None:  # noqa: F811
    run = tegra("""
import pathlib
path = pathlib.Path("weights.bin")
path.write_bytes(data := np.random.default_rng(0).bytes(300_001))
t = Tensor(path).to("NV").realize()
u = Tensor(x := np.random.default_rng(1).random(700_001, dtype=np.float32)).realize()
d = Device["NV"]
say(disk=t.numpy().tobytes() == data, back=bool((u.numpy() == x).all()),
    copy_queue=d.hw_copy_queue_t is not None, staging=len(d.allocator.b))
""")
    assert run.said == {"disk": True, "back": True, "copy_queue": False, "staging": 0}
    assert run.calls("ioctl OPEN_CHANNEL") == 1
    assert run.report["peak_bytes"] < STAGING // 2


def test_copy_between_cpu_and_gpu_in_a_jit(tegra: Tegra) -> None:  # noqa: F811
    run = tegra("""
@TinyJit
def there_and_back(x):
    y = (x + 1).realize()
    z = (y.to("CPU") * 2).realize()
    return (z.to("NV") + 3).realize()
right = []
for i in range(5):
    x = np.arange(64, dtype=np.int32) * i
    got = there_and_back(Tensor(x).realize()).numpy()
    right.append(bool((got == (x + 1) * 2 + 3).all()))
say(right=right)
""")
    assert run.said["right"] == [True] * 5


def test_local_memory_is_not_recycled_under_a_kernel(tegra: Tegra) -> None:  # noqa: F811
    # The block that the first program spills into is the next of its size: it must not be written
    # before the launch that waits for `block` has run.
    run = tegra(
        SPILL
        + """
spill, out = program(d, source, "spill"), d.allocator.alloc(4096, BufferSpec())
spill(out, global_size=(1, 1, 1), local_size=(32, 1, 1), vals=(3,))
d.synchronize()
want = out.cpu_view().view(size=128, fmt="I")[:]
ctypes.memset(int(out.va_addr), 0, 128)
old, block = d.shader_local_mem, d.new_signal(value=0)
d.hw_compute_queue_t().wait(block, 1).submit(d)
spill(out, global_size=(1, 1, 1), local_size=(32, 1, 1), vals=(3,))
release_later(block, 1.0)
lib, queued = d.compiler.compile(more), d.timeline_value - 1
d._ensure_has_local_memory(d.slm_per_thread * 4)
recycled = d.allocator.alloc(old.size)
same, early = recycled.va_addr == old.va_addr, d.timeline_signal.value < queued
ctypes.memset(int(recycled.va_addr), 0xdb, recycled.size)
d.synchronize()
say(same=same, early=early, right=out.cpu_view().view(size=128, fmt="I")[:] == want)
"""
    )
    assert run.said == {"same": True, "early": False, "right": True}


def test_local_memory_that_cannot_grow_keeps_its_size(tegra: Tegra) -> None:  # noqa: F811
    run = tegra(
        SPILL
        + """
from tinygrad.runtime.ops_nv import NVComputeQueue
given, setup, alloc = [], NVComputeQueue.setup, d.allocator.alloc
def spy(self, **kw):
    if "local_mem" in kw: given.append((kw["local_mem_tpc_bytes"], kw["local_mem"]))
    return setup(self, **kw)
NVComputeQueue.setup = spy
program(d, source, "spill")
size, per_thread = d.shader_local_mem.size, d.slm_per_thread
def too_much(n, options=None):
    if n > size: raise MemoryError("no more")
    return alloc(n, options)
d.allocator.alloc = too_much
try: program(d, more, "spill_more")
except RuntimeError as e: say(error=str(e), why=str(e.__cause__))
say(given=given, kept=d.slm_per_thread == per_thread, size=d.shader_local_mem.size,
    cached=d.shader_local_mem in d.allocator.cache[size, None], tpcs=d.num_gpcs * d.num_tpc_per_gpc)
"""
    )
    assert run.said["error"].startswith("no local memory for a program that needs ")
    assert run.said["why"] == "no more"
    assert run.said["kept"] and not run.said["cached"]
    assert all(tpc * run.said["tpcs"] <= run.said["size"] for tpc, _ in run.said["given"])


def test_foreign_buffers_are_refused(tegra: Tegra) -> None:  # noqa: F811
    run = tegra("""
cpu = Buffer("CPU", 64, dtypes.int32).ensure_allocated()
try: Device["NV"].allocator.map(cpu._buf)
except RuntimeError as e: say(error=str(e))
""")
    assert run.said["error"] == "nvgpu cannot map a buffer of CPU into NV"


# Buffers until there is no memory, freed ones in the cache: the OOM killer must find nothing to do.
FILL = """
d, size, bufs = Device["NV"], 256 << 20, []
for _ in range(2): bufs.append(d.allocator.alloc(size))
d.allocator.free(bufs.pop(), size)
errors, others = [], 0
for n in range(64):
    try: bufs.append(d.allocator.alloc(size + (n << 20)))
    except MemoryError as e: errors.append(str(e.__cause__))
    else: others += 1
    if errors: break
left = d.iface.memory_available()
say(error=errors[0], others=others, left=left >> 20,
    cached=sum(map(len, d.allocator.cache.values())))
for n, buf in enumerate(bufs): d.allocator.free(buf, buf.size, BufferSpec(nolru=True))
"""


@pytest.mark.parametrize(("reserve", "release"), [("", "r36"), ("1024", "r35"), ("64", "r38")])
def test_memory_ends_in_an_error(tegra: Tegra, reserve: str, release: str) -> None:  # noqa: F811
    names = {"TEGRA_RESERVE_MB": reserve} if reserve else {}
    run = tegra(FILL, "--board", "nano4", "--profile", release, **names)
    said, kept = run.said, int(reserve or 256)
    # 4096 MB less 512 of the system, the reserve, and what an open device has.
    free = 4096 - 512 - kept - 256 - 19
    assert said["others"] == max(n for n in range(20) if sum(256 + i for i in range(n)) <= free)
    assert said["left"] < 256 + said["others"] and said["cached"] == 0
    assert said["error"].endswith(f"beside the {kept} MB of TEGRA_RESERVE_MB, 0 are cached")
    assert said["error"].startswith("no memory for ")


def test_a_reserve_larger_than_memory_leaves_none(tegra: Tegra) -> None:  # noqa: F811
    run = tegra("""
from tinygrad.helpers import getenv
d = Device["NV"]
os.environ["TEGRA_RESERVE_MB"] = "1000000"
getenv.cache_clear()
try: d.iface.alloc(1 << 20)
except MemoryError as e: say(error=str(e), free=d.iface.memory_available())
""")
    assert run.said["free"] == 0
    assert "1048576 bytes: 0 are available beside the 1000000 MB" in run.said["error"]


def test_copies_wait_for_the_kernels_before_them(tegra: Tegra) -> None:  # noqa: F811
    # The CPU writes what a late kernel has yet to read, and reads what it has yet to write.
    run = tegra(
        """
d = Device["NV"]
add = program(d, 'extern "C" __global__ void add(int* y, int* x) { y[0] = x[0] + 1; }', "add")
x, y = (d.allocator.alloc(4096, BufferSpec()) for _ in range(2))
got = []
for i in range(12):
    d.allocator._copyin(x, memoryview(bytearray(struct.pack("i", 100 * i))))
    add(y, x, global_size=(1, 1, 1), local_size=(1, 1, 1))
    if i % 3 == 0: d.allocator._copyin(x, memoryview(bytearray(4)))
    elif i % 3 == 1: d.allocator._as_buffer(x)[:4] = bytes(4)
    d.allocator._copyout(memoryview(out := bytearray(4)), y)
    got.append(struct.unpack("i", out)[0])
say(got=got)
""",
        *("--delay", "40"),
    )
    assert run.said["got"] == [100 * i + 1 for i in range(12)]


# The GPU has read a large buffer, so that its L2 may keep lines of it; then the CPU writes it.
REWRITE = """
d, size = Device["NV"], 1 << 20
first = program(d, 'extern "C" __global__ void first(int* y, int* x) { y[0] = x[0]; }', "first")
x, y = d.allocator.alloc(size), d.allocator.alloc(4096)
data, got = memoryview(bytearray(size)), []
for i in range(4):
    data.cast("I")[0] = i
    if i % 2: d.allocator._as_buffer(x)[:] = data
    else: d.allocator._copyin(x, data)
    first(y, x, global_size=(1, 1, 1), local_size=(1, 1, 1), wait=True)
    got.append(y.cpu_view().view(size=4, fmt="I")[0])
for _ in range(5): first(y, x, global_size=(1, 1, 1), local_size=(1, 1, 1), wait=True)
from nvgpusim.shim import Simulation
vm = next(f.vm for f in Simulation.current.kernel.files.values() if f.kind == "as")
say(got=got, cached={hex(m.va): [m.size, bool(m.flags & 4)] for m in vm.pages.mappings()},
    x=hex(x.va_addr), y=hex(y.va_addr))
"""


@pytest.mark.parametrize("l2", ["1", "0"])
def test_the_gpu_sees_what_the_cpu_writes(tegra: Tegra, l2: str) -> None:  # noqa: F811
    run = tegra(REWRITE, **({} if l2 == "1" else {"TEGRA_L2": l2}))  # on by default
    assert run.said["got"] == [0, 1, 2, 3]
    assert run.said["cached"][run.said["x"]] == [1 << 20, l2 == "1"]
    # Rings, signals, arguments and small buffers are volatile; local memory is the GPU's alone.
    cached = sorted(size for size, cached in run.said["cached"].values() if cached)
    assert len(cached) == (2 if l2 == "1" else 0) and (l2 == "0" or cached[0] == 1 << 20)
    assert run.calls("ioctl FLUSH_L2") == (4 if l2 == "1" else 0)


# The GPU keeps lines of all of x; then the CPU writes parts: a view, a view of it, a part by the
# allocator, memory that a file is read into; and a kernel overwrites what is kept.
PARTS = """
d, n = Device["NV"], 64 << 10
kernel = program(d, r'''extern "C" __global__ void copy(int* y, int* x) {
  int i = blockIdx.x * 256 + threadIdx.x; y[i] = x[i]; }''', "copy")
x, y, z = (Buffer("NV", n, dtypes.int32).ensure_allocated() for _ in range(3))
want, got = np.zeros(n, np.int32), []
def copy(to, source):
    launch = dict(global_size=(n // 256, 1, 1), local_size=(256, 1, 1), wait=True)
    kernel(to._buf, source._buf, **launch)
def part(at, size, value):
    want[at : at + size] = value
    return memoryview(np.full(size, value, np.int32)).cast("B")
def check():
    copy(y, x)
    got.append(bool((np.frombuffer(y.as_memoryview(), np.int32) == want).all()))
x.copyin(part(0, n, 0))
check()
view = x.view(4096, dtypes.int32, 4 * 1000).ensure_allocated()
view.copyin(part(1000, 4096, 1))
check()
view.view(8, dtypes.int32, 4 * 100).ensure_allocated().copyin(part(1100, 8, 2))
check()
d.allocator._copyin(x._buf.offset(4 * 33, 4), part(33, 1, 3))
check()
d.allocator._as_buffer(x._buf.offset(4 * 50000, 40))[:] = part(50000, 10, 4)
check()
x.copyout(memoryview(data := bytearray(4 * n)))
got.append(bool((np.frombuffer(data, np.int32) == want).all()))
z.copyin(part(0, n, 5))
copy(y, x)
copy(x, z)
check()
say(got=got)
"""


@pytest.mark.parametrize("options", [(), ("--sanitize", "all")])
def test_the_gpu_sees_parts(tegra: Tegra, options: tuple[str, ...]) -> None:  # noqa: F811
    run = tegra(PARTS, *options)
    assert run.said["got"] == [True] * 7
    assert run.calls("ioctl FLUSH_L2") == 6  # one for each write by the CPU


def test_weights_and_local_memory_stay_in_the_l2(tegra: Tegra) -> None:  # noqa: F811
    run = tegra("""
x = np.random.default_rng(0).random((256, 256), dtype=np.float32)
w = Tensor(x).realize()
@TinyJit
def step(v): return (v @ w).realize()
right = []
for i in range(6):
    v = np.random.default_rng(i).random(256, dtype=np.float32)
    right.append(bool(np.allclose(step(Tensor(v).realize()).numpy(), v @ x, atol=1e-3)))
say(right=right)
""")
    assert run.said["right"] == [True] * 6
    assert run.calls("ioctl FLUSH_L2") == 1  # for the weights, none for the vectors
