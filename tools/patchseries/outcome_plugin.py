"""A pytest plugin that writes what became of each test to $SERIES_OUTCOMES, as JSON.

With $SERIES_FIRST_FAILURE no more cases of a test run once one has failed.
"""

import json
import os
from pathlib import Path

import pytest

RANK = ("passed", "skipped", "failed")
seen: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out the cases that cannot change the verdict."""
    if "SERIES_FIRST_FAILURE" not in os.environ:
        return None
    test = item.nodeid.split("[")[0]
    return any(seen[node] == "failed" and node.split("[")[0] == test for node in seen) or None


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
