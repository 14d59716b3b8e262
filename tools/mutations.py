#!/usr/bin/env python3
"""Break a file in one place at a time and see whether the tests notice.

    tools/mutations.py simulator/nvgpusim/l2.py -- tests/simulator/gpu/test_l2.py
    tools/mutations.py engine/orinllm/gpu/cuda/norm_rope.cu:40-90 --limit 30 -- tests/engine
    tools/mutations.py --tree build/series tinygrad/nn/state.py -- tests/patches

What follows `--` goes to pytest. The tests run in a copy of the repository, so your tree is never
edited. With --tree the file is one of another tree, a copy of which comes first in PYTHONPATH.
Exit status 1 when a mutation survives. (mutmut and cosmic-ray know no C; universalmutator changes
lines by regex: 2,813 changes of 324 lines, a third of which does not parse, made in your tree.)
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
# Tests of a change may take this many times as long as those of the unchanged tree, and 30 s more.
PATIENCE = 3
PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr), (ast.And, ast.Or), (ast.Div, ast.Mult), (ast.Mod, ast.Mult),
    (ast.BitXor, ast.BitOr),
)  # fmt: skip
SWAPS: dict[Any, Any] = {b: a for a, b in PAIRS} | dict(PAIRS)
C_PAIRS = "< <=", "> >=", "== !=", "+ -", "* /", "&& ||", "<< >>", "& |", "% /", "+= ="
TOKENS = {f" {a} ": f" {b} " for pair in C_PAIRS for a, b in [pair.split(), pair.split()[::-1]]}
TOKENS |= {"__syncthreads();": ";", "__syncwarp();": ";", "if (": "if (!", "return ": "return -"}
C_TOKEN = re.compile("|".join([r"(?<![\w.])\d+(?![\w.])", *map(re.escape, TOKENS)]))
C_SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\n])*\"|^#(?:\\\n|[^\n])*", re.DOTALL | re.M
)
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Assert, ast.Delete, ast.Continue, ast.Break)


class Change(NamedTuple):
    """The characters [start, end) of a file become `new`."""

    start: int
    end: int
    new: str


def python_changes(text: str) -> Iterator[Change]:
    """Changes of Python: operators, numbers, conditions, statements left out, returned values."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def change(node: ast.expr | ast.stmt, new: str) -> Change:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Change(len(raw[:start].decode()), len(raw[:end].decode()), new)

    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        node = pending.pop()
        for name, value in ast.iter_fields(node):
            # Annotations change nothing; before 3.12 places inside an f-string are wrong.
            if name not in ("annotation", "returns") and not isinstance(node, ast.JoinedStr):
                pending += [v for v in (value if isinstance(value, list) else [value])
                            if isinstance(v, ast.AST)]  # fmt: skip
        if isinstance(node, ast.expr):
            yield from (change(node, f"({ast.unparse(new)})") for new in new_expressions(node))
        elif isinstance(node, ast.stmt):
            yield from (change(old, ast.unparse(new)) for old, new in old_and_new_statements(node))


def new_expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Replacements of an expression."""
    match node:
        case ast.Compare():
            for i, op in enumerate(node.ops):
                new = copy.deepcopy(node)
                new.ops[i] = SWAPS[type(op)]()
                yield new
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield ast.BinOp(left, SWAPS[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(SWAPS[type(op)](), values)
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for i, loop in enumerate(node.generators):
                if loop.ifs:
                    filtered = copy.deepcopy(node)
                    filtered.generators[i].ifs = []
                    yield filtered


def old_and_new_statements(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Replacements of a statement or of its condition, each with what it replaces."""
    stored = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if (isinstance(node, DROPPED) or stored) and not text:
        yield node, ast.Pass()
    match node:
        case ast.AugAssign(target, op, value) if type(op) in SWAPS:
            yield node, ast.AugAssign(target, SWAPS[type(op)](), value)
        case ast.If(test) | ast.While(test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.Return(ast.expr() as value):
            yield value, ast.Constant(None)


def c_changes(text: str) -> Iterator[Change]:
    """Changes of C and CUDA C, outside comments, strings and directives: tokens and numbers."""
    code = C_SKIPPED.sub(lambda m: " " * len(m[0]), text)
    for found in C_TOKEN.finditer(code):
        new = TOKENS.get(found[0]) or str(int(found[0]) + 1)
        yield Change(found.start(), found.end(), new)


def iter_located_changes(root: Path, source: str) -> Iterator[tuple[str, int, Change]]:
    """(file, line, change) of FILE or FILE:FIRST-LAST."""
    name, _, lines = source.partition(":")
    first, _, last = lines.partition("-")
    if not (root / name).is_file() or (lines and not (first.isdecimal() and last.isdecimal())):
        raise SystemExit(f"mutations: {source}: want a file of {root}, or FILE:FIRST-LAST")
    text = (root / name).read_text()
    for change in (python_changes if name.endswith(".py") else c_changes)(text):
        line = text.count("\n", 0, change.start) + 1
        if not lines or int(first) <= line <= int(last):
            yield name, line, change


class RepositoryCopy:
    """A copy of the repository (and of the other tree) in which one file at a time is changed."""

    def __init__(self, scratch: Path, number: int, tree: Path | None) -> None:
        self.home = scratch / f"repository-{number}"
        listed = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "-co", "--exclude-standard"]
        for name in subprocess.check_output(listed, text=True).split("\0"):
            if (REPOSITORY / name).is_file():
                (self.home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, self.home / name)
        self.changed = scratch / f"tree-{number}" if tree else self.home
        if tree:
            ignored = shutil.ignore_patterns(".git", "__pycache__")
            shutil.copytree(tree, self.changed, symlinks=True, ignore=ignored)
        settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
        rooms = settings["tool"]["setuptools"]["packages"]["find"]["where"]
        paths = [self.changed, self.home, *(self.home / room for room in rooms)]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}

    def tests_pass(self, arguments: list[str], limit: float | None) -> bool:
        """True if pytest passes."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
        try:
            done = subprocess.run(
                command, cwd=self.home, env=self.environment, timeout=limit,
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        if limit is None and done.returncode:
            raise SystemExit(f"mutations: the tests fail without a change:\n{done.stdout[-2000:]}")
        return done.returncode == 0

    def change_survives(self, name: str, change: Change, tests: list[str], limit: float) -> bool:
        """True if pytest passes although the file is changed."""
        file = self.changed / name
        text = file.read_text()
        file.write_text(text[: change.start] + change.new + text[change.end :])
        try:
            return self.tests_pass(tests, limit)
        finally:
            file.write_text(text)


def main() -> int:
    """Judge the changes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source", nargs="+", help="FILE or FILE:FIRST-LAST, then -- and the tests")
    parser.add_argument("--tree", type=Path, help="the file is in this tree, e.g. of tools/series")
    parser.add_argument("--limit", type=int, default=0, help="changes to try, at random (all)")
    parser.add_argument("--seed", type=int, default=0, help="of --limit's draw (0)")
    parser.add_argument("--jobs", type=int, default=1, help="copies at a time (1)")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, tests = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if not tests or options.jobs < 1 or options.limit < 0:
        parser.error("want tests after --, --jobs of 1 or more, --limit of 0 or more")
    root = options.tree or REPOSITORY
    work = [item for source in options.source for item in iter_located_changes(root, source)]
    random.Random(options.seed).shuffle(work)
    work = sorted(work[: options.limit or None])
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        copies = [RepositoryCopy(Path(scratch), i, options.tree) for i in range(options.jobs)]
        return int(count_survivors(work, tests, copies) > 0)


def count_survivors(
    work: list[tuple[str, int, Change]], tests: list[str], copies: list[RepositoryCopy]
) -> int:
    """Run the tests on each change; prints survivors and how long the rest takes."""
    begin = time.monotonic()
    copies[0].tests_pass(tests, None)
    once = time.monotonic() - begin
    print(f"{len(work)} changes, at most {once:.0f} s each unless they hang", flush=True)
    begin, free, done, survivors = time.monotonic(), Queue[RepositoryCopy](), 0, 0
    for each in copies:
        free.put(each)

    def one(item: tuple[str, int, Change]) -> None:
        nonlocal done, survivors
        name, line, change = item
        own = free.get()
        text = (own.changed / name).read_text()
        survived = own.change_survives(name, change, tests, PATIENCE * once + 30)
        free.put(own)
        done, survivors = done + 1, survivors + survived
        left = (time.monotonic() - begin) / done * (len(work) - done)
        if survived:
            old = " ".join(text[change.start : change.end].split())
            print(f"{name}:{line}: {old[:60]} -> {' '.join(change.new.split())[:60]}", flush=True)
        print(f"{done} of {len(work)}, {left:.0f} s left", end="\r", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(one, work))
    print(f"{len(work) - survivors} of {len(work)} changes noticed, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
