"""patches/README.md: a line for each patch, which leads to a header that tells the whole story."""

import re
import sys

import pytest
from tests.docs.pages import REPOSITORY, text

sys.path.insert(0, str(REPOSITORY / "tools"))
from patchseries.series import Patch, read_series

PAGE = "patches/README.md"
PATCHES = read_series(REPOSITORY).patches


def test_every_patch_has_a_line_and_every_line_a_patch() -> None:
    rows = re.findall(r"(?m)^- \[(\d{4})\]\(tinygrad/(.+?)\) .+; \*.+\*$", text(PAGE))
    assert sorted(rows) == [(patch.number, patch.file) for patch in PATCHES]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.number)
def test_a_header_tells_the_whole_story(patch: Patch) -> None:
    parts = re.findall(r"(?m)^(Problem|Cause|Fix|Proof): ", patch.text)
    assert parts == ["Problem", "Cause", "Fix", "Proof"]
    for test in patch.tests:
        file, name = test.split("::")
        assert f"def {name}(" in text(file)
