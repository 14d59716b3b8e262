"""0005, 0021: a GPU error ends in one exception, at once, that says what happened and where."""

from tests.patches.tegra.device import Tegra

# The model runs PTX, in which no instruction has an address: its pc is the kernel's entry.
MISALIGNED = r"""
d = Device["NV"]
source = '''
extern "C" __global__ void odd_float4(float4* out, char* in) {
  out[threadIdx.x] = *(float4*)(in + 4);
}'''
other = program(d, source.replace("odd_float4", "another"), "another")
prg = program(d, source, "odd_float4")
a, b = (d.allocator.alloc(4096, BufferSpec()) for _ in range(2))
prg(a, b, global_size=(1, 1, 1), local_size=(32, 1, 1))
begun = time.perf_counter()
try: d.synchronize()
except RuntimeError as e: first = str(e)
took = time.perf_counter() - begun
try: d.synchronize()
except RuntimeError as e: again = str(e)
pc = prg.qmd.read("program_address_upper") << 32 | prg.qmd.read("program_address_lower")
start, size = prg.lib_gpu.va_addr, prg.lib_gpu.size
say(error=first, again=again == first, took=took, pc=hex(pc), offset=hex(pc - start),
    at=["odd_float4" in d.iface._kernel_at(start + n) for n in (-1, 0, size - 1, size)])
"""


def test_fault_names_kernel_error_and_pc(tegra: Tegra) -> None:
    run = tegra(MISALIGNED, clean=False, HCQDEV_WAIT_TIMEOUT_MS="60000")
    error = run.said["error"]
    assert "compute channel: GR_EXCEPTION (13)" in error
    assert "misaligned address (warp_esr 0xf" in error
    assert f"in kernel odd_float4 at +{run.said['offset']}, pc {run.said['pc']}" in error
    assert int(run.said["offset"], 16) > 0 and "kernel log" not in error
    assert run.said["again"] and run.said["at"] == [False, True, True, False]
    assert run.said["took"] < 30  # at once: the wait would have taken 60
    assert run.report["leaks"] == []


def test_fault_is_told_once(tegra: Tegra) -> None:
    # Without the model, Python's finalizers, the kernels' among them, run before tinygrad's.
    run = tegra(
        MISALIGNED
        + """
import atexit, weakref
atexit.unregister(weakref.finalize._exitfunc)
atexit.register(weakref.finalize._exitfunc)
before = len(d.iface.buffers)
d.allocator.free(a, 4096, BufferSpec(nolru=True))
say(freed=before - len(d.iface.buffers))
""",
        clean=False,
    )
    assert run.said["freed"] == 1
    assert "Traceback" not in run.stderr and run.status == 0
    assert run.report["leaks"] == []


def test_mmu_fault_sends_to_the_kernel_log(tegra: Tegra) -> None:
    run = tegra(
        """
d = Device["NV"]
prg = program(d, 'extern "C" __global__ void store(int* x) { x[0] = 1; }', "store")
buf = d.allocator.alloc(4096, spec := BufferSpec(nolru=True))
gone = buf.offset(0)
d.allocator.free(buf, 4096, spec)
prg(gone, global_size=(1, 1, 1), local_size=(1, 1, 1))
try: d.synchronize()
except RuntimeError as e: say(error=str(e))
""",
        clean=False,
    )
    assert "FIFO_ERROR_MMU_ERR_FLT (31)" in run.said["error"]
    assert "dmesg" in run.said["error"]


def test_fault_while_the_ring_is_full(tegra: Tegra) -> None:
    run = tegra(
        """
import time
d = Device["NV"]
block = d.new_signal(value=0)
d.hw_compute_queue_t().wait(block, 1).submit(d)
try:
    for i in range(1500):
        d.hw_compute_queue_t().signal(block, 0).submit(d)
        if i < 30: time.sleep(0.01)  # doorbells in a row are one: let some be heard
except RuntimeError as e: say(error=str(e))
""",
        *("--inject", "channel-error:n=8"),
        clean=False,
    )
    # The fault ends it, and not the time that a full ring may take.
    assert run.said["error"].startswith("the GPU has stopped this process's channels\n")
    assert "FIFO_ERROR_MMU_ERR_FLT (31)" in run.said["error"]


def test_hang_without_a_fault_keeps_its_message(tegra: Tegra) -> None:
    # The traceback of the error holds a kernel, which is freed while the device closes.
    run = tegra(
        """
d = Device["NV"]
def hang():
    held = program(d, 'extern "C" __global__ void store(int* x) { x[0] = 1; }', "store")
    block = d.new_signal(value=0)
    queue = d.hw_compute_queue_t().wait(block, 1).signal(d.timeline_signal, d.next_timeline())
    queue.submit(d)
    d.synchronize()
try: hang()
except RuntimeError as e: say(error=str(e))
""",
        clean=False,
        HCQDEV_WAIT_TIMEOUT_MS="1000",
    )
    assert run.said["error"].startswith("Wait timeout: 1000 ms!")
    assert "Traceback" not in run.stderr and run.status == 0
    assert run.report["leaks"] == []


def test_a_hang_names_the_kernel_that_runs(tegra: Tegra) -> None:
    run = tegra(
        """
d = Device["NV"]
@TinyJit
def chain(x): return ((x + 1).realize().sum(0).realize() * 3).realize()
for _ in range(3): chain(Tensor.ones(64, 64).contiguous().realize()).numpy()
say(idle=d.running())
d.timeline_signal.value -= 1  # as if the graph had not ended
say(graph=d.running())
d.timeline_signal.value += 1
spin = 'extern "C" __global__ void spin(volatile int* x) { while (x[0] == 0); }'
nop = 'extern "C" __global__ void nop(int* x) { x[0] = 1; }'
x = d.allocator.alloc(4096, BufferSpec())
ctypes.memset(int(x.va_addr), 0, 4096)
for prg in (program(d, spin, "spin"), program(d, nop, "nop")):
    prg(x, global_size=(1, 1, 1), local_size=(1, 1, 1))
try: d.synchronize()
except RuntimeError as e: say(error=str(e))
""",
        clean=False,
        HCQDEV_WAIT_TIMEOUT_MS="2000",  # the kernels are compiled meanwhile
    )
    assert run.said["idle"] == ""
    assert run.said["graph"].startswith("running: one of 3 kernels, E_")
    assert run.said["error"].startswith("Wait timeout: 2000 ms!")
    assert run.said["error"].endswith("\nrunning: kernel spin")


def test_profiling_goes_without_pma(tegra: Tegra) -> None:
    run = tegra(
        "say(sum=(Tensor.ones(64).contiguous().realize() + 1).sum().item())", PROFILE="1", PMA="1"
    )
    assert run.said["sum"] == 128


# The kernel side on a fatal error that the model's own kernels do not make.
KILL = """
from nvgpusim.orin.gpu_api import FaultReport, SmErrorRecord
from nvgpusim.orin.kernel.channel import ChannelFile
from nvgpusim.orin.simulation import Simulation
kernel, d = Simulation.current.kernel, Device["NV"]
channel = next(f for f in kernel.files.values() if isinstance(f, ChannelFile))
block = d.new_signal(value=0)
queue = d.hw_compute_queue_t().wait(block, 1).signal(d.timeline_signal, d.next_timeline())
queue.submit(d)
FAULT
try: d.synchronize()
except RuntimeError as e: say(error=str(e))
"""


def test_every_sm_is_asked(tegra: Tegra) -> None:
    sm = "{7: R(4, 0, 0), 0: R(0, 0x10, 0), 15: R(0, 0x2a0010, 240)}"
    fault = f'R = SmErrorRecord; channel.port.fail(FaultReport(13, "x", sm={sm}))'
    run = tegra(KILL.replace("FAULT", fault), clean=False)
    for n, esr in ((0, "0x10"), (15, "0x2a0010")):  # the error is its lower half
        assert f"SM {n}: invalid address space (warp_esr {esr}" in run.said["error"]
    assert "SM 7: no warp error (warp_esr 0x0, global_esr 0x4)" in run.said["error"]
    assert "SM 8" not in run.said["error"]
    assert "in no kernel of this process, pc 0xf0" in run.said["error"]


# NVGPU_ERR_NOTIFIER_* of nvgpu.h, and NVGPU_CHANNEL_RESETCHANNEL_VERIF_ERROR.
NOTIFIERS = {
    8: "FIFO_ERROR_IDLE_TIMEOUT", 13: "GR_EXCEPTION", 24: "GR_SEMAPHORE_TIMEOUT",
    25: "GR_ILLEGAL_NOTIFY", 31: "FIFO_ERROR_MMU_ERR_FLT", 32: "PBDMA_ERROR",
    37: "FECS_ERR_UNIMP_FIRMWARE_METHOD", 43: "RESETCHANNEL_VERIF_ERROR",
    80: "PBDMA_PUSHBUFFER_CRC_MISMATCH", 81: "unknown error",
}  # fmt: skip


def test_notifications_have_their_names(tegra: Tegra) -> None:
    run = tegra(f"""
d, said = Device["NV"], {{}}
for code in {sorted(NOTIFIERS)}:
    note = d.iface._notification("compute")
    note.info32, note.status = code, 0xffff
    said[code] = d.iface.fault_report()[0]
note.status = 0
say(said=said)
""")
    want = {str(n): f"compute channel: {name} ({n})" for n, name in NOTIFIERS.items()}
    assert run.said["said"] == want


def test_a_dead_channel_without_a_notification(tegra: Tegra) -> None:
    run = tegra(
        KILL.replace("FAULT", "channel.unserviceable = True"),
        clean=False,
        HCQDEV_WAIT_TIMEOUT_MS="1000",
    )
    assert run.said["error"].endswith("compute channel: timed out")


def test_a_ring_that_stays_full(tegra: Tegra) -> None:
    run = tegra(
        """
d = Device["NV"]
block = d.new_signal(value=0)
d.hw_compute_queue_t().wait(block, 1).submit(d)
start, count = time.monotonic(), 0
guard = threading.Timer(60, os._exit, (9,))  # a submit that never returns
guard.daemon = True
guard.start()
try:
    while time.monotonic() < start + 60:
        d.hw_compute_queue_t().signal(block, 0).submit(d)
        count += 1
except RuntimeError as e: say(error=str(e), count=count)
""",
        clean=False,
        HCQDEV_WAIT_TIMEOUT_MS="1000",
    )
    assert run.said["error"] == "the GPFIFO stays full" and 900 < run.said["count"] < 1024
