"""Cost of the sanitizer: `python -m tests.simulator.sanitizer.cost`.

CPU time of the clean kernels' launches with all checks and without any, in turns.
"""

from __future__ import annotations

import statistics
import time

from nvgpusim.options import CHECKS
from nvgpusim.ptx import compile_kernel
from nvgpusim.ptx.sanitize import Sanitizer

from .cases import CASES, Case
from .launching import memory, module, prepare
from .test_attacks import ATTACKS, MODULE

TURNS = 15
LOCKS = {
    "clean_last", "clean_last_wide", "clean_lock", "clean_flag", "clean_blocks_flag", "c_release",
    "c_release_warp", "c_release_halves", "c_shared_flag", "c_chain", "c_rmw_chain", "c_acqrel",
    "c_block_fence", "c_lookback", "c_cg_sync",
}  # fmt: skip
"""Kernels whose threads wait for each other's locks and flags."""


def ratio(case: Case) -> float:
    """Median CPU time with the sanitizer, divided by the one without."""
    source = MODULE if case.kernel in MODULE.kernels else module()
    kernel, (vm, buf) = source.kernels[case.kernel], memory()
    watch = Sanitizer(frozenset(CHECKS))
    spent: dict[Sanitizer | None, list[float]] = {None: [], watch: []}
    codes = {who: compile_kernel(source, kernel, who is not None, False) for who in spent}
    for _ in range(TURNS):
        for who, times in spent.items():
            buf.array[:] = 0
            launch = prepare(codes[who], case, vm, buf, who)
            start = time.process_time()
            launch.run()
            times.append(time.process_time() - start)
            assert not launch.findings, launch.findings
    return statistics.median(spent[watch]) / statistics.median(spent[None])


if __name__ == "__main__":
    found: dict[bool, list[float]] = {True: [], False: []}
    for case in [*CASES, *ATTACKS]:
        if not case.fault:
            found[case.kernel in LOCKS].append(ratio(case))
            print(f"{case.kernel:20} {found[case.kernel in LOCKS][-1]:.1f}")
    for locks, ratios in found.items():
        what = "locks and flags" if locks else "others"
        middle = statistics.median(ratios)
        print(f"{what}: {min(ratios):.1f} to {max(ratios):.1f}, median {middle:.1f}")
