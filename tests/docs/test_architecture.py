"""docs/architecture.md names the folders that there are, and imports follow its arrows."""

import ast
import re
import subprocess

from tests.docs.pages import REPOSITORY, section

PAGE = "docs/architecture.md"
# Package of ours: what of ours it may import.
ARROWS = {
    "benchmarks/orinbench": {"orinbench", "jetson"},
    "telemetry/jetson": {"jetson"},
    "telemetry/exporter": {"exporter", "jetson"},
    "simulator/nvgpusim": {"nvgpusim"},
    "tools": {"patchseries"},
    "docs/examples": {"orinbench"},
}
OURS = {"orinbench", "jetson", "exporter", "nvgpusim", "patchseries", "tests"}


def folders() -> set[str]:
    """The folders of the repository that git knows, down to two levels."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {f"{part}/" for line in done.stdout.splitlines() for part in parents(line)}


def parents(file: str) -> list[str]:
    parts = file.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def test_the_table_names_the_rooms_that_there_are() -> None:
    table = section(PAGE, "The house")
    first = "".join(re.findall(r"(?m)^\| (.+?) \|", table))
    named = set(re.findall(r"`([\w./]+)`", first))
    for name in named:
        assert (REPOSITORY / name).exists(), f"{PAGE}: {name}"
    top = {f for f in folders() if f.count("/") == 1 and not f.startswith(".")}
    covered = {f"{name.split('/')[0]}/" for name in named if "/" in name}
    assert top == covered
    for room in ("benchmarks", "telemetry", "simulator"):
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
