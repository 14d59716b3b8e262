"""docs/fixes.md: an entry for each patch, with its title and exactly its tests."""

import re
import sys

import pytest
from tests.docs.pages import REPOSITORY, section, text

sys.path.insert(0, str(REPOSITORY / "tools"))
from patchseries.model import Patch
from patchseries.reader import read_series

PAGE = "docs/fixes.md"
PATCHES = read_series(REPOSITORY).patches
PARTS = ["Problem", "Cause", "Fix", "Proof"]


def test_every_patch_has_an_entry_and_every_entry_a_patch() -> None:
    entries = re.findall(r"(?m)^### (\d{4}) (.+)$", text(PAGE))
    titles = {number: title.replace("\\", "") for number, title in entries}
    assert len(entries) == len(titles)
    assert titles == {patch.number: patch.subject for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.number)
def test_an_entry_tells_the_whole_story(patch: Patch) -> None:
    (heading,) = re.findall(rf"(?m)^### ({patch.number} .+)$", text(PAGE))
    entry = section(PAGE, heading)
    parts = re.findall(r"(?m)^- \*\*(\w+)\.\*\*", entry)
    assert parts in (PARTS, [*PARTS, "Figure"])
    proof = re.search(r"\*\*Proof\.\*\*.*", entry)
    assert proof
    named = set(re.findall(r"`(test_\w+)`", proof[0]))
    assert named == {test.split("::")[1] for test in patch.tests}
    for test in patch.tests:
        file, name = test.split("::")
        assert f"def {name}(" in text(file)


def test_entries_of_speed_have_figures() -> None:
    for patch in PATCHES:
        entry = section(PAGE, next(iter(re.findall(rf"(?m)^### ({patch.number} .+)$", text(PAGE)))))
        assert patch.why != "perf" or "**Figure.**" in entry
