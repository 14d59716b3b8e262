"""0001: TegraIface opens the device that nvgpu gives, says why where it cannot, leaves nothing."""

import pytest
from tests.patches.tegra.device import Tegra

COMPUTE = """
x = np.random.default_rng(1).random((32, 32), dtype=np.float32)
t = Tensor(x).realize()
d = Device["NV"]
say(device=Device.DEFAULT, iface=type(d.iface).__name__, arch=d.arch,
    sms=[d.num_sms, d.iface.num_sms],
    close=bool(np.allclose((t @ t).numpy(), x @ x, atol=1e-4)))
"""
WINDOWS = range(0xFD00000000, 0xFF00000000)


def test_opens_by_name_in_any_case(tegra: Tegra) -> None:
    run = tegra(COMPUTE, DEV="teGRA+NV")
    opened = {"device": "NV", "iface": "TegraIface", "arch": "sm_87", "sms": [16, 16]}
    assert run.said == opened | {"close": True}


def test_is_the_default_where_its_node_exists(tegra: Tegra) -> None:
    run = tegra(
        """
try: Device["NV:1"]
except RuntimeError as e: second = str(e)
say(second=second, device=Device.DEFAULT, iface=type(Device["NV"].iface).__name__)
""",
        DEV="",
    )
    assert run.said["device"] == "NV" and run.said["iface"] == "TegraIface"
    assert run.said["second"] == "NV:1 does not exist, a Tegra has one GPU: use NV:0"


def test_a_number_is_no_part_of_dev(tegra: Tegra) -> None:
    run = tegra(
        'try: Device["NV"].renderer\nexcept RuntimeError as e: say(error=str(e))', DEV="NV:1"
    )
    assert run.said["error"] == (
        "NV has no renderer '1' (DEV takes no device's number, Device[...] does)"
    )


@pytest.mark.parametrize(
    ("release", "board", "sms", "options"),
    [
        ("r35", "agx32", 14, ()),
        ("r36", "nano4", 4, ()),
        ("r39", "agx64", 16, ("--order",)),  # stores reach the GPU in order
    ],
)
def test_releases_of_l4t(
    tegra: Tegra, release: str, board: str, sms: int, options: tuple[str, ...]
) -> None:
    run = tegra(COMPUTE, "--profile", release, "--board", board, "--strict", *options)
    assert run.said["close"] and run.said["sms"] == [sms, sms]
    assert run.calls("ioctl TSG_CREATE_SUBCONTEXT") == (0 if release == "r35" else 1)


def test_no_access_says_which_group(tegra: Tegra) -> None:
    script = """
try: Device["NV"]
except PermissionError as e: say(error=str(e))
"""
    for place in ("OPEN_CTRL", "OPEN_NVMAP"):
        error = tegra(script, "--inject", f"EACCES@{place}", DEV="NV").said["error"]
        assert "group" in error and "video" in error and "/dev/nv" in error


# GET_CHARACTERISTICS is 'G' 5; in r36 flags are a u64 at 64, the compute class a u32 at 80
# (nvgpu uapi, nvgpu-ctrl.h).
CHARACTERISTICS = """
from tinygrad.runtime.ops_nv import NVDevice
real, found = fcntl.ioctl, []
def changed(fd, request, arg):
    result = real(fd, request, arg)
    if request & 0xffff == 0x4705:
        size, at = struct.unpack("QQ", bytes(arg))
        exec(change)
    return result
fcntl.ioctl = changed
for change in CHANGES:
    try:
        dev = NVDevice("NV")
        found.append(dev.num_sms)
        dev.finalize()
    except RuntimeError as e: found.append(str(e))
say(found=found)
"""


def opened(tegra: Tegra, changes: list[str], *options: str) -> list[int | str]:
    """SMs or an error: the answer of opening to each change of what nvgpu says of itself."""
    run = tegra(f"CHANGES = {changes}\n{CHARACTERISTICS}", *options)
    return list(run.said["found"])


def without(*bits: int) -> str:
    """The change that clears flags."""
    off = sum(1 << bit for bit in bits)
    return f"ctypes.c_uint64.from_address(at + 64).value &= ~{off:#x}"


def test_what_nvgpu_must_say_of_itself(tegra: Tegra) -> None:
    lacks = {
        (30,): "usermode submit",
        (22,): "TSG subcontexts",
        (20,): "IO coherence",
        (18, 19): "deterministic submit",
        (20, 22): "TSG subcontexts, IO coherence",
    }
    others = "0xc6c0", "0xcbc0"  # AMPERE_COMPUTE_A, HOPPER_COMPUTE_A
    changes = [
        *(without(*bits) for bits in (*lacks, (18,), (19,))),
        *(f"ctypes.c_uint32.from_address(at + 80).value = {number}" for number in others),
    ]
    found = opened(tegra, changes)
    assert found[:5] == [
        f"nvgpu lacks {name}: a driver of L4T r35 or newer on an Orin is needed"
        for name in lacks.values()
    ]
    assert found[5:7] == [16, 16]  # one kind of deterministic submit is enough
    for number, error in zip(others, found[7:], strict=True):
        assert f"{number} is not ga10b's 0xc7c0" in str(error)


def test_newer_characteristics_have_more_fields(tegra: Tegra) -> None:
    sizes = 400, 336, 320, 304
    changes = [f"ctypes.c_uint64.from_buffer(arg).value = {size}" for size in sizes]
    assert opened(tegra, changes, "--profile", "r39") == [16, 16] + [
        f"unknown nvgpu: characteristics of {size} bytes, expected 312 (r35), "
        "328 (r36) or at least 336 (r38, r39)"
        for size in (320, 304)
    ]


def test_legacy_node_where_it_is_the_only_one(tegra: Tegra) -> None:
    run = tegra("""
from tinygrad.runtime.support.nv.tegra import TegraIface
real, exists, opened = os.open, os.path.exists, []
def without_v2(path, flags, *args, **kwargs):
    if str(path).startswith("/dev/nvgpu/"): raise FileNotFoundError(errno.ENOENT, "none", path)
    if str(path).startswith("/dev/"): opened.append([path, flags == os.O_RDWR | os.O_CLOEXEC])
    return real(path, flags, *args, **kwargs)
os.open = without_v2
os.path.exists = lambda path: not str(path).startswith("/dev/nvgpu/") and exists(path)
say(present=TegraIface.is_present())
say(sum=(Tensor.ones(4).contiguous().realize() + 1).sum().item(), opened=opened)
""")
    nodes = ["/dev/nvhost-ctrl-gpu", "/dev/nvmap"]  # read and written, and no child's
    assert run.said == {"sum": 8, "present": True, "opened": [[node, True] for node in nodes]}


@pytest.mark.parametrize("release", ["r35", "r36"])
def test_what_nvgpu_and_nvmap_are_asked_for(tegra: Tegra, release: str) -> None:
    # Memory with the tag 0x900, mapped by pages of 4 KiB without compression; one asynchronous
    # subcontext, as CUDA's own; a space of unified addresses (2) whose kernel region, 4 GiB
    # behind it, ends below the windows. Layouts: nvmap.h, nvgpu-as.h, nvgpu-ctrl.h.
    run = tegra("""
asked, real = {"alloc": set(), "map": set(), "space": set()}, fcntl.ioctl
def spy(fd, request, arg):
    if request & 0xffff == 0x4708: asked["space"].add(struct.unpack_from("=4I2Q", bytes(arg))[2:])
    if request & 0xffff == 0x4e03: asked["alloc"].add(struct.unpack_from("=4I", bytes(arg))[2:])
    if request & 0xffff == 0x4107: asked["map"].add(struct.unpack_from("=IhhII", bytes(arg))[1:3]
                                                    + struct.unpack_from("=4I", bytes(arg))[3:])
    return real(fd, request, arg)
fcntl.ioctl = spy
d = Device["NV"]
opened, asked["alloc"] = asked["alloc"], set()
d.allocator.alloc((8 << 20) - 4096, BufferSpec())
from nvgpusim.orin.kernel.channel import ChannelFile
from nvgpusim.orin.simulation import Simulation
files = Simulation.current.kernel.files.values()
say(opened=sorted(opened), veid=[f.veid for f in files if isinstance(f, ChannelFile)],
    **{name: sorted(values) for name, values in asked.items()})
""", "--profile", release)  # fmt: skip
    ((flags, _, start, end),) = run.said.pop("space")
    small, large = (
        [0x09000002, align] for align in (4096, 2 << 20)
    )  # whole large pages from 8 MiB
    asked = {"opened": [small, large], "alloc": [small]}
    assert run.said == asked | {"map": [[-1, 0, 0x1000]], "veid": [1]}
    assert flags == 2 and start > 0 and end + (4 << 30) <= WINDOWS.start


def test_what_has_no_counterpart_is_refused(tegra: Tegra) -> None:
    run = tegra("""
iface, errors = Device["NV"].iface, []
for call in (iface.rm_alloc, iface.rm_control):
    try: call(0, 0x1234)
    except RuntimeError as e: errors.append(str(e))
say(errors=errors)
""")
    assert run.said["errors"] == [
        "rm_alloc of class 0x1234 has no counterpart in nvgpu",
        "rm_control 0x1234 has no counterpart in nvgpu",
    ]


@pytest.mark.parametrize(("board", "sms"), [("nx16", 8), ("nano8", 8)])
def test_sms_are_those_that_the_board_has(tegra: Tegra, board: str, sms: int) -> None:
    run = tegra('d = Device["NV"]; say(sms=[d.num_sms, d.iface.num_sms])', "--board", board)
    assert run.said["sms"] == [sms, sms]


def test_all_memory_is_cached(tegra: Tegra) -> None:
    # 2 is nvmap's INNER_CACHEABLE; reads of write-combined memory are 17 times slower on an Orin.
    run = tegra("""
from nvgpusim.orin.simulation import Simulation
t = (Tensor.ones(1 << 20).contiguous().realize() + 1).realize()
say(kinds=sorted({buf.attribute for buf in Simulation.current.kernel.dmabufs.values()}))
""")
    assert run.said["kinds"] == [2]


def test_no_address_is_free(tegra: Tegra) -> None:
    run = tegra("""
from tinygrad.runtime.support.hcq import FileIOInterface
d, real, tries = Device["NV"], FileIOInterface.mmap, []
def taken(self, start, size, prot, flags, offset):
    if flags & 0x100000:
        tries.append(start)
        raise FileExistsError(errno.EEXIST, "taken")
    return real(self, start, size, prot, flags, offset)
fail = FailAt()
before, FileIOInterface.mmap = fail.held(), taken
try: d.iface.alloc(4096)
except MemoryError as e: say(error=str(e))
say(tries=len(tries), different=len(set(tries)), held=fail.held() == before)
""")
    assert run.said["error"].startswith("no address for 4096 bytes is free on both CPU and GPU")
    assert (run.said["tries"], run.said["different"], run.said["held"]) == (16, 16, True)


def test_interrupted_calls_are_repeated(tegra: Tegra) -> None:
    # ioctl only: what open and close do at EINTR is Python's business
    names = ("GET_CHARACTERISTICS", "ALLOC_AS", "OPEN_TSG", "NVMAP_*", "AS_*", "TSG_*", "CHANNEL_*")
    run = tegra(COMPUTE, *(a for n in names for a in ("--inject", f"EINTR@{n}")))
    assert run.said["close"] and len(run.report["injected"]) == len(names)


def test_no_memory_frees_the_cache_first(tegra: Tegra) -> None:
    run = tegra("""
d = Device["NV"]
def cached(): return sum(len(bufs) for bufs in d.allocator.cache.values())
buf = d.allocator.alloc(1 << 20, options := BufferSpec())
d.allocator.free(buf, 1 << 20, options)
before, fail = cached(), FailAt(errno.ENOMEM)
fail.arm(2)  # CREATE is the first, ALLOC the second
got = d.allocator.alloc(2 << 20, options)
fail.arm(0)
say(before=before, after=cached(), size=got.size)
d.allocator.free(got, 2 << 20, options)
try:
    fail.code = errno.EIO
    fail.arm(2)
    d.iface.alloc(4 << 20)
except RuntimeError as e: say(error=str(e))
""")
    assert (run.said["before"], run.said["after"], run.said["size"]) == (1, 0, 2 << 20)
    assert run.said["error"] == "nvgpu NVMAP_ALLOC failed: EIO (Input/output error)"


def test_closed_device_leaves_nothing_and_opens_again(tegra: Tegra) -> None:
    run = tegra("""
from tinygrad.runtime.ops_nv import NVDevice
errors = []
for _ in range(5):
    dev = NVDevice("NV")
    buf = dev.allocator.alloc(1 << 20, BufferSpec())
    dev.allocator._copyin(buf, memoryview(bytearray(b"x" * (1 << 20))))
    dev.finalize()
    try: dev.allocator._copyin(buf, memoryview(bytearray(8)))
    except RuntimeError as e: errors.append(str(e))
    try: dev.hw_compute_queue_t().signal(dev.timeline_signal, 1).submit(dev)  # its ring is unmapped
    except RuntimeError as e: errors.append(str(e))
    try: dev.iface.alloc(4096)
    except RuntimeError as e: errors.append(str(e))
    dev.iface.free(buf)  # nothing is left of it: no error, and nothing asked of a closed file
say(errors=errors)
""")
    assert run.said["errors"] == ["NV is closed"] * 15
    assert run.calls("open ctrl") == run.calls("close channel") == run.calls("close as") == 5
    assert run.report["peak_bytes"] < 40 << 20


def test_channels_close_before_what_they_use(tegra: Tegra) -> None:
    run = tegra("""
from nvgpusim.orin.simulation import Simulation
from tinygrad.runtime.ops_nv import NVDevice
kernel, dev, closed, real = Simulation.current.kernel, NVDevice("NV"), [], os.close
def spy(fd):
    if kind := getattr(kernel.find_device_or_dmabuf(fd), "kind", ""): closed.append(kind)
    real(fd)
os.close = spy
dev.finalize()
os.close = real
say(closed=closed)
""")
    closed = run.said["closed"]
    assert {"channel", "tsg", "as", "nvmap", "ctrl"} <= set(closed)
    assert closed.index("channel") < closed.index("tsg") < closed.index("as")
    assert closed[-1] == "ctrl"


def test_two_devices_at_once_share_no_signal_page(tegra: Tegra) -> None:
    run = tegra("""
from tinygrad.runtime.ops_nv import NVDevice
first = NVDevice("NV")
second = NVDevice("NV")
for dev in (first, second): dev.synchronize()
say(shared=[page.va_addr for page in first.signal_pages[first.peer_group] if page in
            second.signal_pages[second.peer_group]])
for dev in (first, second): dev.finalize()
""")
    assert run.said["shared"] == [] and run.calls("open ctrl") == run.calls("close as") == 2


@pytest.mark.parametrize("place", ["windows", "low", "random"])
def test_no_buffer_in_a_shader_window(tegra: Tegra, place: str) -> None:
    run = tegra(
        COMPUTE
        + """
d = Device["NV"]
big = (Tensor.ones(1 << 20).contiguous().realize() + 1).realize()
say(big=bool((big.numpy() == 2).all()), at=[(v, b.size) for v, b in d.iface.buffers.items()])
""",
        *("--place", place, "--poison"),
    )
    assert run.said["close"] and run.said["big"]
    inside = [va for va, size in run.said["at"] if va in WINDOWS or va + size - 1 in WINDOWS]
    assert inside == []


def test_addresses_that_the_process_uses(tegra: Tegra) -> None:
    # The kernel hands out the address that was freed last, and the process has taken it.
    run = tegra(
        """
import mmap
from tinygrad.runtime.autogen import libc
d, options = Device["NV"], BufferSpec(nolru=True)
probe = d.allocator.alloc(0x10000, options)
at = int(probe.va_addr)
d.allocator.free(probe, 0x10000, options)
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
held = libc.mmap(at, 0x10000, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
ctypes.memset(held, 7, 0x10000)
bufs = [d.allocator.alloc(0x10000, options) for _ in range(3)]
for buf in bufs: ctypes.memset(int(buf.va_addr), 1, buf.size)
say(held=held == at, kept=ctypes.string_at(held, 0x10000) == bytes([7]) * 0x10000,
    outside=all(b.va_addr != at for b in bufs))
libc.munmap(held, 0x10000)
for buf in bufs: d.allocator.free(buf, 0x10000, options)
""",
        *("--place", "reuse"),
    )
    assert run.said == {"held": True, "kept": True, "outside": True}
    assert run.calls("ioctl AS_UNMAP_BUFFER") >= 5  # 4 buffers, and the address that collided


def test_freed_memory_goes_back(tegra: Tegra) -> None:
    # Python's own fcntl.ioctl takes an integer argument as a C int and raises OverflowError above.
    # Once the GPU's mapping is gone, the kernel may give its address away: the CPU's is gone then.
    run = tegra("""
real, big, mapped = fcntl.ioctl, [], []
def checked(fd, request, arg=0):
    if isinstance(arg, int) and not -1 << 31 <= arg < 1 << 31: big.append(arg)
    if request & 0xffff == 0x4105:  # UNMAP_BUFFER of an address
        start = f"{struct.unpack('Q', bytes(arg))[0]:x}-"
        mapped.append(any(line.startswith(start) for line in open("/proc/self/maps")))
    return real(fd, request, arg)
fcntl.ioctl = checked
d, options = Device["NV"], BufferSpec(nolru=True)
for _ in range(64): d.allocator.free(d.allocator.alloc(1 << 20, options), 1 << 20, options)
say(big=big, mapped=mapped)
""")
    assert run.said["big"] == [] and run.said["mapped"] == [False] * 64
    assert run.report["peak_bytes"] < 40 << 20


def test_ring_is_not_overrun(tegra: Tegra) -> None:
    run = tegra("""
d = Device["NV"]
block, count = d.new_signal(value=0), d.new_signal(value=0)
d.hw_compute_queue_t().wait(block, 1).submit(d)
release_later(block, 2.0)
for i in range(1, 1501): d.hw_compute_queue_t().signal(count, i).submit(d)
count.wait(1500)
d.synchronize()
rings = [d.compute_gpfifo, *([d.dma_gpfifo] if hasattr(d, "dma_gpfifo") else [])]
say(entries=d.compute_gpfifo.entries_count, put=sum(r.put_value for r in rings))
""")
    assert run.said["entries"] < 1500 < run.said["put"]
    assert run.report["execution"]["entries"] == run.said["put"]


def test_barrier_of_aarch64_or_no_start(tegra: Tegra) -> None:
    # DSB ST is 0xD5033E9F and RET 0xD65F03C0 (Arm ARM, C6.2)
    run = tegra("""
import mmap, platform
from tinygrad.runtime.support.hcq import FileIOInterface
from tinygrad.runtime.support.nv import tegra
platform.machine, real, seen = lambda: "aarch64", FileIOInterface._mmap, []
def spy(start, size, prot, flags, fd, offset):
    seen.append([prot & mmap.PROT_EXEC, os.pread(fd, 8, 0).hex()])
    return real(start, size, prot, flags, fd, offset)
FileIOInterface._mmap = staticmethod(spy)
before = len(os.listdir("/proc/self/fd"))
tegra.store_barrier()
say(opened=len(os.listdir("/proc/self/fd")) - before)
def refused(*args): raise OSError("Operation not permitted")
FileIOInterface._mmap = staticmethod(refused)
tegra.store_barrier.cache_clear()
try: tegra.TegraIface(None, 0)
except RuntimeError as e: say(error=str(e), seen=seen)
platform.machine = lambda: "x86_64"
class Missing:  # ctypes of a libatomic that is not there
    def memory_barrier(self): raise AttributeError("atomic_thread_fence")
tegra.System = Missing()
try: tegra.TegraIface(None, 0)
except RuntimeError as e: say(missing=str(e))
""")
    assert run.said["seen"] == [[4, "9f3e03d5c0035fd6"]] and run.said["opened"] == 0
    assert "store barrier" in run.said["error"]
    assert run.said["missing"].endswith("but libatomic was not found")
