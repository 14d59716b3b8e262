"""The report of a device check: one JSON file, renewed after each step, resumed from."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from orinbench.device_check.schema import problems
from orinbench.errors import BenchError

FORMAT = "tinygrad-orin device-check 1"
_LARGEST = 256 << 20


def load_report(path: Path) -> dict[str, Any]:
    """Return a report; raises BenchError, with one line, for any other file."""
    try:
        if path.stat().st_size > _LARGEST:
            raise BenchError(f"{path}: larger than {_LARGEST >> 20} MiB: no report")
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BenchError(f"{path}: no JSON; want what `orinbench device-check` writes") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise BenchError(f"{path}: not what `orinbench device-check` writes: want {FORMAT!r}")
    if found := problems(whole):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise BenchError(f"{path}: {found[0]}{more}")
    report: dict[str, Any] = whole
    return report


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report whole, or not at all; raises BenchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error
