"""A wall meter's CSV beside the records of a benchmark."""

import json
from pathlib import Path

import pytest
from tests.telemetry.conftest import exit_code

from orinboard.wall import MeterError, WallMeter, load_wall_meter
from orinexporter.cli import main


def meter(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "meter.csv"
    file.write_text(text)
    return file


def test_both_forms_of_time(tmp_path: Path) -> None:
    unix = load_wall_meter(meter(tmp_path, "Timestamp,Watts\n1000,10\n1001.5,20\n"))
    assert unix == WallMeter((1000.0, 1001.5), (10.0, 20.0))
    iso = (
        "\ufefftime,volts,power_w\n1970-01-01T00:16:40Z,230,10\n1970-01-01T01:16:41+01:00,230,20\n"
    )
    assert load_wall_meter(meter(tmp_path, iso)) == WallMeter((1000.0, 1001.0), (10.0, 20.0))


def test_energy_between_two_moments() -> None:
    ramp = WallMeter(tuple(map(float, range(11))), tuple(10.0 * t for t in range(11)))
    assert ramp.joules(0, 10) == pytest.approx(500)
    assert ramp.joules(2.25, 7.5) == pytest.approx(5 * (7.5**2 - 2.25**2))
    assert ramp.joules(2.1, 2.2) == pytest.approx(5 * (2.2**2 - 2.1**2))
    assert ramp.joules(-1, 5) is None and ramp.joules(5, 11) is None
    gap = WallMeter((0.0, 1.0, 2.0, 12.0, 13.0, 14.0), (10.0,) * 6)
    assert gap.joules(1, 13) is None and gap.joules(0.5, 1.5) == pytest.approx(10)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no column is called time, timestamp"),
        ("time,volts\n1,2\n", "no column is called watts, power"),
        ("time,watts\n1,x\n", "line 2: could not convert"),
        ("time,watts\n1,2\n2\n", "line 3: "),
        ("time,watts\n1,-5\n", "line 2: '-5' is no power in watts"),
        ("time,watts\n1,nan\n", "line 2: 'nan' is no power"),
        ("time,watts\ninf,1\n", "line 2: 'inf' is no time"),
        ("time,watts\n2026-11-22T10:00:00,1\n", "names no zone"),
        ("time,watts\n2,1\n1,1\n", "line 3: time does not go on"),
        ("time,watts\n1,1\n", "fewer than two readings"),
    ],
)
def test_a_file_that_is_no_meters(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(MeterError) as caught:
        load_wall_meter(meter(tmp_path, text))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


def test_it_stands_beside_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = meter(tmp_path, "time,watts\n" + "".join(f"{t},60\n" for t in range(100, 120)))
    energy = {"joules": 300.0, "tokens": 128, "started": 102.5, "ended": 112.5}
    energy["boundary"] = "module, without carrier board and power supply"  # type: ignore[assignment]
    record = {"backend": "tinygrad:NV", "test": "tg128", "energy": [energy, None]}
    late = record | {"test": "pp512", "energy": [energy | {"ended": 500.0}]}
    records = tmp_path / "run.jsonl"
    records.write_text(json.dumps(record) + "\n\n" + json.dumps(late) + "\n")
    assert exit_code(main, "wall", str(file), str(records)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["tinygrad:NV", "tg128", "300.00", "600.00", "50.0%", "2.34", "4.69"]
    assert lines[2].split() == ["tinygrad:NV", "pp512", "300.00", "not", "covered"]
    assert "module, without carrier board and power supply" in " ".join(lines)


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = meter(tmp_path, "time,watts\n1,1\n2,1\n")
    for text, complaint in (
        ("{", "line 1: no record"),
        ("[]", "line 1: no record"),
        ("", "energy"),
    ):
        (tmp_path / "run.jsonl").write_text(text)
        assert exit_code(main, "wall", str(file), str(tmp_path / "run.jsonl")) == 2
        said = capsys.readouterr().err
        assert complaint in said and said.count("\n") == 1
    assert exit_code(main, "wall", str(file), str(tmp_path / "none")) == 2
    assert "none: No such file" in capsys.readouterr().err
