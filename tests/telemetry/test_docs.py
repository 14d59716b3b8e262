"""docs/telemetry.md says what is."""

import re
from pathlib import Path

from tests.telemetry.orinexporter.test_golden import GOLDEN

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "telemetry.md").read_text()


def test_every_metric_of_the_table_is_exposed() -> None:
    exposed = {
        name
        for file in GOLDEN.glob("*.prom")
        for name in re.findall(r"^# TYPE (\S+)", file.read_text(), flags=re.MULTILINE)
    }
    # The sampler's are in no golden file: it does not run for one exposition.
    exposed |= {"jetson_energy_joules_total", "jetson_energy_gap_seconds_total"}
    exposed.add("jetson_exporter_build_info")
    rows = [line for line in TEXT.splitlines() if line.startswith("| `jetson_")]
    named = {name for row in rows for name in re.findall(r"`(jetson_\w+)`", row.split("|")[1])}
    assert len(named) > 5 and named <= exposed


def test_pictures_are_shown_and_small() -> None:
    for scheme in ("dark", "light"):
        picture = REPOSITORY / "docs" / "images" / f"exporter-{scheme}.png"
        assert f"(images/{picture.name})" in TEXT and picture.stat().st_size < 100_000
