"""Rules and dashboards: checked by promtool, unit-tested, every alert covered."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.telemetry.conftest import RULES, TELEMETRY

HERE = Path(__file__).parent
BUILD = TELEMETRY / "dashboards" / "build.py"
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed"
)


def promtool(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("file", sorted((HERE / "rules").glob("*.test.yml")), ids=lambda f: f.name)
def test_rules_do_what_they_say(file: Path) -> None:
    code, said = promtool("test", "rules", str(file))
    assert code == 0, said


def names(key: str, files: list[Path]) -> set[str]:
    return {
        name
        for file in files
        for name in re.findall(rf"^\s*- {key}: (\S+)$", file.read_text(), flags=re.MULTILINE)
    }


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    text = (HERE / "rules" / "alerts.test.yml").read_text()
    fired = set(re.findall(r"alertname: (\S+)\n\s+eval_time: \S+\n\s+exp_alerts:\n\s+- ", text))
    assert fired == names("alert", RULES) and len(fired) > 8


def test_every_recording_rule_has_a_test() -> None:
    text = "".join(file.read_text() for file in (HERE / "rules").glob("*.test.yml"))
    for name in names("record", RULES):
        assert f"expr: {name}" in text


def build(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(directory / "build.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_dashboards_are_what_their_source_says() -> None:
    done = build(BUILD.parent, "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_drift_is_found_and_mended(tmp_path: Path) -> None:
    for file in BUILD.parent.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    board = tmp_path / "board.json"
    board.write_text(board.read_text().replace("Module power", "Board power"))
    (tmp_path / "llm.json").unlink()
    done = build(tmp_path, "--check")
    assert done.returncode == 1 and "stale: board.json, llm.json" in done.stderr
    assert build(tmp_path).returncode == 0 and build(tmp_path, "--check").returncode == 0
    assert board.read_bytes() == (BUILD.parent / "board.json").read_bytes()
    assert build(tmp_path, "--nonsense").returncode == 2


@pytest.mark.parametrize("file", sorted(BUILD.parent.glob("*.json")), ids=lambda file: file.stem)
def test_a_dashboard_is_whole(file: Path) -> None:
    """No panel over another; each tells two machines apart, and has one unit."""
    dashboard = json.loads(file.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "host", "instance"}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 5
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        assert all(target["expr"] for target in panel["targets"])
        # Without, Grafana shows the time and the metric's name before what the table is for.
        assert panel["type"] != "table" or panel["transformations"], panel["title"]
        if panel["type"] == "timeseries":  # nothing falls back to Grafana's own palette
            assert panel["fieldConfig"]["defaults"]["color"]["fixedColor"], panel["title"]
        if panel["type"] != "table":
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert all("{{instance}}" in legend for legend in legends), panel["title"]
        # A metric's unit is the end of its name: no panel mixes two.
        units = {
            unit
            for target in panel["targets"]
            for unit in re.findall(
                r"_(watts|celsius|ratio|hertz|bytes|joules|seconds|rpm|total)\b", target["expr"]
            )
        }
        assert len(units) <= 1 or panel["title"] == "Energy of a token", (panel["title"], units)


def test_what_is_bad_is_shown_in_the_bad_colour() -> None:
    board = json.loads((BUILD.parent / "board.json").read_text())
    steps = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for panel in board["panels"]
        if panel["type"] == "stat"
    }
    bad = "#ff8f85"
    assert (
        steps["Sources"][0] == {"color": bad, "value": None} and steps["Sources"][1]["value"] == 1
    )
    assert steps["Below the thermal trip"][0]["color"] == bad
    assert steps["Throttle events, 5 min"][-1] == {"color": bad, "value": 1}
    assert all(step["color"] != bad for step in steps["Module power"])
