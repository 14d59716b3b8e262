"""The form of a tuning file: what is read, what is refused in one line, how files are merged."""

import json
import pickle
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.benchmarks.tune.conftest import Tune, entry

from orinbench.errors import BenchError
from orinbench.tune import tuning
from orinbench.tune.tuning import Entry, Timing

ENTRIES = st.lists(
    st.builds(entry, st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0]), level=st.integers(1, 2)),
    max_size=4,
)


def written(tmp_path: Path, entries: list[Entry]) -> Path:
    path = tmp_path / "tuning.json"
    tuning.write(entries, path)
    return path


def changed(tmp_path: Path, **changes: Any) -> Path:
    """A file whose one entry is not as it should be."""
    whole = json.loads(tuning.dump([entry()]))
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
    assert read == tuning.merge(entries)
    assert [(e.name, e.level) for e in read] == [("r_1", 2), ("r_2", 2), ("r_2", 4), ("r_3", 2)]
    assert tuning.dump(read) == path.read_text() == tuning.dump(reversed(read))
    assert '"opts": "UPCAST(0,4)"' in path.read_text()


@given(ENTRIES, ENTRIES, ENTRIES)
def test_merging_has_no_order(a: list[Entry], b: list[Entry], c: list[Entry]) -> None:
    merged = tuning.merge(a, b, c)
    for x, y, z in permutations((a, b, c)):
        assert tuning.merge(tuning.merge(x, y), z) == merged
    assert tuning.merge(merged, merged) == merged
    assert len({e.identity for e in merged}) == len(merged)


def test_of_two_for_one_kernel_the_larger_speedup_stays() -> None:
    # On a machine twice as fast, with a smaller gain: its times are lower and say less.
    fast = entry(speedup=1.5, before=Timing(50, 50, 50, 8), after=Timing(40, 40, 40, 8))
    slow = entry(speedup=2.0, opts="UNROLL(0,4)")
    assert tuning.merge([fast], [slow]) == [slow]
    other = replace(slow, target=replace(slow.target, series="f" * 12))
    assert len(tuning.merge([slow], [other])) == 2


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
        ({"opts": 4}, "opts is '4'; want a str"),
        ({"level": True}, "level is 'True'; want a int"),
        ({"level": 0}, "level is 0; want BEAM's value"),
        ({"target": []}, "target is '[]'; want a dict"),
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
        (b"\xff\xfe\x00", "no text"),
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
