"""docs/reference/proven.md: commands exist, each claim has its page, the marks are known ones."""

import re

import click
import pytest
from tests.docs.pages import REPOSITORY, anchors, text

from orinbench.cli import orinbench

PAGE = "docs/reference/proven.md"
MARK = re.compile(r"|yes(, [\w ]+)?|waits")
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in text(PAGE).splitlines()
    if re.match(r"\| [^-]", line)
][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_claim_has_a_page_and_a_command(row: list[str]) -> None:
    claim, page, command, *where = row
    assert len(claim) > 10 and len(where) == 4
    assert all(MARK.fullmatch(mark) for mark in where), where
    assert any(mark.startswith("yes") for mark in where), "a claim that nothing shows"
    link = re.fullmatch(r"\[[\w-]+\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", page)
    assert link
    file = ((REPOSITORY / PAGE).parent / link[1]).resolve().relative_to(REPOSITORY).as_posix()
    assert not link[2] or link[2] in anchors(file), page
    for figure in re.findall(r"\d[\d.,]*\d", claim):
        assert figure in text(file), f"{claim}: {figure} is not on its page"
    exists(command.strip("`"))


def exists(command: str) -> None:
    program, *words = command.split()
    if program == "pytest":
        assert words and all((REPOSITORY / word).exists() for word in words), command
    elif program == "make":
        assert re.search(rf"(?m)^{words[0]}:", text("Makefile")), command
    elif program == "orinbench":
        context = click.Context(orinbench)
        assert orinbench.get_command(context, words[0]), command
    elif program == "nvgpusim":
        assert words[0] in text("docs/simulator.md"), command
    else:
        assert (REPOSITORY / program).exists(), command


def test_every_place_where_only_a_board_can_tell_waits() -> None:
    """The points that tegra-iface.md leaves to a board are not claimed for boards here."""
    assert not [row for row in ROWS if row[6].startswith("yes")], "who had a board?"
