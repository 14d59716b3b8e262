"""Break every rule of the model, ask the judge and the tests, and write what they noticed.

    python tests/simulator/kernel/rules/record_noticed.py --only 'map.*'
    python tests/simulator/kernel/rules/record_noticed.py --new --seconds 120

Writes docs/reference/simulator-rules-noticed.csv: of the ways to break a rule (breakages.py), how
many the judge notices (an answer is not nvgpu's) and, unless it notices all, how many the tests of
tests/simulator/kernel and gpu, without the judge's, do. The judge is asked the sequences that come
by the rule, pytest the rule's case, and else the tests that come by: which ones is found out first
and kept in build/noticed-*.json, until a file of the model or of the tests is younger. Each
breakage runs in a forked process that has the changed functions' code, so that a program which a
test starts meets the whole model: it notices nothing.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from nvgpusim.orin import driver_answers
from nvgpusim.orin.report import Journal
from nvgpusim.orin.rules import RULES, KernelError

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[3]
sys.path.insert(0, str(HERE))
from breakages import ROOT, Breakage, breakages  # type: ignore[import-not-found]  # noqa: E402

TABLE = REPOSITORY / "docs" / "reference" / "simulator-rules-noticed.csv"
TESTS = ["tests/simulator/kernel", "tests/simulator/gpu"]
OPTIONS = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--ignore-glob=*/test_judge.py",
           "--ignore-glob=*/test_pages.py"]  # fmt: skip
SECONDS = 60
"""A broken model may wait for ever: it is noticed after this long."""
Reached = dict[str, set[str]]
"""Rules, and places where they are raised, with the sequences or tests that came by."""


@contextmanager
def watching(reached: Reached, now: Callable[[], str]) -> Iterator[None]:
    """Note who comes by a rule (`now()`), under the rule's name and the line that raises it."""
    made, followed = KernelError.__init__, Journal.count_rule

    def init(self: KernelError, rule: str, *args: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_name == "refusal" and frame.f_back is not None:
            frame = frame.f_back
        for name in (rule, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"):
            reached.setdefault(name, set()).add(now())
        made(self, rule, *args)

    def rule(self: Journal, name: str) -> None:
        reached.setdefault(name, set()).add(now())
        followed(self, name)

    KernelError.__init__, Journal.count_rule = init, rule  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        KernelError.__init__, Journal.count_rule = made, followed  # type: ignore[method-assign]


class Current:
    """The test that runs, for pytest."""

    name = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.name = item.nodeid


@cache
def sequences() -> list[driver_answers.RecordedSequence]:
    """The recorded answers."""
    return driver_answers.load_sequences(HERE.parent / "data" / "nvgpu-answers.json.gz")


@cache
def reached(who: str) -> Reached:
    """The sequences (by number) of the judge, or the tests, that come by each place."""
    kept, found = REPOSITORY / "build" / f"noticed-{who}.json", Reached()
    files = [
        *ROOT.rglob("*.py"),
        *HERE.parent.rglob("[!br]*.py"),
        *HERE.parents[1].glob("gpu/*.py"),
    ]
    if kept.is_file() and kept.stat().st_mtime > max(f.stat().st_mtime for f in files):
        return {k: set(v) for k, v in json.loads(kept.read_text()).items()}
    if who == "judge":
        for number, sequence in enumerate(sequences()):
            with watching(found, lambda number=number: str(number)):  # type: ignore[misc]
                for verdict in driver_answers.iter_verdicts([sequence]):
                    assert not verdict.differences, verdict
    else:
        current = Current()
        with watching(found, lambda: current.name):
            if pytest.main([*OPTIONS, *TESTS], [current]):
                raise SystemExit("the tests fail with nothing broken")
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({k: sorted(v) for k, v in found.items()}))
    return found


def functions(code: CodeType) -> Iterator[CodeType]:
    """The code of the functions of a module and of its classes."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if "<locals>" not in constant.co_qualname:
                yield constant
            yield from functions(constant)


def put_in(breakage: Breakage) -> None:
    """Give this process's model the broken code."""
    name = breakage.file.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(f"nvgpusim.{name}")
    for code in functions(compile(breakage.source(), str(ROOT / breakage.file), "exec")):
        found: Any = module
        for part in code.co_qualname.split("."):
            found = vars(found).get(part) if found is not None else None
        found = getattr(found, "__func__", found)
        if isinstance(found, FunctionType) and found.__code__.co_qualname == code.co_qualname:
            found.__code__ = code


def notices(breakage: Breakage, ask: Callable[[], object]) -> bool:
    """True if `ask` is true, fails or hangs in a process whose model is broken."""
    pid = os.fork()
    if not pid:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        status = 1
        try:
            put_in(breakage)
            status = 1 if ask() else 0
        finally:
            os._exit(status)
    ends = threading.Timer(SECONDS, os.killpg, (pid, signal.SIGKILL))
    ends.start()
    status = os.waitpid(pid, 0)[1]
    ends.cancel()
    return status != 0


def asked(breakage: Breakage, who: str) -> list[str]:
    """Return what comes by the broken line, or by the rule where that has none."""
    there = f"{Path(breakage.file).name}:{breakage.line}"
    return sorted(reached(who).get(there) or reached(who).get(breakage.rule, set()))


def judge_notices(way: Breakage) -> bool:
    """True if an answer of a sequence is another one."""
    chosen = [sequences()[n] for n in sorted(map(int, asked(way, "judge")))]
    return notices(way, lambda: any(v.differences for v in driver_answers.iter_verdicts(chosen)))


def tests_notice(way: Breakage) -> bool:
    """True if the rule's case fails, or another test that comes by."""

    def fail(names: list[str]) -> bool:
        return bool(names) and notices(way, partial(pytest.main, [*OPTIONS, *names]))

    case = [f"{TESTS[0]}/rules/test_rules.py::test_rule[{way.rule}]"]
    return (way.rule in cases() and fail(case)) or fail(asked(way, "tests"))


@cache
def cases() -> set[str]:
    """Rules that have a case."""
    texts = [file.read_text() for file in HERE.glob("cases_*.py")]
    return set(re.findall(r'case\("([^"]+)"', "".join(texts)))


def row(rule: str, ways: list[Breakage]) -> dict[str, object]:
    """The table's row: who notices the ways in which a rule is broken.

    Of a rule that the judge notices in every way the tests are not asked: it needs no case.
    """
    judged = [judge_notices(way) for way in ways]
    tested = [] if all(judged) else [tests_notice(way) for way in ways]
    either = zip(ways, judged, tested or judged, strict=True)
    missed = [way.what for way, *noticed in either if not any(noticed)]
    counts = sum(judged), sum(tested) if tested else ""
    print(f"{rule}: {len(ways)} ways, judge {counts[0]}, tests {counts[1]}", *missed, sep="; ")
    told: tuple[object, ...] = rule, len(ways), *counts, "; ".join(missed)
    return dict(zip(("rule", "ways", "judge", "tests", "missed"), told, strict=True))


def table() -> dict[str, dict[str, object]]:
    """The rows that there are, by rule."""
    if not TABLE.is_file():
        return {}
    with TABLE.open(newline="") as lines:
        return {r["rule"]: dict[str, object](r) for r in csv.DictReader(lines)}


def write(rows: dict[str, dict[str, object]]) -> None:
    """Keep the rows of rules that there are."""
    with TABLE.open("w", newline="") as out:
        names = ("rule", "ways", "judge", "tests", "missed")
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[rule] for rule in sorted(rows) if rule in RULES)


def main() -> int:
    """Ask about the chosen rules; returns 1 when a way is missed by both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="*", help="rules, as a pattern (all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many (never)")
    parser.add_argument("--new", action="store_true", help="only rules not in the table or missed")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    begin, ways, rows = time.monotonic(), breakages(), table()
    chosen = [
        rule
        for rule in fnmatch.filter(sorted(RULES), options.only)
        if not (options.new and rule in rows and not rows[rule]["missed"])
    ]
    for rule in chosen:
        if time.monotonic() - begin > options.seconds:
            print(f"stopped before {rule}")
            break
        rows[rule] = row(rule, [way for way in ways if way.rule == rule])
        write(rows)
    return int(any(r["missed"] for r in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
