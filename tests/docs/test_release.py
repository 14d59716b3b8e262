"""docs/moving-to-a-new-release.md: what it says of each patch is of the patches there are."""

import re
import sys

from tests.docs.pages import REPOSITORY, section

sys.path.insert(0, str(REPOSITORY / "tools"))
from patchseries.reader import read_series

PAGE = "docs/moving-to-a-new-release.md"
PATCHES = read_series(REPOSITORY).patches


def test_every_patch_has_a_row() -> None:
    table = section(PAGE, "What each patch needs")
    assert re.findall(r"(?m)^\| (\d{4}) \|", table) == [patch.number for patch in PATCHES]
