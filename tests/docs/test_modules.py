"""Modules of our own: their names are theirs alone, their docstrings say what a thing is."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

from tests.docs.pages import REPOSITORY

ROOMS = ("benchmarks", "docs", "engine", "nixos", "simulator", "telemetry", "tests", "tools")
# A docstring is a noun phrase or a verb, not half of a question.
QUESTION = re.compile(r"(?:What|How|Whether)\b")


@cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each of our Python files."""
    files = [path for room in ROOMS for path in sorted((REPOSITORY / room).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def test_docstrings_do_not_begin_like_a_question() -> None:
    wrong = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if QUESTION.match(text):
                    wrong.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {text[:60]}")
    assert not wrong, "\n".join(wrong)


def test_no_module_shadows_the_standard_library() -> None:
    names = {path: path.relative_to(REPOSITORY).with_suffix("").parts for path in trees()}
    wrong = {path for path, parts in names.items() if {*parts} & sys.stdlib_module_names}
    assert not wrong
