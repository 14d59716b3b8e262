"""Output that a page shows is what the command prints.

A block below `<!-- checked -->` is compared line by line, with times, addresses and the like made
alike. Below `<!-- varies -->`, where a search or a schedule of threads decides, each shown line
must have the form of one that was printed. `...` stands for any lines. UPDATE_DOCS=1 writes the
checked blocks without `...` anew.
"""

import os
import re
import subprocess
from collections.abc import Iterator

import pytest
from tests.docs.pages import PROMPT, REPOSITORY, Block, blocks, pages

MARKS = {"checked", "varies"}
MARKED = [b for page in pages() for b in blocks(page) if b.mark in MARKS]
# Text that differs from run to run, and its stand-in.
ALIKE = [
    (r"tm +[\d.]+[num]?s */ +[\d.]+ms \( *[\d.]+ GFLOPS +[\d.]+\|[\d.]+ +GB/s\)", "tm T"),
    (r" *\b[\d.]+ *(ns|us|ms|s)\b", " T"),
    (r"pid:\d+", "pid:N"),
    (r"CACHE MISS [0-9a-f]{8}", "CACHE MISS H"),
    (r"cache hit [0-9a-f]{8}", "cache hit H"),
    (r" +\d+ uops in cache", " N uops in cache"),
    (r"0x[0-9a-f]{6,}", "0xA"),
    (r"/\S*/(rewrites|profile)\.pkl\.\w+", r"/tmp/\1.pkl.USER"),
    (r"[\w./-]*/(?=[\w.]+\.(so|py)\b)", ".../"),
    (r" +$", ""),
]


def alike(line: str) -> str:
    for pattern, stands in ALIKE:
        line = re.sub(pattern, stands, line)
    return line


def form(line: str) -> str:
    """The line with every number and run of numbers or spaces as one sign."""
    return re.sub(r"[\d._ ]*\d[\d._ ]*", "#", re.sub(r" +", " ", alike(line))).strip()


def parts(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines shown below it."""
    command, shown = "", list[str]()
    for line in block.lines:
        if PROMPT.match(line):
            if command:
                yield command, shown
            command, shown = PROMPT.sub("", line), []
        elif command.endswith("\\"):
            command = command.removesuffix("\\") + line.strip()
        else:
            shown.append(line)
    assert command, f"{block.page}:{block.line}: a checked block without a command"
    yield command, shown


def run(command: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", done.stdout.strip("\n"))]
    return [re.sub(r"\x1b\[[\dKm;]*", "", line).rstrip() for line in lines if line]


def matches(shown: list[str], printed: list[str]) -> bool:
    """True if printed lines are those shown, with `...` for any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line.strip() == "..." else re.escape(alike(line)) + r"\n"
        for line in shown
        if line.strip()
    )
    return bool(re.fullmatch(pattern, "".join(f"{alike(line)}\n" for line in printed)))


@pytest.mark.parametrize("block", MARKED, ids=lambda b: f"{b.page}:{b.line}")
def test_a_page_shows_what_is_printed(block: Block, environment: dict[str, str]) -> None:
    written: list[str] = []
    for command, shown in parts(block):
        printed = run(command, environment)
        assert not [line for line in printed if line.startswith("Traceback")], printed
        written += [f"$ {command}", *printed]
        if block.mark == "varies":
            forms = {form(line) for line in printed}
            for line in shown:
                known = line.strip() in ("", "...") or form(line) in forms
                assert known, f"{block.page}:{block.line}: {line!r}\n" + "\n".join(printed)
        elif not os.environ.get("UPDATE_DOCS") or "..." in [line.strip() for line in shown]:
            assert matches(shown, printed), f"{block.page}:{block.line}\n" + "\n".join(printed)
    if os.environ.get("UPDATE_DOCS") and block.mark == "checked" and "..." not in block.lines:
        rewrite(block, written)


def rewrite(block: Block, lines: list[str]) -> None:
    lines = [re.sub(r"/\S*/(?=\w+\.pkl\.)", "/tmp/", line) for line in lines]
    lines = [line.replace(f"{REPOSITORY}/", "").replace(".pkl.root", ".pkl.me") for line in lines]
    path = REPOSITORY / block.page
    old = "\n".join(block.lines)
    content = path.read_text(encoding="utf-8")
    assert content.count(f"\n{old}\n```") == 1, f"{block.page}:{block.line}: not one such block"
    path.write_text(content.replace(f"\n{old}\n```", "\n" + "\n".join(lines) + "\n```"))


def test_marks_are_known() -> None:
    unknown = {b.mark for page in pages() for b in blocks(page) if b.mark} - MARKS
    assert not unknown, "a comment right above a block is a mark"


def test_the_comparison_sees_what_differs() -> None:
    assert matches(["a 1.00 ms", "...", "z"], ["a 2.50 ms", "b", "c", "z"])
    assert not matches(["a", "z"], ["a", "b", "z"])
    assert not matches(["x = 1"], ["x = 2"])
    assert form("12  -> 4 actions 16 4") == form("7  -> 91 actions 256") != form("7 actions")
