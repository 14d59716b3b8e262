"""The pages of the repository, taken apart: fenced blocks, commands in them, links, anchors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Programs whose line in a fenced block is a command, if the block does not say what it holds.
PROGRAMS = {
    "cd", "cmake", "diff", "eval", "export", "git", "grep", "ls", "jetson-exporter", "make", "ncu",
    "nix", "nixos-rebuild", "nvgpusim", "orinbench", "orinllm", "pip", "pytest", "python",
    "python3", "scp", "sqlite3", "tar", "tools/series", "tools/environment_variables.py",
}  # fmt: skip
# Languages of blocks that hold no command.
LANGUAGES = {"nginx", "nix", "python", "sql", "text", "json", "yaml", "html", "c"}
SHELLS = {"console", "sh", "bash", "shell"}
PROMPT = re.compile(r"^(?:\$|\w+\$) ")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: relative to the repository.
        line: of the opening fence, from 1.
        language: the word behind the fence, or empty.
        mark: the HTML comment on the line before, without its dashes, or empty.
        lines: what is between the fences.
    """

    page: str
    line: int
    language: str
    mark: str
    lines: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """The commands in it: continuation lines joined, comments and prompts gone."""
        if self.language in LANGUAGES:
            return []
        prompted = any(PROMPT.match(line) for line in self.lines)
        found: list[str] = []
        open_line = False
        for line in self.lines:
            if open_line:
                found[-1] += " " + line.strip()
            elif prompted:
                if not PROMPT.match(line):
                    continue
                found.append(PROMPT.sub("", line))
            elif self.language in SHELLS or _program(line) in PROGRAMS:
                if line.strip() and not line.lstrip().startswith("#"):
                    found.append(line.strip())
                else:
                    continue
            else:
                continue
            found[-1] = re.sub(r"(?:^|\s+)# .*$", "", found[-1])
            open_line = found[-1].endswith("\\")
            found[-1] = found[-1].removesuffix("\\").strip()
        return [command for command in found if command]


def _program(line: str) -> str:
    words = line.split()
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    word = words[0].removeprefix(".venv/bin/") if words else "export" if line.strip() else ""
    return "python" if re.fullmatch(r"(.*/)?python3?", word) else word


def pages() -> list[str]:
    """Every page that a reader is sent to, relative to the repository."""
    root = REPOSITORY / "docs"
    folders = (root, root / "measure", root / "reference")
    docs = [page for folder in folders for page in sorted(folder.glob("*.md"))]
    names = [path.relative_to(REPOSITORY).as_posix() for path in docs]
    return ["README.md", "CONTRIBUTING.md", "patches/README.md", *names]


def text(page: str) -> str:
    """A page's text."""
    return (REPOSITORY / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    previous = ""
    for number, line in enumerate(text(page).splitlines(), 1):
        fence = re.match(r"^\s*```(\w*)", line)
        if opened is None:
            if fence:
                mark = re.fullmatch(r"<!-- (.*) -->", previous)
                opened = (number, fence[1], mark[1] if mark else "")
                inside = []
            previous = line
        elif fence and not fence[1]:
            yield Block(page, *opened, tuple(inside))
            opened = None
        else:
            inside.append(line)
    assert opened is None, f"{page}: the block at line {opened} has no end"


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"(?ms)^\s*```.*?^\s*```\s*$", "", text(page))


def table_commands(page: str) -> Iterator[tuple[int, str]]:
    """The commands in the first columns of tables that are headed "command", with their lines."""
    inside = False
    for number, line in enumerate(text(page).splitlines(), 1):
        inside = line.startswith("| command |") or (inside and line.startswith("|"))
        if inside and (cell := re.match(r"\| (`.*?`) \| ", line)):
            yield from ((number, command) for command in re.findall(r"`([^`]+)`", cell[1]))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"(?m)^#{1,6} (.+?)\s*$", prose(page)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(slug + (f"-{found[slug]}" if slug in found else ""))
        found[slug] = found.get(slug, 0) + 1
    return names


def links(page: str) -> list[str]:
    """Targets of the links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def section(page: str, heading: str) -> str:
    """The text below a heading, down to the next one of its rank or above.

    Raises:
        AssertionError: the page has no such heading.
    """
    match = re.search(rf"(?m)^(#+) {re.escape(heading)}\s*$", text(page))
    assert match, f"{page}: no heading {heading!r}"
    rest = text(page)[match.end() :]
    end = re.search(rf"(?m)^#{{1,{len(match[1])}}} ", rest)
    return rest[: end.start()] if end else rest
