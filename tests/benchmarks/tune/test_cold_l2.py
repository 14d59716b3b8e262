"""What --cold-l2 does between timings, on a driver that takes launches and runs nothing."""

import json
import os
import subprocess
import sys

from tests.benchmarks.tune.conftest import ROOT

SCRIPT = r"""
import ctypes, json, math, re
from tests.patches.fake_cuda import fake_cuda
from tinygrad import Tensor
from tinygrad.helpers import Context
from tinygrad.runtime.autogen import cuda
from orinbench.tune import kernels as K

L2, answer, allocated = 6 << 20, [0], []

# The binding's own types convert the arguments, as they do in front of libcuda.
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int32), ctypes.c_int, cuda.CUdevice)
def get_attribute(out, attribute, device):
    assert (attribute, device) == (38, 5)  # cuda.h: CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    out[0] = L2
    return answer[0]

def device_get(out, number):
    out._obj.value = 5
    return 0

with fake_cuda("PTX") as driver:
    cuda.cuDeviceGetAttribute, cuda.cuDeviceGet = get_attribute, device_get
    allocate = cuda.cuMemAlloc_v2
    cuda.cuMemAlloc_v2 = lambda out, size: allocated.append(size) or allocate(out, size)
    met = {}
    with K.meet(met):
        (Tensor.empty(256, 256) @ Tensor.empty(256, 256)).realize()
    (kernel,) = met.values()
    driver.launches.clear()
    allocated.clear()
    before, after = K.Bench(cold=True).compare(kernel, kernel.optimized(()))
    stores = [launch for launch in driver.launches if "ld.global" not in launch.ptx]
    own = [launch for launch in driver.launches if "ld.global" in launch.ptx]
    timed, kinds = len(before) + len(after), [x in stores for x in driver.launches[2:]]
    launch = stores[0]
    threads = math.prod(launch.grid) * math.prod(launch.block)
    lanes = [4 if wide else 1 for wide in re.findall(r"st\.global(\.v4)?\.f32", launch.ptx)]
    said = {
        "written": threads * 4 * sum(lanes) / L2, "loops": "bra" in launch.ptx,
        "same": len({(l.ptx, l.grid, l.block, l.arguments) for l in stores}),
        "each": kinds == [True, False] * timed, "timed": timed, "warm": len(own) - timed,
        "allocated": sum(size >= 2 * L2 for size in allocated),
    }
    answer[0] = 1
    try: K.flush()
    except K.OptsError as error: said["refused"] = str(error)
print(json.dumps(said))
"""


def test_each_timing_follows_a_store_of_twice_the_l2() -> None:
    """On the launches themselves: no store is folded away, served by a cache, or moved."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CCACHE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    refused = said.pop("refused")
    assert refused.startswith("--cold-l2: the driver does not tell the L2's size: CUDA Error 1")
    assert said.pop("timed") >= 16
    assert said == {
        "written": 2.0,
        "loops": False,
        "same": 1,
        "each": True,
        "warm": 2,
        "allocated": 1,
    }
