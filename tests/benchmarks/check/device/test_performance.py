"""The driver's choices against others: turns, verdicts, and what a probe that fails leaves."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.benchmarks.check.device.conftest import report, step, written
from tests.benchmarks.check.device.test_simulated import simulated
from tests.benchmarks.orinbench_command import Patch

from orinbench.check.device import steps
from orinbench.check.device.claims import load_claims
from orinbench.check.device.probes import PROGRAMS, Found
from orinbench.check.device.steps import (
    PROBES,
    QUESTIONS,
    DeviceCheck,
    DriverChoiceQuestion,
    ProbeRequest,
    StepOutOfTime,
)
from orinbench.cli import orinbench

BETTER = "own is better, as the driver has it"
WORSE = "other is better than what the driver has"
SAME = "the same within what the runs differ by"


def answer(found: Sequence[Found], figure: str) -> Found:
    """The answer where the program finds these in turn: own, other, other, own."""
    question = DriverChoiceQuestion("x", figure, "own", "other")
    return steps.compare_driver_choice(question, [found[0], found[3]], found[1:3])


def taking(own: Sequence[float], other: Sequence[float], figure: str) -> list[Found]:
    return [{figure: value} for value in (own[0], *other, own[1])]


@pytest.mark.parametrize(
    ("own", "other", "figure", "better", "said"),
    [
        ((1.0, 2.0), (3.0, 4.0), "took_us", "own", BETTER),
        ((1.0, 2.0), (3.0, 4.0), "read_gb_s", "other", WORSE),
        ((3.0, 5.0), (1.0, 2.0), "read_gb_s", "own", BETTER),
        ((3.0, 5.0), (1.0, 2.0), "took_us", "other", WORSE),
        ((1.0, 3.0), (2.0, 4.0), "took_us", "same", SAME),
        ((2.0, 2.0), (2.0, 2.0), "read_gb_s", "same", SAME),
    ],
)
def test_a_verdict_needs_all_runs(
    own: Sequence[float], other: Sequence[float], figure: str, better: str, said: str
) -> None:
    entry = answer(taking(own, other, figure), figure)
    assert (entry["better"], entry["verdict"]) == (better, said)
    assert entry["with_own"] == [{figure: value} for value in own]


@pytest.mark.parametrize(
    ("own", "other", "code", "claim"),
    [
        ((9.0, 8.0), (1.0, 2.0), 0, "confirmed (1):"),
        ((1.0, 2.0), (9.0, 8.0), 1, "refuted (1):"),
        ((1.0, 9.0), (2.0, 8.0), 0, "confirmed (1):"),
        (None, None, 0, "not tested (1):"),
    ],
)
def test_verify_tells_both_answers_and_none(
    own: Sequence[float] | None, other: Sequence[float] | None, code: int, claim: str,
    tmp_path: Path, monkeypatch: Patch,
) -> None:  # fmt: skip
    l2 = next(c for c in load_claims() if c.id == "driver.l2")
    monkeypatch.setattr("orinbench.check.device.command.load_claims", lambda: [l2])
    # A probe that fails is no answer, and refutes nothing.
    found = taking(own, other, "read_gb_s") if own and other else [{"error": "no GPU"}] * 4
    entry = answer(found, "read_gb_s")
    path = written(tmp_path, report(performance=step({"l2": entry})))
    words = ["device-check", "verify", str(path)]
    done = CliRunner().invoke(orinbench, words, standalone_mode=False)
    assert (done.return_value or 0) == code
    assert claim in done.stdout
    assert f"l2: own or other: {entry['verdict']}" in done.stdout
    assert (entry["verdict"] == "no answer: no GPU") is (own is None)


def test_choices_run_in_turns_until_time_ends(monkeypatch: Patch) -> None:
    ran: list[ProbeRequest] = []

    def ask(_: DeviceCheck, asked: ProbeRequest, seconds: float) -> Found:
        ran.append(asked)
        return {q.figure: 1.0 for q in QUESTIONS}

    monkeypatch.setattr(DeviceCheck, "try_probe", ask)
    found = steps.time_driver_choices(DeviceCheck(Path(), True, 0), 100)
    assert list(found) == [q.name for q in QUESTIONS]
    assert {entry["verdict"] for entry in found.values()} == {SAME}
    for at, question in enumerate(QUESTIONS):
        own, other = ran[4 * at : 4 * at + 2]
        assert ran[4 * at : 4 * at + 4] == [own, other, other, own]
        assert own == ProbeRequest(question.name) and own.name in PROGRAMS and own != other
    with pytest.raises(StepOutOfTime) as raised:
        steps.time_driver_choices(DeviceCheck(Path(), True, 0), 0)
    assert raised.value.result == {}


@pytest.mark.parametrize("choice", ["-", "wait_for_idle"])
def test_the_rival_goes_with_the_same_choice(choice: str, tmp_path: Path) -> None:
    # Its kernels are what a switch has to stop. Both processes ask for a mode, or neither does.
    out, told = tmp_path / "found.json", tmp_path / "report.jsonl"
    done = simulated(
        *(sys.executable, *PROBES, out, "preemption", "tiny", choice),
        options=("--report", str(told)), variables={"DEV": "TEGRA+NV"},
    )  # fmt: skip
    assert done.status == 0, done.err
    assert json.loads(out.read_text())["lived"] == 1
    counts = [json.loads(line)["counts"] for line in told.read_text().splitlines()]
    opened = [entry for entry in counts if entry.get("ioctl OPEN_CHANNEL")]
    asked = [entry.get("ioctl CHANNEL_SET_PREEMPTION_MODE", 0) for entry in opened]
    assert asked == [int(choice == "-")] * 2
