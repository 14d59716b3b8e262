"""Modules of our own: their names are theirs alone, their docstrings say what a thing is."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.docs.pages import REPOSITORY

ROOMS = (
    "benchmarks", "docs", "engine", "nixos", "simulator", "telemetry", "tests",
    "tools",
)  # fmt: skip
PACKAGES = (
    "benchmarks/orinbench", "engine/orinllm", "simulator/nvgpusim", "telemetry/orinboard",
    "telemetry/orinexporter",
)  # fmt: skip
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


def imported(path: Path, module: str, names: set[str]) -> Iterator[str]:
    """Modules of `names` that a file imports when it runs, in functions, too."""
    package = module.split(".")[: None if path.stem == "__init__" else -1]
    nodes: list[ast.AST] = [trees()[path]]
    while nodes:
        match node := nodes.pop():
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=aliases):
                yield from names.intersection(alias.name for alias in aliases)
            case ast.ImportFrom(module=base, names=aliases, level=level):
                start = package[: len(package) - level + 1] if level else []
                origin = ".".join([*start, *(base or "").split(".")]).strip(".")
                inner = {f"{origin}.{alias.name}" for alias in aliases}
                yield from names & inner or names & {origin}
        nodes += ast.iter_child_nodes(node)


def test_no_circle_of_imports() -> None:
    for package in PACKAGES:
        room = REPOSITORY / package
        paths = {
            ".".join((room.name, *path.relative_to(room).with_suffix("").parts)).removesuffix(
                ".__init__"
            ): path
            for path in trees()
            if path.is_relative_to(room)
        }
        graph = {
            module: set(imported(path, module, set(paths))) - {module}
            for module, path in paths.items()
        }
        assert any(graph.values()), package
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as circle:
            raise AssertionError(f"imports in a circle: {' <- '.join(circle.args[1])}") from None
