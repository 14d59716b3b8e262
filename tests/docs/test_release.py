"""docs/moving-to-a-new-release.md: what it says of each patch is of the patches there are."""

import re
import sys

from tests.docs.pages import REPOSITORY, blocks, section

sys.path.insert(0, str(REPOSITORY / "tools"))
from patchseries.reader import read_series

PAGE = "docs/moving-to-a-new-release.md"
PATCHES = read_series(REPOSITORY).patches


def test_the_printed_report_is_of_this_series() -> None:
    (report,) = (b.lines for b in blocks(PAGE) if b.language == "text")
    rows = [re.fullmatch(r"(ok   |merge|no   |skip ) (\S+\.patch)(:.*)?", x) for x in report[1:-1]]
    assert [row and row[2] for row in rows] == [patch.file for patch in PATCHES]
    words = [row[1].strip() for row in rows if row]
    on = sum(word in ("ok", "merge") for word in words)
    assert report[-1] == (
        f"{on} of {len(PATCHES)} go onto 0.14.0, {words.count('merge')} of them by a merge"
    )


def test_every_patch_has_a_row() -> None:
    table = section(PAGE, "What each patch needs")
    assert re.findall(r"(?m)^\| (\d{4}) \|", table) == [patch.number for patch in PATCHES]
