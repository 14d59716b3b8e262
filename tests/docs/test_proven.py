"""docs/reference/proven.md: commands exist, each claim has its page and a known place."""

import re

import click
import pytest
from tests.docs.pages import REPOSITORY, anchors, text

from orinbench.cli import orinbench

PAGE = "docs/reference/proven.md"
PLACE = r"(?:CPU|simulator|H200)(?: \([\w ]+\))?"  # a board would be one: who had it?
ITEM = re.compile(r"- \[(.{11,})\]\(([\w./-]+\.md)(?:#([\w-]+))?\): `(.+)` \((.*)\)")
ITEMS = [line for line in text(PAGE).splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item[3:43])
def test_a_claim_has_a_page_and_a_command(item: str) -> None:
    found = ITEM.fullmatch(item)
    assert found, item
    claim, page, anchor, command, shown = found.groups()
    assert re.fullmatch(rf"{PLACE}(?:, {PLACE})*\*?", shown), "a claim that nothing shows"
    file = ((REPOSITORY / PAGE).parent / page).resolve().relative_to(REPOSITORY).as_posix()
    assert not anchor or anchor in anchors(file), item
    for figure in re.findall(r"\d[\d.,]*\d", claim):
        assert figure in text(file), f"{claim}: {figure} is not on its page"
    exists(command)


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
