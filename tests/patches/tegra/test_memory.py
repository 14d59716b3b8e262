"""0003, 0004: unified memory is copied by the CPU, and no kernel loses memory it runs on."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.patches.tegra.device import Tegra

from orinbench.synth import shapes, write_model_of_zeros

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


def test_copies_need_no_channel_and_no_staging(tegra: Tegra) -> None:
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


def test_copy_between_cpu_and_gpu_in_a_jit(tegra: Tegra) -> None:
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


def test_local_memory_is_not_recycled_under_a_kernel(tegra: Tegra) -> None:
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
recycled = d.allocator.alloc(old.size, BufferSpec(gpu_only=True))
same, early = recycled.va_addr == old.va_addr, d.timeline_signal.value < queued
from nvgpusim.orin.simulation import Simulation
vm = next(f.vm for f in Simulation.current.kernel.files.values() if f.kind == "as")
vm.pages.mapping_at(int(recycled.va_addr)).gpu_bytes(0, recycled.size, 3)[:] = 0xdb  # l2.DIRTY
d.synchronize()
say(same=same, early=early, right=out.cpu_view().view(size=128, fmt="I")[:] == want)
"""
    )
    assert run.said == {"same": True, "early": False, "right": True}


@pytest.mark.parametrize(("board", "tpcs"), [("agx64", 8), ("agx32", 8), ("nano4", 4)])
def test_local_memory_that_cannot_grow_keeps_its_size(tegra: Tegra, board: str, tpcs: int) -> None:
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
    cached=d.shader_local_mem in d.allocator.cache[size, BufferSpec(gpu_only=True)])
""",
        *("--board", board),
    )
    assert run.said["error"].startswith("no local memory for a program that needs ")
    assert run.said["why"] == "no more"
    assert run.said["kept"] and not run.said["cached"]
    # A GPC that a board has is of 4 TPCs [hw_proj_ga10b.h]; those that it lacks keep their place.
    assert all(tpc * tpcs <= run.said["size"] for tpc, _ in run.said["given"])


def test_foreign_buffers_are_refused(tegra: Tegra) -> None:
    run = tegra("""
cpu = Buffer("CPU", 64, dtypes.int32).ensure_allocated()
try: Device["NV"].allocator.map(cpu._buf)
except RuntimeError as e: say(error=str(e))
try: Device["NV"].iface.alloc(4096, cpu_addr=0x7f0000000000)
except RuntimeError as e: say(host=str(e))
""")
    assert run.said["error"] == "nvgpu cannot map a buffer of CPU into NV"
    assert (
        run.said["host"] == "nvgpu cannot give host memory at 0x7f0000000000 an equal GPU address"
    )


# Buffers until there is no memory, freed ones in the cache: the OOM killer must find nothing to do.
FILL = """
d, size, bufs = Device["NV"], 256 << 20, []
for _ in range(2): bufs.append(d.allocator.alloc(size))
d.allocator.free(bufs.pop(), size)
errors, others = [], 0
for n in range(64):
    try: bufs.append(d.allocator.alloc(size + (n << 20)))
    except MemoryError as e: errors.append(str(e))
    else: others += 1
    if errors: break
left = d.iface.memory_available()
say(error=errors[0], others=others, left=left >> 20,
    cached=sum(map(len, d.allocator.cache.values())))
for n, buf in enumerate(bufs): d.allocator.free(buf, buf.size, BufferSpec(nolru=True))
"""


@pytest.mark.parametrize(("reserve", "release"), [("", "r36"), ("1024", "r35"), ("64", "r39")])
def test_memory_ends_in_an_error(tegra: Tegra, reserve: str, release: str) -> None:
    names = {"TEGRA_RESERVE_MB": reserve} if reserve else {}
    run = tegra(FILL, "--board", "nano4", "--profile", release, **names)
    said, kept = run.said, int(reserve or 256)
    # 4096 MB less 512 of the system, 256 of CMA, the reserve, and what an open device has.
    free = 4096 - 512 - 256 - kept - 256 - 19
    assert said["others"] == max(n for n in range(20) if sum(256 + i for i in range(n)) <= free)
    assert said["left"] < 256 + said["others"] and said["cached"] == 0
    assert f"beside the {kept} MB of TEGRA_RESERVE_MB, 0 are cached. Stop other" in said["error"]
    assert said["error"].startswith("no memory for ")


def test_a_reserve_larger_than_memory_leaves_none(tegra: Tegra) -> None:
    run = tegra("""
from tinygrad.helpers import getenv
from tinygrad.runtime.support.hcq import FileIOInterface
d = Device["NV"]
kb = {line.split()[0]: int(line.split()[1]) for line in open("/proc/meminfo")}
left = (kb["MemAvailable:"] - kb["CmaFree:"] << 10) - (256 << 20)
say(exact=d.iface.memory_available() == left)
real = FileIOInterface.read
def without_cma(*args): return "".join(l for l in real(*args).splitlines(True) if "Cma" not in l)
FileIOInterface.read = without_cma  # a kernel that has none does not say so
say(none=d.iface.memory_available() - left == kb["CmaFree:"] << 10)
FileIOInterface.read = real
os.environ["TEGRA_RESERVE_MB"] = "1000000"
kept = [d.allocator.alloc(3 << 20, BufferSpec()) for _ in range(2)]
for buf in kept: d.allocator.free(buf, 3 << 20, BufferSpec())
getenv.cache_clear()
try: d.iface.alloc(1 << 20)
except MemoryError as e: say(error=str(e), free=d.iface.memory_available())
""")
    assert run.said["exact"] and run.said["none"] and run.said["free"] == 0
    assert "1048576 bytes: 0 are available beside the 1000000 MB" in run.said["error"]
    assert f"TEGRA_RESERVE_MB, {6 << 20} are cached" in run.said["error"]


def test_copies_wait_for_the_kernels_before_them(tegra: Tegra) -> None:
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


# 4.5 GB in pieces of 512 MB, with a page cache full of files: one is open, another mapped. Either
# alone is not enough to make room for all in one buffer.
LOAD = """
import mmap
d, size, files = Device["NV"], 512 << 20, []
for name in ("open", "mapped too"):
    with open(name, "wb") as f: f.truncate(5 << 28)
    files.append(open(name, "rb"))
pages = mmap.mmap(files[1].fileno(), 5 << 28, access=mmap.ACCESS_READ)
files.pop().close()
first = pages[0]
def load(count, size):
    bufs, error = [], ""
    try:
        for _ in range(count): bufs.append(d.allocator.alloc(size, BufferSpec(nolru=True)))
    except MemoryError as e: error = str(e)
    for buf in bufs: d.allocator.free(buf, size, BufferSpec(nolru=True))
    return len(bufs), error
def resident():
    "Kilobytes of the mapped file that this process holds: the kernel gives up no such page."
    text = open("/proc/self/smaps").read().partition(os.path.realpath("mapped too"))[2]
    return int(text.partition("Rss:")[2].split()[0])
given, real = [], os.posix_fadvise
def spy(fd, *args):  # the kernel gives up no page that a process holds
    if os.readlink(f"/proc/self/fd/{fd}").endswith("mapped too"): given.append(resident())
    real(fd, *args)
os.posix_fadvise = spy
say(held=resident(), one=load(1, 9 * size), left=resident(), pieces=load(9, size),
    page=first == pages[0], far=load(1, 9 << 30), given=given)
"""


@pytest.mark.parametrize("end", ["release", "refuse"])
def test_weights_load_beside_a_full_page_cache(tegra: Tegra, end: str) -> None:
    run = tegra(LOAD, "--board", "nano8", "--memory-end", end)
    assert run.said["pieces"] == [9, ""] and run.said["page"]
    assert run.said["one"] == [1, ""]
    assert run.said["held"] > 0 and (end == "release" or run.said["left"] == 0)
    assert (len(run.said["given"]) > 0) == (end == "refuse") and not any(run.said["given"])
    assert run.said["far"][1].startswith(f"no memory for {9 << 30} bytes: ")


# A board of 512 MB, all in proportion to one of 8 GB; others keep the page cache full.
ENGINE = """
from types import SimpleNamespace
from nvgpusim.options import Options
from nvgpusim.orin.kernel import board_memory
Options.ram_bytes = property(lambda self: 512 << 20)
board_memory.SYSTEM, board_memory.CMA = board_memory.SYSTEM >> 4, board_memory.CMA >> 4
from orinllm import loader
from orinllm.batching import fused_runner
from orinllm.errors import DeviceFault
from orinllm.gpu import fused_executor, weights
fused_executor.FusedExecutor = lambda memory: SimpleNamespace(memory=memory)  # no kernels
fused_runner.FusedRunner = lambda executor, slots, deterministic: executor
d = Device["NV"]
d.iface._give_up_files = lambda: None
def load(part):
    weights._PART = part
    network = loader.Network.read("model.gguf", 64)
    try: runner = loader.make_runner(network, loader.plan_network(network, "NV"))
    except DeviceFault as e: return [0, str(e)]
    return [sum(buf.size for buf in d.iface.buffers.values()), ""]
part = weights._PART >> 4
say(one=load(1 << 40), parts=load(part))
"""


def test_the_engine_loads_where_one_buffer_is_refused(
    tegra: Tegra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shapes.SHAPES["tiny-qwen3moe"]
    shape = replace(base, n_layers=3, n_embd=768, n_ff=768, n_experts=64)
    monkeypatch.setitem(shapes.SHAPES, "large", shape)
    write_model_of_zeros(tmp_path / "model.gguf", "large", "Q6_K")
    size = (tmp_path / "model.gguf").stat().st_size
    assert 1 / 16 < size / 4.4e9 < 1 / 15
    release = ("--board", "nano8", "--memory-end", "refuse")
    run = tegra(ENGINE, *release, TEGRA_RESERVE_MB="16")
    got, error = run.said["one"]
    assert got == 0 and error.startswith("NV: failed: no memory for ") and "\n" not in error
    assert "drop_caches" in error
    assert run.said["parts"][1] == "" and run.said["parts"][0] > size * 0.99
