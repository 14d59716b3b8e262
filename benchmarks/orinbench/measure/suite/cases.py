"""The suite's cases, a line for each family, and which of them a selection takes.

A case is of some selections: quick, full, and tiny, which simulators and tests run.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import product

from orinbench.errors import BenchError
from orinbench.measure.plan import SuiteCase

SELECTIONS = ("quick", "full", "tiny")
# Unit that each benchmark counts per second; they run in this order.
UNITS = {
    "copy": "GB/s",
    "alloc": "allocs/s",
    "launch": "launches/s",
    "matmul": "GFLOPS",
    "gemv": "GB/s",
    "gpt2": "tok/s",
    "schedule": "schedules/s",
}
# A copy's bandwidth is what these are judged by.
WITH_ROOFLINE = ("copy", "gemv", "gpt2")
# A case of which one call takes longer is left out. Scheduling is seconds of Python on a slow
# processor, and a guard that leaves it out guards nothing.
MOST_SECONDS = dict.fromkeys(UNITS, 2.0) | {"schedule": 30.0}
_KIB, _MIB = 1 << 10, 1 << 20


def size_label(n_bytes: int) -> str:
    """Return bytes as a person writes them: 4 KiB, 256 MiB."""
    unit, factor = ("MiB", _MIB) if n_bytes >= _MIB else ("KiB", _KIB)
    return f"{n_bytes // factor} {unit}"


def _suite_case(
    benchmark: str, label: str, family: str = "", cost: float = 0.0, **parameters: str | int
) -> SuiteCase:
    given = tuple(parameters.items())
    return SuiteCase(benchmark, UNITS[benchmark], label, given, family, cost)


def _iter_cases() -> Iterator[tuple[str, SuiteCase]]:
    sizes = {4: "tiny quick full", 64: "full", 1024: "full", 16 << 10: "quick full"}
    for way, (kib, of) in product(("h2d", "d2h", "d2d"), (sizes | {256 << 10: "full"}).items()):
        label = f"{way} {size_label(kib * _KIB)}"
        yield of, _suite_case("copy", label, way=way, n_bytes=kib * _KIB)
    sizes = {4: "tiny full", 1024: "quick full", 64 << 10: "full"}
    for way, (kib, of) in product(("cached", "driver"), sizes.items()):
        yield (
            of,
            _suite_case("alloc", f"{way} {size_label(kib * _KIB)}", way=way, n_bytes=kib * _KIB),
        )
    for way, mode in product(("direct", "jit", "graph"), ("waited for", "queued")):
        of = "tiny quick full" if way == "jit" else "quick full"
        yield of, _suite_case("launch", f"{way} {mode}", way=way, mode=mode, seconds=0)
    label = "jit jitter over 60 s"
    yield "full", _suite_case("launch", label, way="jit", mode="waited for", seconds=60)
    matrices = {16: "", 64: "tiny", 512: "quick full", 1024: "full", 2048: "quick full"}
    for dtype, (n, of) in product(
        ("fp32", "fp16", "bf16"), (matrices | {4096: "full", 8192: "full"}).items()
    ):
        of = of.replace("quick", "").replace("tiny", "") if dtype == "bf16" else of
        yield of, _suite_case("matmul", f"{dtype} {n}x{n}x{n}", dtype, n**3, dtype=dtype, size=n)
    # Rows and columns of a 1B model's and an 8B model's products.
    shapes = {(2048, 2048): "full", (8192, 2048): "quick full", (2048, 8192): "full"}
    shapes |= {(256, 512): "tiny", (14336, 4096): "full", (128256, 2048): "full"}
    for kind, ((rows, columns), of) in product(("F16", "Q8_0", "Q6_K", "Q4_K"), shapes.items()):
        label = f"{kind} {rows}x{columns}"
        size = {"rows": rows, "columns": columns}
        yield of, _suite_case("gemv", label, kind, rows * columns, type=kind, **size)
    for shape, dtype, n_gen, of in (
        ("tiny", "fp32", 8, "tiny"),
        ("tiny", "fp16", 8, "tiny"),
        ("124m", "fp16", 32, "quick"),
        ("124m", "fp32", 128, "full"),
        ("124m", "fp16", 128, "full"),
    ):
        label = f"{shape} {dtype} tg{n_gen}"
        yield of, _suite_case("gpt2", label, shape=shape, dtype=dtype, n_gen=n_gen)
    yield "tiny quick full", _suite_case("schedule", "gpt2_block")


CASES = tuple(_iter_cases())


def select_cases(text: str) -> dict[str, tuple[SuiteCase, ...]]:
    """Return the cases of `--select` by benchmark, in order; raises BenchError for no such one.

    A word is a selection, a benchmark (of which it takes what full has), a pattern of cases as
    `matmul bf16*`, or one of these behind a minus, which leaves it out.
    """
    chosen: dict[SuiteCase, None] = {}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        found = _matching_cases(word.removeprefix("-"))
        if not found:
            known = ", ".join((*SELECTIONS, *UNITS))
            raise BenchError(f"--select {word}: no such benchmark; there are {known}")
        for case in found:
            if word.startswith("-"):
                chosen.pop(case, None)
            else:
                chosen[case] = None
    if not chosen:
        raise BenchError(f"--select: nothing chosen; there are {', '.join(SELECTIONS)}")
    cases = [case for _, case in CASES if case in chosen]
    ran = [name for name in UNITS if any(case.benchmark == name for case in cases)]
    return {name: tuple(case for case in cases if case.benchmark == name) for name in ran}


def _matching_cases(word: str) -> list[SuiteCase]:
    if word in SELECTIONS:
        return [case for of, case in CASES if word in of]
    if word in UNITS:
        return [case for of, case in CASES if "full" in of and case.benchmark == word]
    return [case for _, case in CASES if fnmatch(f"{case.benchmark} {case.label}", word)]
