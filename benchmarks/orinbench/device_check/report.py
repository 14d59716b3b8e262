"""The report of a device check: one JSON file, renewed after each step, resumed from."""

import json
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError

FORMAT = "tinygrad-orin device-check 2"
_MOST_BYTES = 256 << 20
# Fields of a report beside its `format`, of a step in it, and of an answer about performance.
_TEXT, _OBJECT = (str, "text"), (dict, "an object")
_REPORT = {
    "started": _TEXT,  # UTC
    "simulated": (bool, "true or false"),  # taken on nvgpusim, not on a board
    "versions": _OBJECT,
    "steps": _OBJECT,
}
_STEP = {
    "status": _TEXT,  # done, failed, not run, out of time
    "seconds": (int | float, "a number"),
    "reason": (str | None, "text or null"),
    "result": (dict | None, "an object or null"),
}
_ANSWER = {**dict.fromkeys(("own", "other", "figure", "verdict"), _TEXT), "ratio": _OBJECT}


def load_report(path: Path) -> dict[str, Any]:
    """Return a report; raises BenchError, with one line, for any other file."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BenchError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; no device-check report")
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BenchError(f"{path}: no JSON; want what `orinbench device-check` writes") from None
    said = report.get("format") if isinstance(report, dict) else None
    if said != FORMAT:
        raise BenchError(f"{path}: format {str(said)[:60]!r}; `device-check` writes {FORMAT!r}")
    _check(report, _REPORT, f"{path}")
    for name, entry in report["steps"].items():
        _check(entry, _STEP, f"{path}: steps: {name}")
    performance = report["steps"].get("performance", {}).get("result") or {}
    for name, answer in performance.items():
        _check(answer, _ANSWER, f"{path}: performance: {name}")
    whole: dict[str, Any] = report
    return whole


def _check(found: Any, fields: dict[str, tuple[Any, str]], where: str) -> None:
    """Raise BenchError for an object that lacks a field or has something else there."""
    if not isinstance(found, dict):
        raise BenchError(f"{where} is {str(found)[:60]!r}; want an object")
    for name, (kind, word) in fields.items():
        value = found.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BenchError(f"{where}: {name} is {str(value)[:60]!r}; want {word}")
