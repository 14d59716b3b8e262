"""patches/README.md: what it says of a move is of the patches that there are."""

import re
import sys

from tests.docs.pages import REPOSITORY, section

sys.path.insert(0, str(REPOSITORY / "tools"))
from patchseries.series import read_series

PAGE = "patches/README.md"
PATCHES = read_series(REPOSITORY).patches


def test_every_patch_has_a_row() -> None:
    table = section(PAGE, "What each patch needs")
    assert re.findall(r"(?m)^\| (\d{4}) \|", table) == [patch.number for patch in PATCHES]
