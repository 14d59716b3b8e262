"""The form of a report, and how a file that has another one is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.device_check.conftest import report

from orinbench.device_check.report import load_report, write_report
from orinbench.device_check.schema import SCHEMA, problems
from orinbench.device_check.steps import STEPS
from orinbench.errors import BenchError


def test_every_step_has_its_form_and_every_form_its_step() -> None:
    steps = SCHEMA["properties"]["steps"]["properties"]
    assert list(steps) != [] and set(steps) == {step.name for step in STEPS}
    used = json.dumps(SCHEMA)
    assert all(f"#/$defs/{name}" in used for name in SCHEMA["$defs"])
    assert sum(step.seconds for step in STEPS) < 3600


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "report.json"
    write_report(report(), path)
    assert load_report(path) == report()


CHANGES: list[tuple[list[Any], Any, str]] = [
    (["started"], "yesterday", 'report.started: is "yesterday"; want a text like'),
    (["simulated"], 1, "report.simulated: is 1; want boolean"),
    (["sizes"], "huge", "want one of board, tiny"),
    (["hostname"], "falcon", "report: has hostname, which is not known"),
    (["steps", "magic"], {}, "report.steps: has magic, which is not known"),
    (["steps", "abi", "status"], "fine", "report.steps.abi.status"),
    (["steps", "abi", "seconds"], -1, "report.steps.abi.seconds: is -1; want at least 0"),
    (["steps", "abi", "seconds"], True, "report.steps.abi.seconds: is true; want number"),
    (["steps", "abi", "result"], [], "report.steps.abi.result: is []; want object or null"),
    (["steps", "abi", "result", "unexpected"], [1], "unexpected[0]: is 1; want string"),
    (["steps", "abi", "result", "windows", "va_end"], {"end": "0x1"}, "va_end: lacks works"),
    (["steps", "abi", "user"], "mk", "report.steps.abi: has user, which is not known"),
]


@pytest.mark.parametrize(("place", "value", "said"), CHANGES)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, place: list[Any], value: Any, said: str
) -> None:
    whole = copy.deepcopy(report())
    inner = whole
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (found,) = problems(whole)
    assert said in found
    path = tmp_path / "report.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(BenchError) as raised:
        load_report(path)
    assert found in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "x"}', "[" * 100_000])
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(BenchError, match="want"):
        load_report(path)
    with pytest.raises(BenchError, match="No such file"):
        load_report(tmp_path / "nowhere.json")


def test_several_problems_are_one_line(tmp_path: Path) -> None:
    whole = report()
    del whole["started"], whole["sizes"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(BenchError, match=r"lacks started \(and 1 more\)"):
        load_report(path)
    path.write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        write_report(report(), path / "report.json")
    with path.open("wb") as file:
        file.truncate(257 << 20)
    with pytest.raises(BenchError, match="larger than"):
        load_report(path)
