"""Findings as data: kind, message, source lines; and as SARIF, which code hosts show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {
    "race": "Two accesses that nothing orders",
    "init": "A read of what nobody has written",
    "sync": "A barrier, warp operation or lock that not all reach",
    "bounds": "An access outside a buffer",
    "free": "An access to freed memory",
    "calls": "A CUDA call that cannot be, or a missing wait",
    "leaks": "Memory that is never freed",
    "fault": "A fault of the GPU, or a gap of the simulator",
}
_KIND = re.compile(rf"(?:^|: )({'|'.join(KINDS)}): ")
_PLACE = re.compile(r"([^\s()\[\],;:']+\.(?:cuh?|c|cc|cpp|cxx|h|hpp|inl)):(\d+)")


@dataclass(frozen=True)
class Finding:
    """One finding: kind (of KINDS), message, source lines (file, line) that the message names."""

    kind: str
    message: str
    places: tuple[tuple[str, int], ...]

    @classmethod
    def from_line(cls, text: str) -> Finding:
        """A finding from its line on stderr."""
        kind = _KIND.search(text)
        places = dict.fromkeys((file, int(line)) for file, line in _PLACE.findall(text))
        return cls(kind[1] if kind else "fault", text, tuple(places))


def _sarif_location(file: str, line: int, root: Path) -> dict[str, Any]:
    path = Path(file)
    inside = path.is_absolute() and path.is_relative_to(root)
    uri = path.relative_to(root).as_posix() if inside else path.as_posix()
    place = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, line)}}
    return {"physicalLocation": place}


def sarif_text(findings: Iterable[Finding], root: Path) -> str:
    """SARIF 2.1.0 of findings; files below `root` are named relative to it."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        release = version("nvgpusim")
    except PackageNotFoundError:  # as a part of tinygrad-orin
        release = version("tinygrad-orin")
    rules = [{"id": k, "shortDescription": {"text": text}} for k, text in KINDS.items()]
    results = []
    for finding in findings:
        places = [_sarif_location(file, line, root) for file, line in finding.places]
        result: dict[str, Any] = {
            "ruleId": finding.kind, "level": "error", "message": {"text": finding.message},
        }  # fmt: skip
        if places:
            result["locations"] = places[:1]
            result["relatedLocations"] = [{"id": n, **p} for n, p in enumerate(places[1:], 1)]
        results.append(result)
    tool = {"driver": {"name": "nvgpusim", "version": release, "rules": rules}}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": tool, "results": results}],
    }
    return json.dumps(log, indent=1)
