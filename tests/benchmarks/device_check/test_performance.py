"""The driver's choices against others: turns, verdicts, and what a probe that fails leaves."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orinbench.device_check import performance, performance_probe
from orinbench.device_check.performance import QUESTIONS, Choice, Question, ask, verdict

QUESTION = Question("x", "x", Choice("own"), Choice("other", {"A": "1"}), "took_us", False)


@pytest.mark.parametrize(
    ("own", "other", "larger", "said"),
    [
        ((1.0, 2.0), (3.0, 4.0), False, "own is better, as the driver has it"),
        ((1.0, 2.0), (3.0, 4.0), True, "other is better than what the driver has"),
        ((3.0, 5.0), (1.0, 2.0), True, "own is better, as the driver has it"),
        ((1.0, 3.0), (2.0, 4.0), False, "the same within what the runs differ by"),
    ],
)
def test_a_verdict_needs_all_runs(
    own: tuple[float, float], other: tuple[float, float], larger: bool, said: str
) -> None:
    question = Question("x", "x", QUESTION.own, QUESTION.other, "took_us", larger)
    sides = [[{"took_us": value} for value in side] for side in (own, other)]
    assert verdict(question, *sides) == said


def test_a_probe_that_fails_gives_no_answer() -> None:
    assert verdict(QUESTION, [{"error": "no GPU"}], [{"took_us": 1}]) == "no answer: no GPU"


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
        assert found[question.name]["verdict"] == "the same within what the runs differ by"


def test_no_time_left_is_said() -> None:
    found = ask(lambda *_: pytest.fail("no run"), time.monotonic(), lambda _: None)
    assert [entry["verdict"] for entry in found.values()] == ["not done"]


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


def test_a_token_and_a_prompt_are_timed_when_they_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    monkeypatch.setattr(
        "orinbench.benchmark.tinygrad_paths.load_network", lambda model, context: executor
    )
    found = performance_probe.decode("tiny", "model.gguf")
    assert found["token_us"] > 0 and found["prompt_us"] > 0
    length, count = performance_probe.DECODED["tiny"]
    firsts = [ids[0] for ids, *_ in executor.prompts]
    assert len(set(firsts)) == len(firsts) == 8, "a prompt whose beginning is cached is no prompt"
    assert {(len(ids), *span) for ids, *span in executor.prompts} == {(length, 0, length - 1)}
    last = [(ids[-1], length - 1) for ids, *_ in executor.prompts]
    assert executor.steps == [*last, *[(None, 0)] * (4 + count)]


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
