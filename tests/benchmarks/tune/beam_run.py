"""The small kernels as a user runs them with BEAM set; says how many searches that took."""

import json
import os

from tests.benchmarks.tune.small_worker import compute
from tinygrad.codegen.opt import search

searches = 0
real = search._try_compile


def counted(x):  # type: ignore[no-untyped-def]
    global searches
    searches += 1
    return real(x)


if __name__ == "__main__":
    search._try_compile = counted
    compute()
    print(json.dumps({"beam": os.environ["BEAM"], "candidates": searches}))
