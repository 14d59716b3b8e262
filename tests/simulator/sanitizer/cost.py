"""Cost of the sanitizer: `python -m tests.simulator.sanitizer.cost`.

CPU time of the clean kernels' launches with all checks and without any, in turns: of a few hundred
threads, then large ones, with thread instructions a CPU second without checks.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable

import numpy as np
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.sanitizer.cases import CASES, Case
from tests.simulator.sanitizer.launching import memory, module, prepare
from tests.simulator.sanitizer.test_attacks import ATTACKS, MODULE

from nvgpusim.options import CHECKS
from nvgpusim.orin.gpu import bench
from nvgpusim.ptx import KernelCode, Launch, parse, translate_kernel
from nvgpusim.ptx.sanitizer.sanitize import Sanitizer

TURNS, WARM = 15, 3
"""Launches that are counted, and those before them."""
Make = Callable[[Sanitizer | None], Launch]
LOCKS = {
    "clean_last", "clean_last_wide", "clean_lock", "clean_flag", "clean_blocks_flag", "c_release",
    "c_release_warp", "c_release_halves", "c_shared_flag", "c_chain", "c_rmw_chain", "c_acqrel",
    "c_block_fence", "c_lookback", "c_cg_sync",
}  # fmt: skip
"""Kernels whose threads wait for each other's locks and flags."""


HOT = [
    Case("clean_reduce", "", "i:262144 u:1024", "256", 256),
    Case("clean_shuffle", "", "i:262144 u:1024", "256", 256),
    Case("clean_saxpy", "", "d:2.5 i:262144 i:262144 s:65536", "256", 256),
    Case("clean_lock", "", "z:4 z:4", "32", 64),
]
"""Large launches."""
N = 4 * bench.N**2


def matmul(codes: dict[Sanitizer | None, KernelCode], watch: Sanitizer) -> Make:
    """The product of the bench."""
    vm, allocated = FlatMemory(), watch.allocated
    at = [vm.add(np.zeros(N, np.uint8)) for _ in "cab"]
    for va in at:
        allocated.add_piece(va, N, fresh=va == at[0])
    bank = {0: bytes(0x160) + struct.pack("<3Q", *at)}
    return lambda who: Launch(codes[who], vm, (bench.N, 2, 1), (128, 1, 1), bank, watch=who)


def ratio(case: Case | None) -> tuple[float, float, float, float]:
    """CPU time with the sanitizer divided by that without: median, least, most; thread instructions
    a second without. None: matmul."""
    source, name = (parse(bench.MATMUL), "matmul") if case is None else (module(), case.kernel)
    if name in MODULE.kernels:
        source = MODULE
    kernel, (vm, buf) = source.kernels[name], memory()
    watch = Sanitizer(frozenset(CHECKS))
    spent: dict[Sanitizer | None, list[float]] = {None: [], watch: []}
    codes = {who: translate_kernel(source, kernel, who is not None, False) for who in spent}

    def planted(who: Sanitizer | None) -> Launch:
        assert case is not None
        return prepare(codes[who], case, vm, buf, who)

    make = matmul(codes, watch) if case is None else planted
    for turn in range(TURNS + WARM):
        for who, times in spent.items():
            buf.array[:] = 0
            launch = make(who)
            start = time.process_time()
            launch.run_all_blocks()
            if turn >= WARM:
                times.append(time.process_time() - start)
            assert not launch.findings, launch.findings
    each = sorted(on / off for on, off in zip(spent[watch], spent[None], strict=True))
    plain = statistics.median(spent[None])
    ran = launch.thread_instrs / plain
    return statistics.median(spent[watch]) / plain, each[0], each[-1], ran


if __name__ == "__main__":
    found: dict[bool, list[float]] = {True: [], False: []}
    for case in [*CASES, *ATTACKS]:
        if not case.fault:
            found[case.kernel in LOCKS].append(ratio(case)[0])
            print(f"{case.kernel:20} {found[case.kernel in LOCKS][-1]:.1f}")
    for locks, ratios in found.items():
        what = "locks and flags" if locks else "others"
        middle = statistics.median(ratios)
        print(f"{what}: {min(ratios):.1f} to {max(ratios):.1f}, median {middle:.1f}")
    for hot in (None, *HOT):
        middle, least, most, ran = ratio(hot)
        name = hot.kernel if hot else "matmul"
        print(f"{name:20} {middle:.1f} ({least:.1f} to {most:.1f}), {ran:.2e} a second")
