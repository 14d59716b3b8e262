#!/usr/bin/env python3
"""Environment variables that a tree of Python sources reads, found in its syntax trees.

Without arguments: the installed tinygrad. The list has names and defaults, `-o json` also files;
the meaning stands in docs/reference/environment.md, whose names and defaults --check compares.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Readers of the environment in sources: a call of one of these, its first argument being the name.
READERS = {"getenv", "os.getenv", "os.environ.get", "os.environ.setdefault", "environ.get"}
# tinygrad's class of variables that Context(...) can set; its subclasses count too.
CONTEXT = "ContextVar"
# tinygrad's loader of shared libraries reads <NAME>_PATH for the library of that name.
LIBRARY = "DLL"
UNSET = "unset"
# Files of devices that no Orin has: what is read in them alone does not stand on the page.
OTHER_HARDWARE = re.compile(
    r"(?:/|_)(?:am|amd|qcom|dsp|metal|hip|hsa|comgr\w*|rocprof|webgpu|mlx|tinyfs"
    r"|corefoundation|iokit|nvdev|support/(?:memory|usb)|autogen/(?:ib|libusb|opencl))"
    r"(?:/|\.py)"
)


@dataclass(frozen=True)
class VariableUse:
    """One place where a variable is read or set.

    Attributes:
        name: the variable, or `<expression>` where the source computes the name.
        default: the source's expression for it, `unset`, or empty where it is only set.
        file: relative to the tree.
        context: Context(NAME=...) works for it.
    """

    name: str
    default: str
    file: str
    context: bool = False


@dataclass(frozen=True)
class Variable:
    """All uses of one variable; defaults and files sorted, each once."""

    name: str
    defaults: tuple[str, ...]
    files: tuple[str, ...]
    context: bool

    @property
    def is_for_other_hardware(self) -> bool:
        """True if only code for hardware that no Orin has reads it."""
        return all(OTHER_HARDWARE.search(file) for file in self.files)


def _default_text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return '""' if text == "''" else text


def _dotted_name(node: ast.expr) -> str:
    """`os.environ.get` of such an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := _dotted_name(node.value)):
        return f"{left}.{node.attr}"
    return ""


class _UseFinder(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, file: str, tree: ast.Module, contexts: set[str]) -> None:
        self.file, self.contexts = file, contexts
        self.uses: list[VariableUse] = []
        # `NAME = "TEXT"` at the top of a file names a variable as well as the text does.
        self.constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def _variable_name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.constants:
            return self.constants[node.id]
        return f"<{ast.unparse(node)}>"

    def _add_use(self, name: ast.expr, default: str, context: bool = False) -> None:
        self.uses.append(VariableUse(self._variable_name(name), default, self.file, context))

    def visit_Call(self, node: ast.Call) -> None:
        function = _dotted_name(node.func)
        short = function.rpartition(".")[2]
        if node.args and (function in READERS or short in self.contexts):
            implied = "0" if short == "getenv" and function != "os.getenv" else UNSET
            given = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "default")]
            default = _default_text(given[0]) if given else implied
            self._add_use(node.args[0], default, short in self.contexts)
        elif short == LIBRARY and node.args and isinstance(node.args[0], ast.Constant):
            library = str(node.args[0].value)
            if re.fullmatch(r"[\w-]+", library):
                name = library.replace("-", "_").upper() + "_PATH"
                self.uses.append(VariableUse(name, '""', self.file))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _dotted_name(node.value) in ("os.environ", "environ"):
            self._add_use(node.slice, UNSET if isinstance(node.ctx, ast.Load) else "")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(_dotted_name(c) in ("os.environ", "environ") for c in node.comparators):
            self._add_use(node.left, UNSET)
        self.generic_visit(node)


def find_uses(folder: Path) -> list[VariableUse]:
    """Every use in the Python files under a folder (or in one file).

    Raises:
        SyntaxError: a file is no Python of this version.
    """
    trees = []
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
        relative = file.name if folder.is_file() else file.relative_to(folder).as_posix()
        text = file.read_text(encoding="utf-8")
        # Bindings of C headers are megabytes of Python that reads nothing.
        if re.search(rf"\b(?:(?:getenv|environ|{CONTEXT})\b|{LIBRARY}\()", text):
            trees.append((relative, ast.parse(text)))
    contexts = {CONTEXT} | {
        node.name
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(_dotted_name(b) == CONTEXT for b in node.bases)
    }
    return [use for file, tree in trees for use in _UseFinder(file, tree, contexts).uses]


def merge_uses(uses: Sequence[VariableUse]) -> list[Variable]:
    """The uses by variable, sorted by name; names that the source computes come last."""
    found = []
    for name in sorted({u.name for u in uses}, key=lambda n: (n.startswith("<"), n)):
        of = [u for u in uses if u.name == name]
        found.append(
            Variable(
                name,
                tuple(sorted({u.default for u in of if u.default})),
                tuple(sorted({u.file for u in of})),
                any(u.context for u in of),
            )
        )
    return found


def documented_defaults(page: str) -> dict[str, tuple[str, ...]]:
    """Defaults of each variable that a page lists.

    An item is "- `VARIABLE` (`default`, `default`): meaning", or "`VARIABLE`=`default`" in a
    sentence; a star behind the name is Context's. Items without defaults are our own.
    """
    rows = {}
    for line in page.splitlines():
        if item := re.match(r"- `(\w+)`\*? \(((?:`[^`]*`(?:, )?)*)\)(?:: |$)", line):
            rows[item[1]] = tuple(re.findall(r"`([^`]+)`", item[2]))
        else:
            rows |= {n: (d,) for n, d in re.findall(r"`(\w+)`\*?=`([^`]+)`", line)}
    return rows


def page_differences(found: Sequence[Variable], page: str) -> list[str]:
    """Differences of the page from the source: missing, superfluous or wrong; a line each."""
    rows, problems = documented_defaults(page), []
    named = [v for v in found if not v.name.startswith("<") and not v.is_for_other_hardware]
    for v in named:
        read = f"{', '.join(v.defaults) or 'only set'} in {', '.join(v.files)}"
        if v.name not in rows:
            problems.append(f"{v.name}: not on the page; {read}")
        elif rows[v.name] != v.defaults:
            said = ", ".join(rows[v.name]) or "only set"
            problems.append(f"{v.name}: the page says {said}; the source says {read}")
    gone = rows.keys() - {v.name for v in named}
    return problems + [f"{name}: on the page, not in the source" for name in sorted(gone)]


def installed_folder(package: str) -> Path:
    """The folder of an installed package.

    Raises:
        FileNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{package}: not installed here; name its folder instead")
    return Path(spec.submodule_search_locations[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the list or the differences; returns the exit code."""
    parser = argparse.ArgumentParser(prog="environment_variables.py", description=__doc__)
    parser.add_argument("tree", nargs="?", type=Path, help="default: the installed tinygrad")
    parser.add_argument("--check", type=Path, metavar="PAGE", help="exit 1 when the page differs")
    parser.add_argument("-o", choices=("md", "json"), default="md", help="form of the list")
    args = parser.parse_args(argv)
    try:
        tree: Path = args.tree or installed_folder("tinygrad")
        if not tree.exists():
            raise FileNotFoundError(f"{tree}: no such folder")
        if args.check and not args.check.is_file():
            page = "docs/reference/environment.md"
            raise FileNotFoundError(f"{args.check}: no such page; the one of tinygrad is {page}")
        found = merge_uses(find_uses(tree))
        if args.check:
            problems = page_differences(found, args.check.read_text(encoding="utf-8"))
            print("\n".join(problems) or f"{args.check}: as the source says, {len(found)} names")
            return 1 if problems else 0
    except (OSError, SyntaxError) as e:
        print(f"environment_variables.py: {e}", file=sys.stderr)
        return 2
    if args.o == "json":
        print(json.dumps([asdict(v) for v in found], indent=1))
        return 0
    for v in found:
        star = "*" if v.context else ""
        defaults = ", ".join(f"`{default}`" for default in v.defaults)
        print(f"- `{v.name}`{star} ({defaults}): ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
