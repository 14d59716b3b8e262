"""0001, 0004, 0018: any system call may fail: one clear error, nothing lost, then it works.

Each case goes through the calls of an operation one by one, and fails call number 1, 2, 3 ... of
it: that one alone, or it and all that follow.
"""

from tests.patches.tegra.device import Tegra

# `attempt` is the operation, `restore` undoes one that went well. What is held has to be the same
# before and after, and an error has to name the call and the errno. Some do not show: ioctls are
# repeated at EINTR (and open by Python, which an injected failure does not reach), and tinygrad's
# allocator frees its cache and tries again.
EVERY = """
fail, names, wrong, failures, healed = FailAt(), set(), [], 0, 0
CALLS = {"MMAP": "mmap", "TSG_CREATE_SUBCONTEXT": "CREATE_SUBCONTEXT",
         "OPEN_NVMAP": "open of /dev/nvmap", "OPEN_CTRL": "open of /dev/nvgpu/igpu0/ctrl"}

def told(error, code, failed):
    text = "".join(traceback.format_exception(error))
    while error:
        error.__traceback__ = None  # it holds what the attempt had
        error = error.__cause__ or error.__context__
    if code == "EINTR" and failed[0] not in ("MMAP", "OPEN_CTRL", "OPEN_NVMAP"): return False
    return any(f"nvgpu {CALLS.get(name, name)} failed: {code} (" in text for name in failed)

def fails_at(at, lasting, code, attempt, restore):
    global failures, healed
    before, result = fail.held(), None
    fail.arm(at, lasting)
    try: result = attempt()
    except (RuntimeError, MemoryError) as e: error = e
    else: error = None
    failed = list(fail.failed)
    fail.arm(0)
    where = [code, lasting, at, failed]
    if error is None:
        healed += bool(failed)
        restore(result)
        result = None
    else:
        failures += 1
        if not told(error, code, failed): wrong.append([*where, str(error)])
        error = None
    if (after := fail.held()) != before: wrong.append([*where, before, after])
    names.update(failed)
    return bool(failed)

def every_call(attempt, restore, codes=("EIO", "ENOMEM", "EINTR")):
    restore(attempt())
    gc.collect()
    gc.freeze()  # there are many collections here
    for code in codes:
        fail.code = getattr(errno, code)
        for lasting in (False, True) if code == "EIO" else (False,):
            at = 1
            while fails_at(at, lasting, code, attempt, restore):
                before = fail.held()
                restore(attempt())  # a retry works
                if fail.held() != before: wrong.append([code, at, "retry", before, fail.held()])
                at += 1

def done(): say(names=sorted(names), wrong=wrong[:3], failures=failures, healed=healed)
"""
MEMORY = {"NVMAP_CREATE_64", "NVMAP_ALLOC", "NVMAP_GET_FD", "AS_MAP_BUFFER_EX", "MMAP"}


def test_every_call_of_an_allocation_can_fail(tegra: Tegra) -> None:
    run = tegra(
        EVERY
        + """
d, options = Device["NV"], BufferSpec(nolru=True)
# The interface, without the allocator's second try: everything but EINTR shows.
every_call(lambda: d.iface.alloc(1 << 20), d.iface.free)
direct = failures, healed
def free(buf): d.allocator.free(buf, 1 << 20, options)
every_call(lambda: d.allocator.alloc(1 << 20, options), free)
say(direct=direct)
done()
"""
    )
    assert run.said["wrong"] == []
    assert set(run.said["names"]) == MEMORY
    # Five calls, each by EIO, EIO from there on, ENOMEM; mmap by EINTR, the others are repeated.
    # The memory itself is asked for again after ENOMEM, once files' pages are given up.
    assert run.said["direct"] == [15, 5]


def test_every_call_of_a_launch_can_fail(tegra: Tegra) -> None:
    # The first launch loads a program, which makes local memory; a bigger one makes it grow.
    run = tegra(
        EVERY
        + """
from tinygrad.runtime.ops_nv import NVProgram
d = Device["NV"]
SOURCE = '''
extern "C" __global__ void spill(int* out, int n) {
  int a[SIZE], sum = 0;
  for (int i = 0; i < SIZE; i += SIZE / 8) a[(i * n) % SIZE] = i + threadIdx.x;
  for (int i = SIZE; i > 0; i -= SIZE / 8) sum += a[(i - 1) / (SIZE / 8) * (SIZE / 8)];
  out[threadIdx.x] = sum;
}'''
libs = {size: d.compiler.compile(SOURCE.replace("SIZE", str(size))) for size in (16, 64)}
def sums(n): return [sum(i + t for i in range(0, n, n // 8)) for t in range(4)]
def launch(size):
    out = d.allocator.alloc(4096, spec := BufferSpec(nolru=True))
    try:
        spill = NVProgram(d, "spill", libs[size])
        spill(out, global_size=(1, 1, 1), local_size=(4, 1, 1), vals=(3,), wait=True)
        return out.cpu_view().view(size=16, fmt="I")[:] == sums(size)
    finally: d.allocator.free(out, 4096, spec)
def forget():
    "A device without local memory, with nothing in its cache: as before the first launch."
    d.synchronize()
    if d.shader_local_mem is not None: d.allocator.free(d.shader_local_mem, d.shader_local_mem.size)
    d.slm_per_thread, d.shader_local_mem = 0, None
    d.allocator.free_cache()
def right(result):
    if result is not True: wrong.append(["a wrong sum"])
def from_nothing(*sizes):
    try: return all(launch(size) for size in sizes)
    finally: forget()
forget()
every_call(lambda: from_nothing(16, 64), right)
grown = failures + healed
launch(64)
every_call(lambda: launch(16), right)
say(grown=grown, later=failures + healed - grown)
done()
"""
    )
    assert run.said["wrong"] == [] and set(run.said["names"]) == MEMORY
    # Four ways of failing; five calls a buffer, four of local memory, which the CPU does not map.
    assert (run.said["grown"], run.said["later"]) == (112, 40)


def test_every_call_of_open_can_fail(tegra: Tegra) -> None:
    run = tegra(
        EVERY
        + """
from tinygrad.runtime.ops_nv import NVDevice
def close(dev):
    dev.synchronize()
    dev.finalize()
every_call(lambda: NVDevice("NV"), close)
done()
"""
    )
    assert run.said["wrong"] == [] and run.said["healed"] >= 25  # EINTR
    assert {"OPEN_CTRL", "OPEN_NVMAP", "GET_CHARACTERISTICS", "GET_TPC_MASKS", "ALLOC_AS",
            "OPEN_TSG", "TSG_CREATE_SUBCONTEXT", "OPEN_CHANNEL", "AS_BIND_CHANNEL",
            "TSG_BIND_CHANNEL_EX", "CHANNEL_WDT", "CHANNEL_SETUP_BIND", "CHANNEL_ALLOC_OBJ_CTX",
            "CHANNEL_SET_ERROR_NOTIFIER", "CHANNEL_SET_PREEMPTION_MODE", "CHANNEL_SET_TIMEOUT",
            "TSG_EVENT_ID_CTRL"} | MEMORY == set(run.said["names"])  # fmt: skip


def test_every_call_of_a_capture_can_fail(tegra: Tegra) -> None:
    # A graph takes memory for its arguments and signals; a page of signals has 256.
    run = tegra(
        EVERY
        + """
d, kept = Device["NV"], []
x = Tensor(np.arange(64, dtype=np.int32)).realize()
def captured():
    kept[:] = [d.new_signal() for _ in range(len(d.signal_pool[d.peer_group]))]
    @TinyJit
    def step(x): return ((x + 1).contiguous() * 2).contiguous().realize()
    return [step(x) for _ in range(3)][-1]
def right(result):
    if not (result.numpy() == (np.arange(64) + 1) * 2).all(): wrong.append(["a wrong sum"])
every_call(captured, right, codes=("EIO", "ENOMEM"))
done()
"""
    )
    assert "Exception ignored" not in run.stderr
    assert run.said["wrong"] == []
