"""The command without a GPU: what it refuses, records, resumes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.benchmarks.check.device.conftest import report, written
from tests.benchmarks.orinbench_command import Patch

from orinbench.check.device import command
from orinbench.check.device.claims import load_report
from orinbench.check.device.steps import STEPS, Step, StepNotPossible, StepOutOfTime
from orinbench.cli import orinbench
from orinbench.errors import BenchError

BOARD = {"environment": {"board": "an Orin"}, "state": {"note": f"{Path.home()}/secret"}}
LOG: dict[str, Any] = {"lines": []}


class Fake:
    """Steps that answer as told, and count."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"identity": BOARD, "kernel-log": LOG}
        self.taken: list[str] = []

    def steps(self) -> tuple[Step, ...]:
        return tuple(Step(name, 10, self.take(name), "a step") for name in self.answers)

    def take(self, name: str) -> Callable[[Any, float], Any]:
        def take(check: Any, seconds: float) -> Any:
            self.taken.append(name)
            answer = self.answers[name]
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return take


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: Patch) -> Fake:
    (tmp_path / "ctrl").touch()
    fake = Fake()
    monkeypatch.setattr(command, "CTRL", str(tmp_path / "ctrl"))
    monkeypatch.setattr(command, "STEPS", fake.steps())
    monkeypatch.delenv("NVGPUSIM_OPTIONS", raising=False)
    return fake


def device_check(tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run it; return the code, what it said, and the report."""
    folder = tmp_path / "out"
    words = ["device-check", "--output", str(folder), *arguments]
    result = CliRunner().invoke(orinbench, words, standalone_mode=False)
    if isinstance(result.exception, BenchError):
        return 2, str(result.exception), {}
    assert result.exception is None, result.exception
    return result.return_value or 0, result.stderr, load_report(folder / "report.json")


def test_a_machine_without_a_board_says_so_in_one_line(tmp_path: Path) -> None:
    if os.path.exists("/dev/nvgpu/igpu0/ctrl"):
        pytest.skip("this is a board")
    code, said, _ = device_check(tmp_path)
    assert code == 2 and "\n" not in said
    assert "no Orin's GPU here: /dev/nvgpu/igpu0/ctrl does not exist" in said
    assert not (tmp_path / "out").exists()


def test_steps_are_recorded_and_not_taken_twice(tmp_path: Path, fake: Fake) -> None:
    code, said, taken = device_check(tmp_path)
    assert code == 0 and fake.taken == ["identity", "kernel-log"]
    assert taken["steps"]["identity"]["status"] == "done"
    assert taken["simulated"] is False and "judge it with" in said
    # Nothing private got into the file.
    assert taken["steps"]["identity"]["result"]["state"] == {"note": "<path>"}
    code, said, _ = device_check(tmp_path)
    assert fake.taken == ["identity", "kernel-log"] and "done already: 2 steps; to take: 0" in said
    device_check(tmp_path, "--fresh", "--only", "identity")
    assert fake.taken[2:] == ["identity"]


def test_after_an_interruption_the_rest_is_taken(tmp_path: Path, fake: Fake) -> None:
    fake.answers["kernel-log"] = KeyboardInterrupt()
    code, said, taken = device_check(tmp_path)
    assert code == 130 and "interrupted; " in said and "the same command goes on" in said
    assert list(taken["steps"]) == ["identity"]
    fake.answers["kernel-log"] = LOG
    code, _, taken = device_check(tmp_path)
    assert code == 0 and fake.taken == ["identity", "kernel-log", "kernel-log"]
    assert list(taken["steps"]) == ["identity", "kernel-log"]


def test_what_goes_wrong_is_an_entry_and_costs_the_others_nothing(
    tmp_path: Path, fake: Fake
) -> None:
    fake.answers["identity"] = ValueError("on\ntwo lines")
    code, said, taken = device_check(tmp_path)
    entry = taken["steps"]["identity"]
    assert code == 1 and entry["status"] == "failed" and entry["result"] is None
    assert entry["reason"] == "ValueError: on two lines" and "identity: failed" in said
    assert taken["steps"]["kernel-log"]["status"] == "done"
    fake.answers = {"identity": StepNotPossible("no log"), "kernel-log": StepOutOfTime(10, LOG)}
    code, _, taken = device_check(tmp_path, "--fresh")
    assert code == 0
    assert taken["steps"]["identity"]["status"] == "not run"
    late = taken["steps"]["kernel-log"]
    assert (late["status"], late["reason"], late["result"]) == (
        "out of time",
        "not done in 10 s",
        LOG,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "smoke,magic"), "--only smoke,magic: no step magic; there are identity"),
        (("--model", "nowhere.gguf"), "nowhere.gguf"),
        (("--output", "/proc/nowhere"), "cannot be written"),
        (("verify", "/dev/zero"), "/dev/zero: is no regular file; want what"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_bad_use_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    code, line, _ = device_check(tmp_path, *arguments)
    assert code == 2 and said in line and "\n" not in line


def test_another_checks_report_is_not_gone_on_with(tmp_path: Path, fake: Fake) -> None:
    old = report()
    old["steps"] = {}
    written(tmp_path / "out", old)
    code, said, _ = device_check(tmp_path)
    assert code == 2 and "its versions are" in said and "use --fresh" in said
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == old
    assert device_check(tmp_path, "--fresh")[0] == 0


def test_all_steps_fit_into_an_hour() -> None:
    assert sum(step.seconds for step in STEPS) < 3600


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["started"], 1, "started is '1'; want text"),
        (["simulated"], 1, "simulated is '1'; want true or false"),
        (["steps", "abi"], [], "steps: abi is '[]'; want an object"),
        (["steps", "abi", "seconds"], True, "abi: seconds is 'True'; want a number"),
        (["steps", "abi", "result"], [], "abi: result: want an object or null"),
    ],
)
def test_what_is_wrong_in_a_report_is_named_in_one_line(
    tmp_path: Path, place: list[str], value: object, said: str
) -> None:
    inner = whole = report()
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(BenchError) as raised:
        load_report(written(tmp_path, whole))
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "x"}', "[" * 100_000])
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(BenchError, match="device-check"):
        load_report(path)
    with path.open("wb") as file:
        file.truncate(257 << 20)
    with pytest.raises(BenchError, match="larger than 256 MiB"):
        load_report(path)
    with pytest.raises(BenchError, match="No such file"):
        load_report(tmp_path / "nowhere.json")
