"""0001, 0029: the GPU is shared with other processes, this one lives as long as they do."""

import pytest
from tests.patches.tegra.device import Tegra

# A launch takes 6 s of simulated time, 600 of them an hour. The second process does the same.
HOUR = """
import subprocess
second = None
if "SECOND" not in os.environ:
    second = subprocess.Popen([sys.executable, __file__], env=os.environ | {"SECOND": "1"},
                              stdout=subprocess.PIPE, text=True)
d = Device["NV"]
nop = program(d, 'extern "C" __global__ void nop(int* x) { x[0] = 1; }', "nop")
x = d.allocator.alloc(4096, BufferSpec())
done, error = 0, ""
try:
    for _ in range(600 // 50):
        for _ in range(50): nop(x, global_size=(1, 1, 1), local_size=(1, 1, 1))
        d.synchronize()
        done += 50
except RuntimeError as e: error = str(e)
out = second.communicate()[0] if second else ""
name = "launches" if second else "others"
print(out, end="")
say(**{name: done, f"{name}_error": error})
"""


def test_two_processes_for_an_hour(tegra: Tegra) -> None:
    run = tegra(HOUR, "--second-client", "6000")
    assert run.said == {"launches": 600, "launches_error": "", "others": 600, "others_error": ""}
    assert run.report["execution"]["simulated ms"] >= 3_600_000


def test_without_preemption_the_limit_is_all_there_is(tegra: Tegra) -> None:
    # Nothing but wait-for-idle: switches take their 900 ms, and the limit has to bear them.
    run = tegra(
        """
real = fcntl.ioctl
def wait_for_idle_only(fd, request, arg):
    result = real(fd, request, arg)
    if request & 0xffff == 0x4705:  # GET_CHARACTERISTICS; modes are a u32 at 212 in r36
        size, at = struct.unpack("QQ", bytes(arg))
        ctypes.c_uint32.from_address(at + 212).value = 1
    return result
fcntl.ioctl = wait_for_idle_only
d = Device["NV"]
nop = program(d, 'extern "C" __global__ void nop(int* x) { x[0] = 1; }', "nop")
x = d.allocator.alloc(4096, BufferSpec())
for _ in range(60): nop(x, global_size=(1, 1, 1), local_size=(1, 1, 1), wait=True)
say(done=True)
""",
        *("--second-client", "900"),
    )
    assert run.said["done"] and run.calls("ioctl CHANNEL_SET_PREEMPTION_MODE") == 0


@pytest.mark.parametrize(("modes", "asked"), [(7, 4), (3, 2), (1, None), (6, 4)])
def test_mode_is_one_that_the_driver_offers(tegra: Tegra, modes: int, asked: int | None) -> None:
    run = tegra(f"""
real, asked = fcntl.ioctl, []
def watched(fd, request, arg):
    if request & 0xffffffff == 0x4008487a: asked.append(struct.unpack("II", bytes(arg)))
    result = real(fd, request, arg)
    if request & 0xffff == 0x4705:
        size, at = struct.unpack("QQ", bytes(arg))
        ctypes.c_uint32.from_address(at + 212).value = {modes}
    return result
fcntl.ioctl = watched
Device["NV"]
say(asked=asked)
""")
    assert run.said["asked"] == ([] if asked is None else [[0, asked]])


def test_a_forked_child_is_told(tegra: Tegra) -> None:
    # Its parent's memory is not mapped there: each touch would be a SIGSEGV (status 11).
    run = tegra("""
from tinygrad.runtime.ops_nv import NVDevice
d, second = Device["NV"], NVDevice("NV")
nop = program(d, 'extern "C" __global__ void nop(int* x) { x[0] = 1; }', "nop")
x = d.allocator.alloc(4096, BufferSpec())
@TinyJit
def add(t): return ((t + 1).realize() + 1).realize()  # two kernels: a graph
given = Tensor.ones(64).contiguous().realize()
for _ in range(3): held = add(given)
def told(use):
    try: use()
    except (RuntimeError, MemoryError) as e: return "before this process was forked" in str(e)
uses = [held.numpy, lambda: (Tensor.ones(16).contiguous().realize() + 1).tolist(), d.synchronize,
        lambda: nop(x, global_size=(1, 1, 1), local_size=(1, 1, 1)),
        lambda: add(given), second.synchronize]
sys.stdout.flush()
if not (child := os.fork()):
    answers = list(map(told, uses))
    del held, given, x, nop, uses, add  # nothing is freed that is the parent's
    gc.collect()
    sys.exit(0 if answers == [True] * 6 else 3)  # with tinygrad's own exit
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
say(status=status, sum=held.numpy().sum().item())
second.finalize()
""")
    assert run.said == {"status": 0, "sum": 192}
    assert "Traceback" not in run.stderr and "synchronization" not in run.stderr + run.stdout
