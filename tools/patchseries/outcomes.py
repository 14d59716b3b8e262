"""A pytest plugin that writes what became of each test to $SERIES_OUTCOMES, as JSON."""

import json
import os
from pathlib import Path

import pytest

RANK = ("passed", "skipped", "failed")
seen: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's phases (setup, call, teardown)."""
    seen[report.nodeid] = max(seen.get(report.nodeid, "passed"), report.outcome, key=RANK.index)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that cannot be collected."""
    if report.failed:
        seen[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Write the file."""
    Path(os.environ["SERIES_OUTCOMES"]).write_text(json.dumps(seen))
