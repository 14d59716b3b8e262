"""A pytest plugin that writes what became of each test to $SERIES_OUTCOMES, as JSON."""

import json
import os
from pathlib import Path

import pytest


class Outcomes:
    """Collects the worst outcome of each node: failed, then skipped, then passed."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def _note(self, node: str, outcome: str) -> None:
        rank = ("passed", "skipped", "failed")
        old = self.seen.get(node, "passed")
        self.seen[node] = max(old, outcome, key=rank.index)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase (setup, call, teardown) of a test."""
        self._note(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that cannot be collected."""
        if report.failed:
            self._note(report.nodeid, "failed")

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        Path(os.environ["SERIES_OUTCOMES"]).write_text(json.dumps(self.seen))


def pytest_configure(config: pytest.Config) -> None:
    """Register the collector."""
    config.pluginmanager.register(Outcomes())
