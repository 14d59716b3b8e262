"""The form of a tuning file: what is read, what is refused in one line, how files are merged."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.tune.conftest import Tune, entry

from orinbench.errors import BenchError
from orinbench.tune import tuning
from orinbench.tune.tuning import Entry


def written(tmp_path: Path, entries: list[Entry]) -> Path:
    path = tmp_path / "tuning.json"
    tuning.write(entries, path)
    return path


def changed(tmp_path: Path, **changes: Any) -> Path:
    """A file whose one entry is not as it should be."""
    whole = json.loads(written(tmp_path, [entry()]).read_text())
    for dotted, value in changes.items():
        *outer, last = dotted.split("__")
        place = whole["entries"][0]
        for name in outer:
            place = place[name]
        place[last] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(whole))
    return path


def test_what_is_written_is_read_and_is_sorted(tmp_path: Path) -> None:
    entries = [entry(3), entry(1), entry(2, level=4), entry(2)]
    path = written(tmp_path, entries)
    read = tuning.load(path)
    assert [(e.name, e.level) for e in read] == [("r_1", 2), ("r_2", 2), ("r_2", 4), ("r_3", 2)]
    text = path.read_text()
    assert written(tmp_path, read[::-1]).read_text() == text
    assert '"opts": "UPCAST(0,4)"' in path.read_text()


def test_slower_is_judged_against_noise() -> None:
    base = [1e-5 * (1 + 0.001 * i) for i in range(10)]
    assert tuning.no_slower(base, base[::-1])
    assert tuning.no_slower(base, [t / 2 for t in base])
    assert not tuning.no_slower(base, [t * 1.5 for t in base])
    assert tuning.no_slower(base, [t * 1.005 for t in base])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": "12"}, "kernel is '12'; want 64 hexadecimal digits"),
        ({"opts": "UPCAST(0,4) rm -rf"}, "'rm' is no optimization"),
        ({"opts": 4}, "opts is '4'; want text"),
        ({"level": True}, "level is 'True'; want a whole number"),
        ({"level": 0}, "level is 0; want BEAM's value"),
        ({"target": []}, "target is '[]'; want an object"),
        ({"target__series": "xyz"}, "series is 'xyz'"),
        ({"before": {}}, "before: median is 'None'; want a number"),
        ({"after__median": 0}, "after: want 0 < low <= median <= high"),
        ({"after__high": float("inf")}, "after: want 0 < low"),
        ({"name": "a\nb"}, "not printable"),
        ({"model": "x" * 401}, "longer than 400"),
        ({"launches": {"token": "many"}}, "launches: token is 'many'"),
    ],
)
def test_a_bad_entry_is_named_in_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = changed(tmp_path, **changes)
    with pytest.raises(BenchError) as raised:
        tuning.load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}: entry 1: ") and said in text and "\n" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "format 'None'"),
        (b'{"format": "tinygrad-orin tuning 9", "entries": []}', "format 'tinygrad-orin tuning 9'"),
        (b'{"format": "tinygrad-orin tuning 1"}', "entries: want a list"),
        (b"\xff\xfe\x00", "no JSON"),
        (pickle.dumps([entry()]), "no "),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(BenchError) as raised:
        tuning.load(path)
    assert said in str(raised.value) and str(raised.value).count("\n") == 0


def test_two_entries_for_one_kernel_in_a_file_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [entry()])
    whole = json.loads(path.read_text())
    whole["entries"] *= 2
    path.write_text(json.dumps(whole))
    with pytest.raises(BenchError, match="two entries for one kernel"):
        tuning.load(path)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nowhere\.json: No such file"):
        tuning.load(tmp_path / "nowhere.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be written"):
        tuning.write([entry()], tmp_path / "file" / "tuning.json")
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(BenchError, match="larger than 32 MiB"):
        tuning.load(huge)


def test_nothing_of_a_file_is_unpickled() -> None:
    folder = Path(tuning.__file__).parent
    for source in folder.glob("*.py"):
        assert "pickle." not in source.read_text() and "eval(" not in source.read_text(), source


def test_export_writes_what_was_kept(tune: Tune, tmp_path: Path) -> None:
    assert "nothing to write" in tune("export", tmp_path / "d.json").err
    tuning.keep([entry(1), entry(2, level=4)])
    tuning.keep([entry(1, 5.0)])
    assert tune("export", tmp_path / "d.json", "--level", "2").code == 0
    assert [e.speedup for e in tuning.load(tmp_path / "d.json")] == [5.0]
    assert "nothing to write" in tune("export", tmp_path / "e.json", "--device", "CUDA").err
