"""The series with and without each patch: small git trees, whose probe says what its tree has."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.benchmarks.device_check.conftest import checkout

from orinbench.device_check import check as check_module
from orinbench.device_check import steps, switches
from orinbench.device_check.check import Ask, Check, OutOfTime
from orinbench.device_check.gpu import Found
from orinbench.device_check.probe import PROBES
from orinbench.errors import BenchError

ROOT = Path(__file__).resolve().parents[3]
# Says which modules its tree has, and ends as one of them says.
PROBE = """
import json, os, pathlib, sys, time
tree = pathlib.Path(__import__("tinygrad").__file__).parent
names = sorted(path.stem for path in tree.glob("p*.py"))
if "p0001" not in names: sys.exit("no interface")
found = {"has": " ".join(names), "probe": sys.argv[2], "copy_gb_s": 1.5 * len(names), "sum": True}
found["wait"] = os.environ.get("HCQDEV_WAIT_TIMEOUT_MS")
pathlib.Path(sys.argv[1]).write_text(json.dumps(found | {"model": sys.argv[5]}))
"""
THREE = {"0001": "", "0002": "0001", "0003": "0002"}


@pytest.fixture(autouse=True)
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    monkeypatch.setattr(check_module, "PROBE", (script,))
    monkeypatch.setattr(check_module, "cached_synthetic", lambda *_: "model.gguf")


def measured(trees: Path, numbers: tuple[str, ...] | None = None) -> dict[str, Found]:
    """Switch the patches of a checkout; returns what was found."""
    check = Check(trees, True, 0, trees=trees, patches=numbers)
    found: dict[str, Found] = steps.patches(check, 600)
    return found


def test_a_patch_goes_with_those_that_need_it(tmp_path: Path) -> None:
    trees = checkout(tmp_path / "trees", {**THREE, "0006": ""})
    found = measured(trees)
    assert {number: entry["left_out"] for number, entry in found.items()} == {
        "0001": ["0001", "0002", "0003"],
        "0002": ["0002", "0003"],
        "0003": ["0003"],
        "0006": ["0006"],
    }
    two = found["0002"]
    assert two["patch"] == "fix 0002" and two["reason"] is None
    assert [entry["has"] for entry in two["with"]] == ["p0001 p0002 p0003 p0006"] * 2
    assert [entry["has"] for entry in two["without"]] == ["p0001 p0006"] * 2
    assert two["ratio"] == {"copy_gb_s": 2.0}
    assert two["with"][0]["probe"] == "resubmitted" and found["0006"]["with"][0]["model"] == "-"
    # Without the first the device does not open: that is the answer, and there is no ratio.
    assert found["0001"]["without"] == [{"error": "no interface"}] * 2
    assert found["0001"]["ratio"] == {}


def test_a_probe_with_a_model_gets_one(tmp_path: Path) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0011": ""})
    found = measured(trees, ("0011",))
    assert list(found) == ["0011"] and found["0011"]["with"][0]["model"] == "model.gguf"


def test_a_fault_that_is_not_told_is_not_waited_for_long(tmp_path: Path) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0005": "", "0015": ""})
    found = measured(trees, ("0005", "0015"))
    waits = {number: entry["without"][0]["wait"] for number, entry in found.items()}
    assert waits == {"0005": "10000", "0015": "300000"}


def test_what_no_board_shows_says_why(tmp_path: Path) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0007": "", "0999": ""})
    found = measured(trees, ("0007", "0999"))
    assert found["0007"]["reason"] == found["0999"]["reason"] == "has no probe"
    assert found["0007"]["with"] == found["0007"]["without"] == []


def test_others_that_do_not_apply_are_a_reason(tmp_path: Path) -> None:
    trees = checkout(tmp_path / "trees", {"0001": "", "0002": "", "0003": ""}, over="0003")
    found = measured(trees, ("0001", "0002"))
    assert found["0001"]["reason"] == "the others do not apply without 0001"
    # The copy of the checkout is as it was: the next one is built.
    assert found["0002"]["reason"] is None and len(found["0002"]["without"]) == 2


def test_every_patch_of_the_series_has_a_probe_or_a_reason() -> None:
    series = (ROOT / "patches" / "tinygrad" / "series").read_text().split()
    page = (ROOT / "docs" / "device-check.md").read_text()
    _, _, reasons = page.partition("\nNo probe: ")
    probed = set(switches.PROBED)
    assert {name[:4] for name in series} - probed <= set(re.findall(r"\d{4}", reasons))
    assert set(switches._LAST) <= probed
    assert {ask.name for ask in switches.PROBED.values()} <= set(PROBES)


def test_time_ends_it_and_keeps_whole_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees, left = checkout(tmp_path / "trees", THREE), [100.0] * 5

    def ask(self: Check, asked: Ask, seconds: float) -> Found:
        left.pop()
        if not left:  # the first run of the second patch takes all the time
            monkeypatch.setattr(time, "monotonic", lambda: 1e18)
        return {"sum": True}

    monkeypatch.setattr(Check, "ask", ask)
    with pytest.raises(OutOfTime) as raised:
        measured(trees, ("0001", "0002"))
    assert list(raised.value.result) == ["0001"]
    assert len(raised.value.result["0001"]["with"]) == 2


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
