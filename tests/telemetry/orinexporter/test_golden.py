"""The whole exposition of every board, against a file.

`UPDATE_GOLDEN=1 pytest tests/telemetry/orinexporter/test_golden.py` writes the files anew: read the
difference.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.telemetry.conftest import BOARDS, Show, exposition, idle, permuted

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", BOARDS)
def test_exposition(name: str, show: Show) -> None:
    text = exposition(show(BOARDS[name]()))
    file = GOLDEN / f"{name}.prom"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_numbers_of_nodes_mean_nothing(show: Show) -> None:
    assert exposition(show(permuted())) == exposition(show(idle()))


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("name", BOARDS)
def test_promtool_has_nothing_to_say(name: str) -> None:
    text = (GOLDEN / f"{name}.prom").read_text().replace("SECONDS", "0.001")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_both_formats_say_the_same(show: Show) -> None:
    roots = show(idle())
    text = exposition(roots).replace("SECONDS", "0.001")
    openmetrics = exposition(roots, "application/openmetrics-text; version=1.0.0")
    assert openmetrics.endswith("# EOF\n")
    old = {s for family in parse_text(text) for s in map(key, family.samples)}
    openmetrics = openmetrics.replace("SECONDS", "0.001")
    new = {s for family in openmetrics_families(openmetrics) for s in map(key, family.samples)}
    assert old == new and len(old) > 100


def openmetrics_families(text: str) -> Iterable[Metric]:
    return cast(Iterable[Metric], parse_openmetrics(text))  # type: ignore[no-untyped-call]


def key(sample: object) -> tuple[str, frozenset[tuple[str, str]], float]:
    name, labels, value = sample[:3]  # type: ignore[index]
    return name, frozenset(labels.items()), value
