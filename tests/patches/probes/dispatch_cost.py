"""Python's cost of handing work to the GPU: TegraIface against the path of NVKIface.

    .venv/bin/python -m tests.patches.probes.dispatch_cost --rounds 30

Both are NVDevice with a mocked kernel side: memory is real, nothing executes, every wait is over at
once. One has what TegraIface says of itself (new_gpfifo, barriers, releases from the pushbuffer,
unified memory), the other what NVKIface does. Two processes take turns, so that each round is a
pair. Time is the process's CPU time, which is all there is where nothing is waited for. Printed are
medians, the spread (10th to 90th percentile) and the pairs' ratio. Counted are doorbells and dwords
of a launch, of a replayed graph, and of a token of the tiny Q6_K model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patches.probes.seeds import PROMPT, environment, general, write_model

PATHS = ("nvk", "tegra")
LAUNCHES, KERNELS, REPLAYS = 500, 20, 100
GR_INFO = {"LITTER_NUM_GPCS": 2, "LITTER_NUM_TPC_PER_GPC": 4, "LITTER_NUM_SM_PER_TPC": 2,
           "MAX_WARPS_PER_SM": 48, "SM_VERSION": 0x807}  # fmt: skip
"""An AGX Orin's answers to GR_GET_INFO (ga10b: nvgpu's litter values and characteristics)."""


def open_device(path: str) -> Any:
    """NVDevice on a mocked interface; counts doorbells and dwords in `device.counts`."""
    import mmap

    from tinygrad.runtime import ops_nv
    from tinygrad.runtime.autogen import nv_570 as nv_gpu
    from tinygrad.runtime.support.hcq import FileIOInterface, HCQBuffer, HCQSignal, MMIOInterface
    from tinygrad.runtime.support.nv import tegra

    class Meta:
        hMemory = 1  # noqa: N815 - tinygrad's name

    class Mocked:
        count, root, gpu_instance, viddec_class = 1, 1, 0, None
        compute_class, gpfifo_class, dma_class = 0xC7C0, 0xC56F, 0xC7B5
        at = 1 << 32  # QMDs have to lie below 2^40

        def __init__(self, dev: Any, _: int) -> None:
            self.dev = dev

        def memory(self, size: int) -> int:
            size = -(-size // 4096) * 4096
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
            at, Mocked.at = Mocked.at, Mocked.at + size
            return int(FileIOInterface.anon_mmap(at, size, 3, flags, 0))

        def alloc(self, size: int, **_: Any) -> Any:
            view = MMIOInterface(self.memory(size), size)
            return HCQBuffer(view.addr, size, view=view, owner=self.dev, meta=Meta)

        def free(self, mem: Any) -> None: ...
        def map(self, mem: Any) -> None: ...
        def sleep(self, _: int) -> None: ...
        def setup_vm(self, _: int) -> None: ...
        def setup_gpfifo_vm(self, _: int) -> None: ...

        def setup_usermode(self) -> Any:
            return 1, MMIOInterface(self.memory(0x10000), 0x10000, fmt="I")

        def rm_alloc(self, *_: Any, **__: Any) -> int:
            return 1

        def rm_control(self, _: int, cmd: int, params: Any = None, **__: Any) -> Any:
            if cmd == nv_gpu.NV2080_CTRL_CMD_GR_GET_INFO:
                known = {getattr(nv_gpu, f"NV2080_CTRL_GR_INFO_INDEX_{k}"): v
                         for k, v in GR_INFO.items()}  # fmt: skip
                infos = nv_gpu.NV2080_CTRL_GR_INFO * params.grInfoListSize
                for info in infos.from_address(params.grInfoList):
                    info.data = known[info.index]
            return params

    class NvkIface(Mocked): ...

    class TegraMockedIface(Mocked):
        windows, qmd_release = tegra.TegraIface.windows, tegra.TegraIface.qmd_release
        unified_memory, has_pma = tegra.TegraIface.unified_memory, tegra.TegraIface.has_pma

        def __init__(self, dev: Any, index: int) -> None:
            super().__init__(dev, index)
            self.memory_barrier = tegra.store_barrier()

        def new_gpfifo(self, _: int, __: bool) -> dict[str, Any]:
            entries = tegra.GPFIFO_ENTRIES
            ring = MMIOInterface(self.memory(entries * 8), entries * 8, fmt="Q")
            gpput = MMIOInterface(self.memory(4096), 4, fmt="I")
            # The GPU has always read everything: GPGet is GPPut.
            return {"ring": ring, "gpput": gpput, "gpget": gpput, "entries_count": entries,
                    "token": 1}  # fmt: skip

    HCQSignal.wait = lambda *_, **__: None
    counts = {"doorbells": 0, "dwords": 0}
    submit = ops_nv.NVCommandQueue._submit_to_gpfifo

    def counted(self: Any, dev: Any, gpfifo: Any) -> None:
        counts["doorbells"] += 1
        counts["dwords"] += len(self._q)
        submit(self, dev, gpfifo)

    ops_nv.NVDevice.ifaces = [NvkIface if path == "nvk" else TegraMockedIface]
    from tinygrad import Device

    device: Any = Device["NV"]
    device.counts, device.count_submits = (
        counts,
        lambda on: setattr(ops_nv.NVCommandQueue, "_submit_to_gpfifo", counted if on else submit),
    )
    return device


def cases(device: Any, model: Path) -> dict[str, tuple[Callable[[], None], int]]:
    """Timed cases: by name, one run of it, and the number of calls in the run."""
    from tinygrad import Tensor, TinyJit
    from tinygrad.runtime.ops_nv import NVProgram

    source = 'extern "C" __global__ void one(float* a, float* b, int n) { a[n] = b[n]; }'
    one = NVProgram(device, "one", device.compiler.compile(source))
    a, b = device.allocator.alloc(4096), device.allocator.alloc(4096)

    def launches() -> None:
        for i in range(LAUNCHES):
            one(a, b, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(i & 7,))

    def body(x: Any) -> Any:
        for _ in range(KERNELS):
            x = (x + 1).contiguous()
        return x.realize()

    jit, x = TinyJit(body), Tensor.zeros(16).contiguous().realize()
    for _ in range(4):
        jit(x)

    def replays() -> None:
        for _ in range(REPLAYS):
            jit(x)

    allocator, own = device.allocator, type(device.allocator)
    disk, allocator.supports_copy_from_disk = allocator.supports_copy_from_disk, False
    allocator._copyout = lambda dest, src: dest.__setitem__(
        slice(None), src.cpu_view().view(size=len(dest), fmt="B")[:]
    )
    allocator._copyin = lambda dest, src: (
        dest.cpu_view().view(size=len(src), fmt="B").__setitem__(slice(None), src.cast("B"))
    )
    generated = general(model).generate(list(PROMPT))  # no copy engine runs here
    allocator.supports_copy_from_disk = disk
    allocator._copyout = own._copyout.__get__(allocator)
    allocator._copyin = own._copyin.__get__(allocator)
    for _ in range(4):
        next(generated)

    def token() -> None:
        next(generated)

    return {
        "launch": (launches, LAUNCHES),
        f"replay of a graph of {KERNELS} kernels": (replays, REPLAYS),
        "token of the tiny model": (token, 1),
    }


def serve(path: str, model: Path) -> None:
    """Time a case (microseconds each) for every line of standard input that names one."""
    device = open_device(path)
    runs = cases(device, model)
    for line in sys.stdin:
        run, n = runs[line.strip()]
        start = time.process_time()
        run()
        took = (time.process_time() - start) / n * 1e6
        print(json.dumps({"us": took}), flush=True)


def count(path: str, model: Path) -> None:
    """Print doorbells and dwords of one of each case."""
    device = open_device(path)
    found = {}
    for name, (run, n) in cases(device, model).items():
        device.counts.update(doorbells=0, dwords=0)
        device.count_submits(True)
        run()
        device.count_submits(False)
        found[name] = {what: number / n for what, number in device.counts.items()}
    print(json.dumps(found))


def worker(path: str, what: str, model: Path, scratch: Path) -> subprocess.Popen[str]:
    """This file in a process of its own, for one of PATHS."""
    module = "tests.patches.probes.dispatch_cost"
    return subprocess.Popen(
        [sys.executable, "-m", module, "--worker", what, path, str(model)],
        env=environment("NV", scratch), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def spread(values: list[float], digits: int) -> str:
    """Median and 10th to 90th percentile, as two cells of a table."""
    low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):.{digits}f} | {low:.{digits}f} .. {high:.{digits}f}"


def main() -> int:
    """Measure both paths in turns and print a table; status 1 when TegraIface costs over 1.1x."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=30, help="pairs (30)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: want at least 2")
    if options.worker:
        what, path, model = options.worker
        (serve if what == "serve" else count)(path, Path(model))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_model(model := scratch / "model.gguf")
        counts = {}
        for path in PATHS:
            with worker(path, "count", model, scratch) as process:
                counts[path] = json.loads(process.communicate()[0])
        samples = measure(list(counts["nvk"]), options.rounds, model, scratch)
    print("| what | path | us, median | 10 % .. 90 % | doorbells | dwords |")
    print("|---|---|---|---|---|---|")
    slow = False
    for name, by_path in samples.items():
        for path in PATHS:
            number = counts[path][name]
            print(
                f"| {name} | {path} | {spread(by_path[path], 1)} | "
                f"{number['doorbells']:g} | {number['dwords']:g} |"
            )
        ratios = [t / n for n, t in zip(by_path["nvk"], by_path["tegra"], strict=True)]
        slow |= statistics.median(ratios) > 1.1
        print(f"| {name} | tegra / nvk | {spread(ratios, 3)} | | |")
    return int(slow)


def measure(
    names: list[str], rounds: int, model: Path, scratch: Path
) -> dict[str, dict[str, list[float]]]:
    """Microseconds by case and path; the order within a pair alternates."""
    workers = {path: worker(path, "serve", model, scratch) for path in PATHS}
    samples: dict[str, dict[str, list[float]]] = {n: {p: [] for p in PATHS} for n in names}
    for number in range(rounds):
        for name in names:
            for path in PATHS if number % 2 else reversed(PATHS):
                stdin, stdout = workers[path].stdin, workers[path].stdout
                assert stdin is not None and stdout is not None
                stdin.write(name + "\n")
                stdin.flush()
                samples[name][path].append(json.loads(stdout.readline())["us"])
    for process in workers.values():
        process.communicate()
    return samples


if __name__ == "__main__":
    sys.exit(main())
