"""The report of a device check, and the documents' claims about a board judged by it.

`claims.json` has for each claim an id, the sentence, the document where it stands, and checks over
the report: a path of names from `steps`, an operation, a value. A claim is confirmed when all of
its checks hold, refuted when one does not, and not tested where the report lacks what one asks for.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError
from orinbench.files_and_json import parse_dataclass, read_text

FORMAT = "tinygrad-orin device-check 3"


@dataclass(frozen=True)
class StepEntry:
    """A step in a report, beside its `result`: an object as the step makes it, or null."""

    status: str  # done, failed, not run, out of time
    seconds: float
    reason: str | None


@dataclass(frozen=True)
class ReportFields:
    """Fields of every report beside its `format`."""

    started: str  # UTC
    simulated: bool  # taken on nvgpusim, not on a board
    versions: dict[str, str | None]
    steps: dict[str, StepEntry]


@dataclass(frozen=True)
class DriverChoiceAnswer:
    """An answer in a report: one of the driver's choices against another, as people are told."""

    own: str
    other: str
    figure: str
    ratio: float | None  # own over other
    verdict: str


def load_report(path: Path) -> dict[str, Any]:
    """Return a report; raises BenchError, with one line, for any other file."""
    text = read_text(path, "what `orinbench device-check` writes")
    try:
        report: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise BenchError(f"{path}: no JSON; want what `orinbench device-check` writes") from None
    said = report.get("format") if isinstance(report, dict) else None
    if said != FORMAT:
        raise BenchError(f"{path}: format {str(said)[:60]!r}; `device-check` writes {FORMAT!r}")
    parse_dataclass(ReportFields, report, str(path))
    for name, entry in report["steps"].items():
        if not isinstance(entry.get("result"), dict | None):
            raise BenchError(f"{path}: steps: {name}: result: want an object or null")
    return report


class ClaimOutcome(Enum):
    """A report's outcome for one claim."""

    REFUTED = "refuted"
    CONFIRMED = "confirmed"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class ClaimCondition:
    """One check: the value at `path` (names and `*` for each), an operation, what it wants.

    `same as` wants what the report has at another path.
    """

    path: tuple[str, ...]
    op: str
    value: Any = None


@dataclass(frozen=True)
class Claim:
    """A sentence of a document. `board_only`: a simulated board says nothing about it."""

    id: str
    text: str
    doc: str
    board_only: bool
    checks: tuple[ClaimCondition, ...]


OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": lambda found, wanted: found == wanted,
    "same as": lambda found, wanted: found == wanted,
    "one of": lambda found, wanted: found in wanted,
    "at least": lambda found, wanted: found >= wanted,
    "at most": lambda found, wanted: found <= wanted,
    "matches": lambda found, wanted: re.search(wanted, found or "") is not None,
}


def load_claims() -> list[Claim]:
    """Return the claims, in the order of the file."""
    raw = json.loads(Path(__file__).with_name("claims.json").read_text(encoding="utf-8"))
    return [
        Claim(
            **{name: entry[name] for name in ("id", "text", "doc")},
            board_only=entry.get("board_only", False),
            checks=tuple(
                ClaimCondition(tuple(check["path"].split("/")), check["op"], check.get("value"))
                for check in entry["checks"]
            ),
        )
        for entry in raw
    ]


def values_at_path(report: Any, path: tuple[str, ...]) -> list[Any]:
    """Return the values at a path; none where something of it is missing."""
    if not path:
        return [report]
    if path[0] == "*":
        inner = report.values() if isinstance(report, dict) else report
        inner = inner if isinstance(report, dict | list) else []
        return [value for each in inner for value in values_at_path(each, path[1:])]
    if isinstance(report, dict) and path[0] in report:
        return values_at_path(report[path[0]], path[1:])
    return []


def judge_claim(claim: Claim, report: dict[str, Any]) -> tuple[ClaimOutcome, str]:
    """Return what a valid report says of a claim, and what of it makes it so.

    What is wrong is so without the rest, too.
    """
    if claim.board_only and report["simulated"]:
        return ClaimOutcome.NOT_TESTED, "only a board can show it"
    missing = ""
    for check in claim.checks:
        try:
            found, wanted = _step_values_or_raise(report, check.path), check.value
            if check.op == "same as":
                wanted = _step_values_or_raise(report, tuple(str(check.value).split("/")))[0]
        except LookupError as error:
            missing = missing or str(error.args[0])
            continue
        for value in found:
            if not _comparison_holds(check.op, value, wanted):
                claimed = f"{check.op} {json.dumps(check.value)}"
                said = f"{'/'.join(check.path)} is {json.dumps(value)[:200]}; claimed: {claimed}"
                return ClaimOutcome.REFUTED, said
    return (ClaimOutcome.NOT_TESTED, missing) if missing else (ClaimOutcome.CONFIRMED, "")


def _comparison_holds(op: str, value: Any, wanted: Any) -> bool:
    try:
        return OPERATIONS[op](value, wanted)
    except TypeError:
        return False


def _step_values_or_raise(report: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
    """Return the values at a path of the steps; raises LookupError with the reason for none."""
    step = report["steps"].get(path[0])
    if step is None:
        raise LookupError(f"{path[0]} was not taken")
    if step["result"] is None:
        raise LookupError(f"{path[0]}: {step['status']}: {step['reason']}")
    if not (values := values_at_path(report["steps"], path)):
        raise LookupError(f"the report has no {'/'.join(path)}")
    return values
