"""A table of figures says which command measured them, on which machine, and when.

A table is one of figures if three of its cells have a number with a unit of speed, of time below a
second, or a ratio, or if its head names such a unit and three of its cells are numbers. What it has
to say stands in its section, or in the lines of a section above that come before its first
subsection.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.docs.pages import PROGRAMS, pages, text

UNIT = r"(?:tok/s|tokens/s|tokens a second|images/s|[GT]B/s|[GT]FLOPS|µs|us|ms)"
NUMBER = r"\**\d[\d ,.]*"
# "12.9 GB/s", "0.34 / 12.9 / 10.0 GB/s", "3449 -> 1289 us", "19 us to 1.2 ms"
FIGURE = re.compile(rf"{NUMBER}(?:(?:/|–|->|to|\.\.) ?{NUMBER})*\s?{UNIT}\b|\d\.\d+x\b")
HEADED = re.compile(rf"\b{UNIT}(?!\w)")
FEW = 3
COMMAND = re.compile(rf"^(?:\w+=\S+ )*(?:\.venv/bin/)?(?:{'|'.join(map(re.escape, PROGRAMS))})\b")
MACHINE = re.compile(
    r"\b(?:H100|H200|AGX|Orin NX|Orin Nano|EPYC|Xeon|Ryzen|x86(?:-64)?|sm_\d\d|any CPU)\b"
)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


@dataclass(frozen=True)
class Table:
    """A table of a page: the line of its head, its rows, and all that its section says."""

    line: int
    rows: tuple[str, ...]
    said: str

    def cells(self) -> list[str]:
        """The cells below the head."""
        return [cell.strip() for row in self.rows[2:] for cell in row.strip().strip("|").split("|")]

    def has_figures(self) -> bool:
        """True if it is a table of figures."""
        figures = sum(FIGURE.search(cell) is not None for cell in self.cells())
        numbers = sum(re.match(r"\**[\d.]+\b", cell) is not None for cell in self.cells())
        return figures >= FEW or (numbers >= FEW and HEADED.search(self.rows[0]) is not None)

    def lacks(self) -> list[str]:
        """List which of command, machine and date its section lacks."""
        spans = re.findall(r"`([^`]+)`", self.said) + self.said.splitlines()
        there = {
            "a command": any(COMMAND.match(span.strip()) for span in spans),
            "a machine": MACHINE.search(self.said) is not None,
            "a date": DATE.search(self.said) is not None,
        }
        return [what for what, is_there in there.items() if not is_there]


def tables(page: str) -> Iterator[Table]:
    """The tables of a page outside its fences."""
    lines = page.splitlines()
    sections: dict[int, list[str]] = {}  # by level: the lines before its first subsection
    fenced = False
    found: list[tuple[int, list[str], dict[int, list[str]]]] = []
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        heading = None if fenced else re.match(r"(#+) ", line)
        if heading is not None:
            level = len(heading[1])
            sections = {at: said for at, said in sections.items() if at < level} | {level: []}
        if sections:
            sections[max(sections)].append(line)
        if not fenced and line.startswith("|"):
            if number == 1 or not lines[number - 2].startswith("|"):
                found.append((number, [], dict(sections)))
            found[-1][1].append(line)
    for number, rows, around in found:
        yield Table(number, tuple(rows), "\n".join("\n".join(said) for said in around.values()))


@pytest.mark.parametrize("page", pages())
def test_figures_have_command_machine_and_date(page: str) -> None:
    for table in tables(text(page)):
        if table.has_figures():
            missing = " and ".join(table.lacks())
            assert not missing, f"{page}:{table.line}: a table of figures without {missing}"


def test_the_pages_with_figures_are_seen() -> None:
    with_figures = {page for page in pages() if any(t.has_figures() for t in tables(text(page)))}
    assert with_figures >= {"README.md", "docs/measure/performance.md", "docs/reference/figures.md"}


FIGURES = "| kernel | us |\n|---|---|\n| a | 1.5 |\n| b | 2 |\n| c | 3 |\n"


@pytest.mark.parametrize(
    ("page", "lacking"),
    [
        (f"# Page\n\n{FIGURES}", ["a command", "a machine", "a date"]),
        (f"# Page\n\n`orinbench suite` on one H200, 2026-11-21.\n\n{FIGURES}", []),
        (f"# Page\n\n```\nDEV=CPU orinbench suite\n```\nOn an EPYC, 2026-11-21.\n\n{FIGURES}", []),
        (f"# Page\n\n`orinbench suite` on a fast one.\n\n{FIGURES}", ["a machine", "a date"]),
        (f"# A\n\nOne H200, 2026-11-21.\n\n## B\n\n`make bench`\n\n{FIGURES}", []),
        (f"# A\n\n## B\n\n`make bench`, H200, 2026-11-21\n\n## C\n\n{FIGURES}",
         ["a command", "a machine", "a date"]),
        (f"# A\n\n{FIGURES.replace('us', 'x')}".replace("3 |", "3 us |"), None),
        ("# A\n\n| step | most |\n|---|---|\n| a | 30 s |\n| b | 1 min |\n| c | 2 min |\n", None),
        ("# A\n\n| code | meaning |\n|---|---|\n| 0 | good |\n| 1 | bad |\n| 2 | no |\n", None),
        ("# A\n\n| row | |\n|---|---|\n| a | 1 GB/s |\n| b | 1 / 2 TB/s |\n| c | 3 -> 1 ms |\n",
         ["a command", "a machine", "a date"]),
    ],
)  # fmt: skip
def test_the_rule(page: str, lacking: list[str] | None) -> None:
    """None: no table of figures."""
    (table,) = tables(page)
    assert (table.lacks() if table.has_figures() else None) == lacking
