"""The series with and without each patch: small git trees, whose probe says what its tree has."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.device_check.conftest import checkout

from orinbench.device_check import steps, switches
from orinbench.device_check.patch_probes import PROBES, SIZES, WITH_MODEL
from orinbench.device_check.steps import Check, OutOfTime
from orinbench.errors import BenchError

ROOT = Path(__file__).resolve().parents[3]
# Says which modules its tree has, and ends as one of them says.
PROBE = """
import json, os, pathlib, sys, time
tree = pathlib.Path(__import__("tinygrad").__file__).parent
names = sorted(path.stem for path in tree.glob("p*.py"))
if "p0001" not in names: sys.exit("no interface")
if "p0009" in names: time.sleep(600)
found = {"has": " ".join(names), "probe": sys.argv[2], "copy_gb_s": 1.5 * len(names), "sum": True}
found["wait"] = os.environ.get("HCQDEV_WAIT_TIMEOUT_MS")
pathlib.Path(sys.argv[1]).write_text(json.dumps(found | {"model": sys.argv[4]}))
"""
THREE = {"0001": "", "0002": "0001", "0003": "0002"}


@pytest.fixture
def probe(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return (sys.executable, str(script))


def measured(
    trees: Path, probe: tuple[str, ...], numbers: tuple[str, ...] | None = None
) -> tuple[dict[str, Any], list[list[str]]]:
    """Switch the patches of a checkout; returns what was found, and what each `keep` got."""
    kept: list[list[str]] = []
    run_probe = switches.probe_runner({}, "tiny", lambda: Path("model.gguf"), probe)
    until = time.monotonic() + 600
    found = switches.switch(
        trees, numbers, run_probe, until, lambda so_far: kept.append(list(so_far))
    )
    return found, kept


def test_a_patch_goes_with_those_that_need_it(tmp_path: Path, probe: tuple[str, ...]) -> None:
    trees = checkout(tmp_path / "trees", {**THREE, "0006": ""})
    found, kept = measured(trees, probe)
    assert {number: entry["left_out"] for number, entry in found.items()} == {
        "0001": ["0001", "0002", "0003"],
        "0002": ["0002", "0003"],
        "0003": ["0003"],
        "0006": ["0006"],
    }
    assert kept == [["0001"], ["0001", "0002"], ["0001", "0002", "0003"], list(found)]
    two = found["0002"]
    assert two["patch"] == "fix 0002" and two["reason"] is None
    assert [entry["has"] for entry in two["with"]] == ["p0001 p0002 p0003 p0006"] * 2
    assert [entry["has"] for entry in two["without"]] == ["p0001 p0006"] * 2
    assert two["ratio"] == {"copy_gb_s": 2.0}
    assert two["with"][0]["probe"] == "resubmitted" and found["0006"]["with"][0]["model"] == "-"
    # Without the first the device does not open: that is the answer, and there is no ratio.
    assert found["0001"]["without"] == [{"error": "no interface"}] * 2
    assert found["0001"]["ratio"] == {}


def test_a_probe_with_a_model_gets_one(tmp_path: Path, probe: tuple[str, ...]) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0011": ""})
    found, _ = measured(trees, probe, ("0011",))
    assert list(found) == ["0011"] and found["0011"]["with"][0]["model"] == "model.gguf"


def test_a_fault_that_is_not_told_is_not_waited_for_long(
    tmp_path: Path, probe: tuple[str, ...]
) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0005": "", "0015": ""})
    run_probe = switches.probe_runner({"HCQDEV_WAIT_TIMEOUT_MS": "300000"}, "tiny", Path, probe)
    until, numbers = time.monotonic() + 600, ("0005", "0015")
    found = switches.switch(trees, numbers, run_probe, until, lambda so_far: None)
    waits = {number: entry["without"][0]["wait"] for number, entry in found.items()}
    assert waits == {"0005": "10000", "0015": "300000"}


def test_what_no_board_shows_says_why(tmp_path: Path, probe: tuple[str, ...]) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0007": "", "0999": ""})
    found, _ = measured(trees, probe, ("0007", "0999"))
    assert found["0007"]["reason"] == "starts the processes of a search: no GPU is in it"
    assert found["0999"]["reason"] == "has no probe in this version of device-check"
    assert found["0007"]["with"] == found["0007"]["without"] == []


def test_others_that_do_not_apply_are_a_reason(tmp_path: Path, probe: tuple[str, ...]) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0002": "", "0003": ""}, over="0003")
    found, _ = measured(trees, probe, ("0001", "0002"))
    assert found["0001"]["reason"] == "the others do not apply without 0001"
    # The copy of the checkout is as it was: the next one is built.
    assert found["0002"]["reason"] is None and len(found["0002"]["without"]) == 2


def test_those_that_stop_a_process_come_last() -> None:
    assert set(switches._LAST) <= set(switches.PROBED)
    assert set(switches.PROBED.values()) == set(PROBES) and set(PROBES) >= WITH_MODEL
    assert not set(switches.PROBED) & set(switches.NOT_PROBED)
    assert set(SIZES) == {"board", "tiny"}


def test_every_patch_of_the_series_has_a_probe_or_a_reason() -> None:
    series = (ROOT / "patches" / "tinygrad" / "series").read_text().split()
    known = set(switches.PROBED) | set(switches.NOT_PROBED)
    assert [name for name in series if name[:4] not in known] == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    moments: list[float] = []
    now = SimpleNamespace(monotonic=lambda: moments.pop(0) if moments else 1e18)
    monkeypatch.setattr(switches, "time", now)
    monkeypatch.setattr(steps, "time", now)
    yield moments


def test_time_ends_it_and_keeps_whole_patches(
    tmp_path: Path, probe: tuple[str, ...], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches.probe_runner, "__defaults__", (probe,))
    trees = checkout(tmp_path / "trees", THREE)
    clock[:] = [0.0] * 5  # the step begins; four runs of the first patch
    check = Check(tmp_path, "tiny", 0, trees=trees, patches=("0001", "0002"))
    with pytest.raises(OutOfTime) as raised:
        steps.patches(check, 600)
    assert list(raised.value.result) == ["0001"]
    clock[:] = [0.0] * 6
    one = Check(tmp_path, "tiny", 0, trees=trees, patches=("0001",))
    assert len(steps.patches(one, 600)["0001"]["with"]) == 2


def test_a_run_that_does_not_end_says_so(
    tmp_path: Path, probe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "_RUN_SECONDS", 1.0)
    trees = checkout(tmp_path / "trees", {"0001": "", "0009": "", "0015": ""})
    found, _ = measured(trees, probe, ("0015",))
    assert found["0015"]["with"] == [{"error": "not done in 1 s"}] * 2


@pytest.mark.parametrize("damage", ["nothing", "no trailer"])
def test_no_checkout(tmp_path: Path, damage: str) -> None:
    trees = tmp_path
    said = "want what `tools/series checkout` makes"
    if damage == "no trailer":
        trees, said = checkout(tmp_path / "trees", THREE), "has no Patch-Name"
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        empty = ("commit", "--allow-empty", "-q", "-m", "mine")
        subprocess.run(["git", "-C", str(trees), *author, *empty], check=True)
    with pytest.raises(BenchError, match=said):
        switches.patches_of(trees)
