"""The pages say what the code says: every check with its rule, every option in the same words."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import click
import pytest

from nvgpusim.cli import run
from nvgpusim.rules import RULES

DOCS = Path(__file__).parents[3] / "docs"
RULES_PAGE = (DOCS / "simulator-rules.md").read_text()
NOT_MODELLED = "dispatch.not-modelled"
Row = tuple[str, str, str, list[str], str]


def rows(section: str) -> list[Row]:
    """(line at the first release, at the second, errno, rules, condition) of a table of lines.

    A row of the page may stand for several lines: their numbers and errnos are in the same order.
    """
    found: list[Row] = []
    for line in section.splitlines():
        cells = [cell.strip(" |") for cell in line.split(" | ")]
        if re.match(r"\| (\d+|–) ", line):
            *columns, rules, condition = cells
            names = re.findall(r"`(.+?)`", rules)
            lines = zip(*(column.split() for column in columns), strict=True)
            found.extend((*place, names, condition) for place in lines)
    return found


SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", RULES_PAGE, re.M | re.S))
HANDLERS = (
    *("ioctl_as.c", "ioctl_channel.c", "ioctl_tsg.c", "ioctl_ctrl.c"),
    *("nvmap_ioctl.c", "nvmap_handle.c"),
)


@pytest.mark.parametrize("file", HANDLERS)
def test_every_line_of_a_handler_is_listed_once(file: str) -> None:
    table = rows(SECTIONS[file])
    counts = [int(n) for n in re.findall(r"(\d+) (?:lines )?at", SECTIONS[file])]
    both = [[row[0] for row in table], [row[1] for row in table]]
    columns = [[int(line) for line in lines if line != "–"] for lines in both[: len(counts)]]
    assert [len(set(column)) for column in columns] == counts
    assert columns[0] == sorted(columns[0])


@pytest.mark.parametrize("file", sorted(SECTIONS))
def test_a_line_says_what_its_rule_says(file: str) -> None:
    table = rows(SECTIONS[file])
    assert table
    said: set[str] = set()
    for first, second, number, names, condition in table:
        place = f"{file}:{first}/{second}"
        assert condition, place
        for name in names:
            assert name in said or RULES[name].text in condition, place
            same = errno.errorcode[RULES[name].errno] == number
            assert same or name in (NOT_MODELLED, "dup.unallocated", "nvmap.fault"), place
        said.update(names)


def test_every_refusal_has_a_line_or_says_why_it_has_none() -> None:
    listed = {name for section in SECTIONS.values() for row in rows(section) for name in row[3]}
    rest = RULES_PAGE.partition("## Rules without a line of their own")[2]
    alone = re.findall(r"^\| `(\S+)` \| (E\w+) \| (.*) \| (.*) \|$", rest, re.M)
    for name, number, text, source in alone:
        rule = RULES[name]
        assert (number, text, source) == (errno.errorcode[rule.errno], rule.text, rule.source)
    assert not listed & {name for name, *_ in alone}
    assert listed | {n for n, *_ in alone} == {n for n, r in RULES.items() if r.errno}


def test_help_has_the_words_of_the_page() -> None:
    page = (DOCS / "simulator-use.md").read_text().replace("\\|", "|").replace("`", "")
    table = dict(re.findall(r"^\| (--.+?) \| (.+) \|$", page, re.M))
    described = {option: text for options, text in table.items() for option in options.split(", ")}
    described = {option.split()[0]: text for option, text in described.items()}
    for parameter in run.params:
        if isinstance(parameter, click.Option):
            words = str(parameter.help).rstrip(".")
            for name in (*parameter.opts, *parameter.secondary_opts):
                assert described[name].lower().startswith(words.lower()), name
