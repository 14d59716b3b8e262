"""The report of a device check: one JSON file, renewed after each step, resumed from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orinbench import plain
from orinbench.errors import BenchError
from orinbench.jsonfile import read_text

FORMAT = "tinygrad-orin device-check 2"


@dataclass(frozen=True)
class Entry:
    """A step in a report, beside its `result`: an object as the step makes it, or null."""

    status: str  # done, failed, not run, out of time
    seconds: float
    reason: str | None


@dataclass(frozen=True)
class Report:
    """Fields of every report beside its `format`."""

    started: str  # UTC
    simulated: bool  # taken on nvgpusim, not on a board
    versions: dict[str, str | None]
    steps: dict[str, Entry]


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
    plain.read_plain(Report, report, str(path))
    for name, entry in report["steps"].items():
        if not isinstance(entry.get("result"), dict | None):
            raise BenchError(f"{path}: steps: {name}: result: want an object or null")
    return report
