"""The documents' claims about a board, as data, and the check of a report against each.

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


class Outcome(Enum):
    """A report's outcome for one claim."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Condition:
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
    checks: tuple[Condition, ...]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, its outcome, and what of the report made it so."""

    claim: Claim
    outcome: Outcome
    because: str


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
            entry["id"],
            entry["text"],
            entry["doc"],
            entry.get("board_only", False),
            tuple(
                Condition(tuple(check["path"].split("/")), check["op"], check.get("value"))
                for check in entry["checks"]
            ),
        )
        for entry in raw
    ]


def values_at(report: Any, path: tuple[str, ...]) -> list[Any]:
    """Return the values at a path; none where something of it is missing."""
    if not path:
        return [report]
    if path[0] == "*":
        inner = report.values() if isinstance(report, dict) else report or []
        return [value for each in inner for value in values_at(each, path[1:])]
    if isinstance(report, dict) and path[0] in report:
        return values_at(report[path[0]], path[1:])
    return []


def judge(claim: Claim, report: dict[str, Any]) -> JudgedClaim:
    """Return what a valid report says of a claim; what is wrong is so without the rest, too."""
    if claim.board_only and report["simulated"]:
        return JudgedClaim(claim, Outcome.NOT_TESTED, "only a board can show it")
    missing = ""
    for check in claim.checks:
        try:
            found, wanted = _found(report, check.path), check.value
            if check.op == "same as":
                wanted = _found(report, tuple(str(check.value).split("/")))[0]
        except LookupError as error:
            missing = missing or str(error.args[0])
            continue
        for value in found:
            if not _holds(check.op, value, wanted):
                claimed = f"{check.op} {json.dumps(check.value)}"
                said = f"{'/'.join(check.path)} is {json.dumps(value)[:200]}; claimed: {claimed}"
                return JudgedClaim(claim, Outcome.REFUTED, said)
    if missing:
        return JudgedClaim(claim, Outcome.NOT_TESTED, missing)
    return JudgedClaim(claim, Outcome.CONFIRMED, ", ".join("/".join(c.path) for c in claim.checks))


def _holds(op: str, value: Any, wanted: Any) -> bool:
    try:
        return OPERATIONS[op](value, wanted)
    except TypeError:
        return False


def _found(report: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
    """Return the values at a path of the steps; raises LookupError with the reason for none."""
    step = report["steps"].get(path[0])
    if step is None:
        raise LookupError(f"{path[0]} was not taken")
    if step["result"] is None:
        raise LookupError(f"{path[0]}: {step['status']}: {step['reason']}")
    if not (values := values_at(report["steps"], path)):
        raise LookupError(f"the report has no {'/'.join(path)}")
    return values
