"""docs/reference/environment.md says what the sources say; its tool reads all of them."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import REPOSITORY, section, text

sys.path.insert(0, str(REPOSITORY / "tools"))
import environment_variables as tool

PAGE = "docs/reference/environment.md"
# Variables of other programs that ours read too.
GENERAL = {
    "CC", "CCACHE", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "DEV", "GGML_CUDA_DISABLE_GRAPHS",
    "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "NO_COLOR", "OPENBLAS_NUM_THREADS", "PATH",
    "PYTEST_XDIST_WORKER", "PYTHONPATH", "TERM", "TMPDIR", "USER", "XDG_CACHE_HOME",
    "XDG_STATE_HOME",
}  # fmt: skip


@functools.cache
def tinygrad_uses() -> tuple[tool.VariableUse, ...]:
    """Variables that the installed tinygrad reads."""
    return tuple(tool.find_uses(tool.installed_folder("tinygrad")))


def reads(*rooms: str) -> set[str]:
    """The variables with constant names that sources of ours read."""
    uses = [use for room in rooms for use in tool.find_uses(REPOSITORY / room)]
    return {use.name for use in uses if use.default and re.fullmatch(r"[A-Z_]+", use.name)}


SOURCE = """
import os
from helpers import ContextVar, getenv
NAME = "BY_CONSTANT"
class Special(ContextVar): pass
plain, given, star = getenv("PLAIN"), getenv("GIVEN", "x|y"), Special("STAR", 0)
os.environ["ONLY_SET"] = "1"
if "ASKED" in os.environ: print(os.environ["ASKED"], os.environ.get(NAME), getenv(f"A{NAME}"))
class ContextVar: pass
dll = DLL("some-lib", "x")
"""


def test_the_page_is_what_the_source_says() -> None:
    assert tool.page_differences(tool.merge_uses(tinygrad_uses()), text(PAGE)) == []


def test_no_read_escapes_the_tool() -> None:
    """Lines that touch the environment in any spelling: each is one that the tool counted."""
    tree = tool.installed_folder("tinygrad")
    found = {use.file for use in tinygrad_uses()}
    for path in tree.rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        if "getenv" not in code and "environ" not in code and "ContextVar" not in code:
            continue
        code = re.sub(r"#.*|'[^']*environ[^']*'", "", code)
        if re.search(r"(?<!def )(?<!\w)(getenv|ContextVar)\(|os\.environ\b", code):
            assert path.relative_to(tree).as_posix() in found, path


def test_our_own_variables_are_on_the_page() -> None:
    listed = re.findall(r"(?m)^- (.+?): ", section(PAGE, "Ours"))
    named = set(re.findall(r"`([A-Z_]+)`", "".join(listed)))
    rooms = ("benchmarks", "engine", "simulator", "telemetry", "tools")
    read = reads(*rooms) | set(re.findall(r"(?m)^(\w+) \?=", text("Makefile"))) | {"UPSTREAM"}
    tinygrad = {v.name for v in tool.merge_uses(tinygrad_uses())}
    assert read - tinygrad - GENERAL <= named
    # Those of the tests that a person may set are here too; their fakes' are not.
    programs = "".join(file.read_text() for file in (REPOSITORY / "simulator").rglob("*.c"))
    assert named <= read | reads("tests") | set(re.findall(r'getenv\("(\w+)"\)', programs))


def test_the_tool_reads_every_spelling(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = {v.name: v for v in tool.merge_uses(tool.find_uses(tmp_path))}
    assert {name: v.defaults for name, v in found.items()} == {
        "ASKED": ("unset",),
        "BY_CONSTANT": ("unset",),
        "GIVEN": ("'x|y'",),
        "ONLY_SET": (),
        "PLAIN": ("0",),
        "SOME_LIB_PATH": ('""',),
        "STAR": ("0",),
        "<f'A{NAME}'>": ("0",),
    }
    assert found["STAR"].context and not found["PLAIN"].context


def test_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text('getenv("A", 1), getenv("B", 2)')
    (tmp_path / "ops_amd.py").write_text('getenv("OF_NO_ORIN", 1)')
    page = tmp_path / "page.md"
    page.write_text("- `A` (`0`): x\n\nAnd `C`*=`1`.\n- `D`: ours\n")
    assert tool.main([str(tmp_path), "--check", str(page)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "A: the page says 0; the source says 1 in a.py",
        "B: not on the page; 2 in a.py",
        "C: on the page, not in the source",
    ]


def test_the_list_of_the_tool_is_what_the_page_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    assert tool.main([str(tmp_path)]) == 0
    page = tmp_path / "page.md"
    page.write_text(capsys.readouterr().out)
    assert tool.main([str(tmp_path), "--check", str(page)]) == 0
    assert tool.main([str(tmp_path), "-o", "json"]) == 0


@pytest.mark.parametrize("tree", ["nowhere", "bad.py"])
def test_a_wrong_tree_is_one_line(tree: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def getenv(")
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "environment_variables.py", tmp_path / tree],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("environment_variables.py: ")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        # Three defaults that do not mean what they seem to, and are said to on the page.
        ("PMA=0", "from tinygrad.runtime.ops_nv import PMA; print(PMA.value)"),
        ("LLVMOPT=0", "from tinygrad.helpers import getenv; print(bool(getenv('LLVMOPT', '1')))"),
        ("SQTT=0", "from tinygrad.runtime.ops_amd import SQTT; print(SQTT.value)"),
    ],
)
def test_zero_switches_on(code: str, value: str, environment: dict[str, str]) -> None:
    name, _, zero = code.partition("=")
    done = subprocess.run(
        [sys.executable, "-c", value], env=environment | {name: zero},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True"
