"""The driver's choices against others: turns, verdicts, and what a probe that fails leaves."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.benchmarks.device_check.conftest import report, step
from tests.benchmarks.device_check.test_simulated import simulated

from orinbench.cli import orinbench
from orinbench.device_check import performance, performance_probe
from orinbench.device_check.claims import load_claims
from orinbench.device_check.performance import QUESTIONS, Choice, Question, ask
from orinbench.device_check.report import write_report

QUESTION = Question("x", "x", Choice("own"), Choice("other", {"A": "1"}), "took_us", False)


BETTER = "own is better, as the driver has it"
WORSE = "other is better than what the driver has"
SAME = "the same within what the runs differ by"


def answer(own: Sequence[float], other: Sequence[float], larger: bool = False) -> dict[str, Any]:
    """Answers of `ask` where the probe measures these in turn: own, other, other, own."""
    question = Question("x", "x", QUESTION.own, QUESTION.other, "took_us", larger)
    left = iter((own[0], other[0], other[1], own[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(performance, "QUESTIONS", (question,))
        found = ask(lambda *_: {"took_us": next(left)}, time.monotonic() + 100, lambda _: None)
    entry: dict[str, Any] = found["x"]
    return entry


@pytest.mark.parametrize(
    ("own", "other", "larger", "better", "said"),
    [
        ((1.0, 2.0), (3.0, 4.0), False, "own", BETTER),
        ((1.0, 2.0), (3.0, 4.0), True, "other", WORSE),
        ((3.0, 5.0), (1.0, 2.0), True, "own", BETTER),
        ((3.0, 5.0), (1.0, 2.0), False, "other", WORSE),
        ((1.0, 3.0), (2.0, 4.0), False, "same", SAME),
        ((2.0, 2.0), (2.0, 2.0), True, "same", SAME),
    ],
)
def test_a_verdict_needs_all_runs(
    own: Sequence[float], other: Sequence[float], larger: bool, better: str, said: str
) -> None:
    entry = answer(own, other, larger)
    assert (entry["better"], entry["verdict"]) == (better, said)
    assert entry["with_own"] == [{"took_us": value} for value in own]


@pytest.mark.parametrize(
    ("own", "other", "code", "claim"),
    [
        ((9.0, 8.0), (1.0, 2.0), 0, "confirmed (1):"),
        ((1.0, 2.0), (9.0, 8.0), 1, "refuted (1):"),
        ((1.0, 9.0), (2.0, 8.0), 1, "refuted (1):"),
        (None, None, 0, "not tested (1):"),
    ],
)
def test_verify_tells_both_answers_and_none(
    own: Sequence[float] | None, other: Sequence[float] | None, code: int, claim: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    l2 = next(c for c in load_claims() if c.id == "driver.l2")
    monkeypatch.setattr("orinbench.device_check.command.load_claims", lambda: [l2])
    if own and other:
        entry = answer(own, other, larger=True)
    else:  # a probe that fails is no answer, and refutes nothing
        with monkeypatch.context() as patch:
            patch.setattr(performance, "QUESTIONS", (QUESTION,))
            entry = ask(lambda *_: {"error": "no GPU"}, time.monotonic() + 9, lambda _: None)["x"]
    path = tmp_path / "report.json"
    write_report(report(performance=step({"l2": entry})), path)
    done = CliRunner().invoke(
        orinbench, ["device-check", "verify", str(path)], standalone_mode=False
    )
    assert (done.return_value or 0) == code
    assert claim in done.stdout
    assert f"l2: own or other: {entry['verdict']}" in done.stdout
    assert (entry["verdict"] == "no answer: no GPU") is (own is None)


def test_choices_run_in_turns_and_answers_are_kept() -> None:
    ran: list[tuple[str, str]] = []
    kept: dict[str, Any] = {}

    def run_probe(probe: str, choice: Choice, model: bool, seconds: float) -> dict[str, Any]:
        ran.append((probe, choice.name))
        figure = next(q for q in QUESTIONS if q.probe == probe).figure
        return {figure: float(len(ran))}

    found = ask(run_probe, time.monotonic() + 100, kept.update)
    assert list(found) == [q.name for q in QUESTIONS] == list(kept)
    for at, question in enumerate(QUESTIONS):
        names = [name for _, name in ran[4 * at : 4 * at + 4]]
        own, other = question.own.name, question.other.name
        assert names == [own, other, other, own]
        assert found[question.name]["verdict"] == SAME


def test_no_time_left_is_said() -> None:
    found = ask(lambda *_: pytest.fail("no run"), time.monotonic(), lambda _: None)
    assert [entry["verdict"] for entry in found.values()] == ["not done"]
    assert all("better" not in entry for entry in found.values())


def test_every_question_has_its_probe_and_scale() -> None:
    for question in QUESTIONS:
        assert question.probe in performance_probe.PROBES and question.own != question.other
    assert set(performance_probe.SCALE) == {"board", "tiny"}


class FakeExecutor:
    """Notes the prompts, and the tokens that follow each."""

    def __init__(self) -> None:
        self.prompts: list[tuple[list[int], int, int]] = []
        self.steps: list[tuple[int | None, int]] = []

    def fill(self, tokens: list[int], start: int, end: int) -> None:
        self.prompts.append((tokens, start, end))

    def step(self, token: int | None = None, position: int = 0) -> None:
        self.steps.append((token, position))

    def token(self) -> int:
        return 7


@pytest.mark.parametrize("sizes", ["board", "tiny"])
def test_a_token_and_a_prompt_are_timed_when_they_are_warm(
    sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = FakeExecutor()
    load_network = "orinbench.benchmark.tinygrad_paths.load_network"
    monkeypatch.setattr(load_network, lambda model, context: executor)
    found = performance_probe.decode(sizes, "model.gguf")
    assert found["token_us"] > 0 and found["prompt_us"] > 0
    how = performance_probe.DECODED[sizes]
    firsts = [ids[0] for ids, *_ in executor.prompts]
    assert len(firsts) == how.warm_prompts + how.prompts
    assert len(set(firsts)) == len(firsts), "a prompt whose beginning is cached is no prompt"
    spans = {(len(ids), *span) for ids, *span in executor.prompts}
    assert spans == {(how.length, 0, how.length - 1)}
    last = [(ids[-1], how.length - 1) for ids, *_ in executor.prompts]
    assert executor.steps == [*last, *[(None, 0)] * (how.warm_tokens + how.tokens)]


def test_a_board_decodes_enough_for_a_median_and_a_simulated_gpu_little() -> None:
    board, tiny = (performance_probe.DECODED[sizes] for sizes in ("board", "tiny"))
    assert board.warm_prompts >= 3 and board.prompts >= 5 and board.tokens >= 16
    assert tiny.length * (tiny.warm_prompts + tiny.prompts) + tiny.warm_tokens + tiny.tokens <= 10


@pytest.mark.parametrize("choice", ["-", "wait_for_idle"])
def test_the_rival_goes_with_the_same_choice(choice: str, tmp_path: Path) -> None:
    # Its kernels are what a switch has to stop. Both processes ask for a mode, or neither does.
    out, told = tmp_path / "found.json", tmp_path / "report.jsonl"
    module = ("-m", "orinbench.device_check.performance_probe")
    done = simulated(
        *(sys.executable, *module, out, "preemption", choice, "tiny"),
        options=("--report", str(told)), variables={"DEV": "TEGRA+NV"},
    )  # fmt: skip
    assert done.status == 0, done.err
    assert json.loads(out.read_text())["lived"] == 1
    counts = [json.loads(line)["counts"] for line in told.read_text().splitlines()]
    opened = [entry for entry in counts if entry.get("ioctl OPEN_CHANNEL")]
    asked = [entry.get("ioctl CHANNEL_SET_PREEMPTION_MODE", 0) for entry in opened]
    assert asked == [int(choice == "-")] * 2


def test_a_probe_writes_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sizes: str, model: str) -> dict[str, Any]:
        raise RuntimeError("the GPU\nis gone")

    monkeypatch.setitem(performance_probe.PROBES, "l2", fails)
    out = tmp_path / "found.json"
    performance_probe.main([str(out), "l2", "-", "tiny"])
    assert json.loads(out.read_text()) == {"error": "RuntimeError: the GPU is gone"}
    with pytest.raises(RuntimeError):
        performance_probe.main(["-", "l2", "-", "tiny"])


def test_a_runner_says_what_ended_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "PROBE", ("false",))
    run_probe = performance.probe_runner({}, "tiny", Path)
    assert "error" in run_probe("l2", QUESTION.own, False, 5)
    monkeypatch.setattr(performance, "PROBE", ("sh", "-c", "sleep 30"))
    run_probe = performance.probe_runner({}, "tiny", Path)
    assert run_probe("l2", QUESTION.own, False, 0.2) == {"error": "not done in 0 s"}
