"""docs/architecture.md names the folders that there are, and imports follow its arrows."""

import ast
import re
from pathlib import Path

from tests.docs.pages import REPOSITORY, section

PAGE = "docs/architecture.md"
# Folders that .gitignore leaves out, and hidden ones.
MADE = r"\.|__pycache__|build$|dist$|htmlcov|result|.*\.egg-info"
# Package of ours: what of ours it may import.
ARROWS = {
    "benchmarks/orinbench": {"orinbench", "orinllm", "orinboard"},
    "engine/orinllm": {"orinllm", "orinboard"},
    "telemetry/orinboard": {"orinboard"},
    "telemetry/orinexporter": {"orinexporter", "orinboard"},
    "simulator/nvgpusim": {"nvgpusim"},
    "tools": {"patchseries"},
    "docs/examples": {"orinbench", "orinllm"},
}
OURS = {"orinbench", "orinllm", "orinboard", "orinexporter", "nvgpusim", "patchseries"} | {"tests"}


def folders(depth: int = 2, root: Path = REPOSITORY) -> set[str]:
    """The folders of the repository, down to two levels, without what is made in it."""
    found = set()
    for path in root.iterdir():
        if path.is_dir() and not re.match(MADE, path.name):
            found.add(f"{path.relative_to(REPOSITORY).as_posix()}/")
            found |= folders(depth - 1, path) if depth > 1 else set()
    return found


def test_the_table_names_the_rooms_that_there_are() -> None:
    table = section(PAGE, "The house")
    first = "".join(re.findall(r"(?m)^\| (.+?) \|", table))
    named = set(re.findall(r"`([\w./]+)`", first))
    for name in named:
        assert (REPOSITORY / name).exists(), f"{PAGE}: {name}"
    top = {f for f in folders() if f.count("/") == 1 and not f.startswith(".")}
    covered = {f"{name.split('/')[0]}/" for name in named if "/" in name}
    assert top == covered
    for room in ("benchmarks", "engine", "telemetry", "simulator"):
        packages = {f for f in folders() if f.startswith(f"{room}/") and f.count("/") == 2}
        assert packages <= named, f"{PAGE}: a folder of {room}/ has no row"


def test_imports_follow_the_arrows() -> None:
    for room, allowed in ARROWS.items():
        for path in (REPOSITORY / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names.append(node.module or "")
                wrong = {name.split(".")[0] for name in names} & (OURS - allowed)
                assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"
