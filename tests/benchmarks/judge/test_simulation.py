"""The figures on docs/measure/statistics.md about the judge are what 2,000 experiments a cell give.

UPDATE_DOCS=1 writes the page's table anew.
"""

import os
import re
from pathlib import Path

import pytest
from tests.benchmarks.judge.simulation import (
    KINDS,
    ROUNDS,
    Cell,
    family_share,
    history_cell,
    paired_cell,
    red_shares,
    row_coverage,
    separate_cell,
)

PAGE = Path(__file__).parents[3] / "docs" / "measure" / "statistics.md"
ALLOWED = 6.0  # percent of verdicts on nothing; nominal are 5
# Cells that are above it: the page names them and says what to do.
KNOWN = {(separate_cell, "AR(1), 0.7")}
# Columns of the page's table behind the machine's.
COLUMNS = {"paired": slice(3), "separate": slice(3, 6), "history": slice(6, 7), "rows": slice(7, 9)}
CELLS = {"paired": paired_cell, "separate": separate_cell, "history": history_cell}


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def shown(name: str, row: str, cells: list[str]) -> None:
    """Compare a row's columns of this name with the page's, or write them there."""
    text = PAGE.read_text(encoding="utf-8")
    before, mark, rest = text.partition("<!-- simulated -->\n")
    found = re.search(rf"(?m)^\| {re.escape(row)} \|(.*)\|$", rest)
    assert mark and found is not None, f"{PAGE.name} has no row {row}"
    there = [cell.strip() for cell in found[1].split("|")]
    if os.environ.get("UPDATE_DOCS"):
        there[COLUMNS[name]] = cells
        line = f"| {' | '.join([row, *there])} |"
        PAGE.write_text(before + mark + rest.replace(found[0], line, 1), encoding="utf-8")
    else:
        assert there[COLUMNS[name]] == cells


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CELLS)
def test_verdicts_on_nothing_stay_rare(name: str, kind: object) -> None:
    measure = CELLS[name]
    kind = next(each for each in KINDS if each is kind)
    cells: list[Cell] = []
    for rounds in ROUNDS if name != "history" else (10,):
        cells.append(measure(kind, rounds, seed=rounds))
        if (measure, kind.name) not in KNOWN:
            assert cells[-1].false < ALLOWED and cells[-1].covered > 100 - ALLOWED
    shown(name, kind.name, [cell.text() for cell in cells])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_rows_interval_covers(kind: object) -> None:
    kind = next(each for each in KINDS if each is kind)
    covered = [row_coverage(kind, rounds, seed=rounds) for rounds in (6, 10)]
    if kind.name != "AR(1), 0.7":  # named on the page
        assert min(covered) > 100 - ALLOWED
    shown("rows", kind.name, [f"{share:.0f}" for share in covered])


def test_twelve_tests_at_once_claim_as_rarely_as_one(page: str) -> None:
    share = family_share(10, seed=1)
    assert share < ALLOWED
    assert f"ten processes: {share:.1f} % of the runs claim anything" in page


def test_a_check_of_an_unchanged_series_is_rarely_red(page: str) -> None:
    shares = red_shares((1, 6, 11), seed=1)
    assert max(shares) < 5.0
    first, second, third = (f"{share:.1f}" for share in shares)
    assert f"is red in {first}, {second} and {third} percent" in page
