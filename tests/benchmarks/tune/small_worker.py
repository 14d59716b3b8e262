"""`orinbench.tune.worker` over two small kernels instead of a model's, and a search of few actions.

SMALL_WORKER in the environment changes what happens: "slow" makes every search last, "die" ends the
process in the middle of a check and "die first" in one kernel's search, "hidden" has no kernels.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinygrad import Tensor
from tinygrad.codegen.opt import Opt, OptOps, search

from orinbench.tune import kernels, worker

MOOD = os.environ.get("SMALL_WORKER", "")


def compute() -> None:
    """Two kernels: a matrix product and what follows it."""
    a, b = Tensor.empty(64, 32), Tensor.empty(32, 64)
    ((a @ b).contiguous().relu() + 1).realize()


def model_kernels(
    path: Path, context: int, chunk: int, general: bool
) -> tuple[dict[str, kernels.Kernel], int]:
    met: dict[str, kernels.Kernel] = {}
    if MOOD != "hidden":
        with kernels.meet(met):
            compute()
    for count, digest in enumerate(sorted(met, key=lambda d: met[d].name), 1):
        met[digest].launches = Counter(token=count, prompt=1)
    return met, 0 if general else 3


def slowed(real: Callable[..., Any]) -> Callable[..., Any]:
    def search_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(600)
        return real(*arguments, **options)

    return search_slowly


def dying(real: Callable[..., Any]) -> Callable[..., Any]:
    def search_or_die(bench: Any, kernel: Any, level: int) -> Any:
        if kernel.name.startswith("r_"):
            os._exit(7)
        return real(bench, kernel, level)

    return search_or_die


if __name__ == "__main__":
    search.actions = [Opt(OptOps.UPCAST, 0, 4), Opt(OptOps.UNROLL, 0, 4), Opt(OptOps.UPCAST, 1, 2)]
    kernels.model_kernels = model_kernels
    if MOOD == "slow":
        kernels.Bench.search = slowed(kernels.Bench.search)  # type: ignore[method-assign]
    if MOOD == "die":
        kernels.Bench.compare = lambda *_: os._exit(7)  # type: ignore[method-assign]
    if MOOD == "die first":
        kernels.Bench.search = dying(kernels.Bench.search)  # type: ignore[method-assign]
    worker.main()
