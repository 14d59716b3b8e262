"""The pages say what the code says: every check with its rule, options that there are."""

from __future__ import annotations

import csv
import errno
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.simulator.kernel.rules.breakages import breakages

from nvgpusim.cli import run_python_program
from nvgpusim.orin.rules import RULES

DOCS = Path(__file__).parents[4] / "docs"
REFERENCE = DOCS / "reference"
RULES_PAGE = (REFERENCE / "simulator-rules.md").read_text()
NOT_MODELLED = "dispatch.not-modelled"
WITNESSES = "judge", "tests"
with (REFERENCE / "simulator-rules.csv").open(newline="") as lines:
    TABLE = list(csv.DictReader(lines))
FILES = sorted({row["file"] for row in TABLE})
# The handlers' files, with the number of lines at each release that the page says.
HANDLERS = re.findall(r"^\| (\w+\.c) \|.*\| (\d+) \| (\d+|not read) \|$", RULES_PAGE, re.M)


def rows(file: str) -> list[dict[str, str]]:
    return [row for row in TABLE if row["file"] == file]


@pytest.mark.parametrize(("file", "first", "second"), HANDLERS)
def test_every_line_of_a_handler_is_listed_once(file: str, first: str, second: str) -> None:
    for release, count in (("36.4", first), ("35.6", second)):
        found = [int(row[release]) for row in rows(file) if row[release]]
        assert len(set(found)) == (int(count) if count.isdigit() else 0)
        assert release == "35.6" or found == sorted(found)


def test_every_handler_has_its_count() -> None:
    whole = {"ioctl_as.c", "ioctl_channel.c", "ioctl_tsg.c", "ioctl_ctrl.c"}
    assert {file for file, *_ in HANDLERS} == whole | {"nvmap_ioctl.c", "nvmap_handle.c"}


@pytest.mark.parametrize("file", FILES)
def test_a_line_says_what_its_rule_says(file: str) -> None:
    said: set[str] = set()
    for row in rows(file):
        assert row["condition"], row
        names = row["rule"].split()
        for name in names:
            assert name in said or RULES[name].text in row["condition"], row
            same = errno.errorcode[RULES[name].errno] == row["errno"]
            assert same or name in (NOT_MODELLED, "dup.unallocated", "nvmap.fault"), row
        said.update(names)


def test_every_refusal_has_a_line_or_says_why_it_has_none() -> None:
    alone = {row["rule"] for row in rows("none")}
    listed = {name for row in TABLE if row["file"] != "none" for name in row["rule"].split()}
    assert all(row["condition"] == RULES[row["rule"]].text for row in rows("none"))
    assert not listed & alone
    assert listed | alone == {name for name, rule in RULES.items() if rule.errno}


def test_every_broken_rule_is_noticed() -> None:
    """`record_noticed.py --only RULE` writes the rows of rules that are new or made anew."""
    with (REFERENCE / "simulator-rules-noticed.csv").open(newline="") as lines:
        table = list(csv.DictReader(lines))
    ways = Counter(breakage.rule for breakage in breakages())
    assert {row["rule"]: int(row["ways"]) for row in table} == ways
    assert sorted(ways) == sorted(RULES)
    assert [row["rule"] for row in table if row["missed"]] == []
    assert all(int(row[name] or 0) <= int(row["ways"]) for row in table for name in WITNESSES)
    judge, tests = (sum(row[name] == row["ways"] for row in table) for name in WITNESSES)
    said = f"the judge notices {judge} in every way, and the tests {tests} of the others"
    assert said in " ".join(RULES_PAGE.split())


def test_options_of_the_page_are_those_of_the_program() -> None:
    page = (DOCS / "simulator.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"(?s)```.*?```", "", page)))
    there = {name for p in run_python_program.params for name in (*p.opts, *p.secondary_opts)}
    assert {"--delay", "--strict"} <= named <= there | {"--help"}
