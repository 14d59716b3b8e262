"""The model against the recorded answers of NVIDIA's own driver code, and the judge itself."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvgpusim.cli import main
from nvgpusim.errors import SimError
from nvgpusim.orin.driver_answers import (
    NOWHERE,
    RecordedSequence,
    SequencePlayer,
    SequenceVerdict,
    agreement_table_lines,
    iter_verdicts,
    load_sequences,
)
from nvgpusim.orin.kernel.nvmap import NvMapFile
from nvgpusim.orin.kernel.tsg import Tsg

ANSWERS = Path(__file__).parent / "data" / "nvgpu-answers.json.gz"


@pytest.fixture(scope="module")
def sequences() -> list[RecordedSequence]:
    return load_sequences(ANSWERS)


def pick(sequences: list[RecordedSequence], release: str, name: str) -> RecordedSequence:
    return next(s for s in sequences if (s.release, s.name) == (release, name))


def altered(sequence: RecordedSequence) -> RecordedSequence:
    return RecordedSequence(
        sequence.release,
        sequence.profile,
        sequence.name,
        sequence.board,
        copy.deepcopy(sequence.calls),
    )


@pytest.mark.parametrize("kind", ["rule", "place", "flags", "order", "tidy"])
@pytest.mark.parametrize("release", ["36.4.3", "35.6"])
def test_every_answer_is_nvgpus(sequences: list[RecordedSequence], release: str, kind: str) -> None:
    chosen = [s for s in sequences if s.release == release and s.name.startswith(kind + "/")]
    verdicts = list(iter_verdicts(chosen))
    assert [(v.name, *v.differences[0]) for v in verdicts if v.differences] == []
    assert sum(v.compared for v in verdicts) > 3000


def test_the_file_is_whole(sequences: list[RecordedSequence]) -> None:
    assert len(sequences) == 1416
    assert sum(len(s.calls) for s in sequences) == 115_000


def test_a_wrong_address_is_a_difference_and_a_masked_byte_is_none(
    sequences: list[RecordedSequence],
) -> None:
    changed = altered(pick(sequences, "36.4.3", "rule/as/sizes"))
    call = next(c for c in changed.calls if c.get("what") == "64M")
    out = bytearray.fromhex(call["out"])
    out[8] ^= 1  # the descriptor, which is masked
    call["out"] = out.hex()
    (verdict,) = iter_verdicts([changed])
    assert not verdict.differences
    out[36] ^= 1
    call["out"] = out.hex()
    (verdict,) = iter_verdicts([changed])
    assert "byte 36" in verdict.differences[0][1]


def test_second_memory_is_compared(sequences: list[RecordedSequence]) -> None:
    changed = altered(pick(sequences, "36.4.3", "rule/as/free"))
    call = next(c for c in changed.calls if "mem" in c)
    memory = call["mem"][0]
    memory["out"] = "ff" + memory["out"][2:]
    (verdict,) = iter_verdicts([changed])
    assert "memory at 0" in verdict.differences[0][1]


def test_what_the_model_does_not_make_is_a_difference(sequences: list[RecordedSequence]) -> None:
    changed = altered(pick(sequences, "36.4.3", "rule/as/sizes"))
    changed.calls[1]["in"] = "00" * 64  # refused: no address space
    (verdict,) = iter_verdicts([changed])
    assert verdict.differences[0][0] == 1
    assert verdict.differences[1][1] == "AS_MAP_BUFFER_EX: the model made no as0"


def test_no_descriptor_is_one_that_is_to_be_open_nowhere(sequences: list[RecordedSequence]) -> None:
    many = pick(sequences, "36.4.3", "rule/chan/subctx 64 async")
    bench = SequencePlayer(many)
    calls = [{"dmabuf": f"b{i}", "size": "0x1000", "mode": "rw"} for i in range(120)]
    for call in calls:
        bench._play_and_compare_call(call)
    assert not set(NOWHERE) & set(bench.fds.values())
    bench._close_all_and_stop_kernel(SequenceVerdict("36.4.3", "none"))


def test_a_model_without_dmabufs_is_a_difference(
    sequences: list[RecordedSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`create.handle64` broken: the handle in the high half, which ALLOC does not know."""
    create = NvMapFile._create_owned_handle

    def high(self: NvMapFile, size: int) -> SimpleNamespace:
        return SimpleNamespace(id=create(self, size).id << 32)

    monkeypatch.setattr(NvMapFile, "_create_owned_handle", high)
    (verdict,) = iter_verdicts([pick(sequences, "36.4.3", "rule/as/sizes")])
    assert verdict.differences[0][1] == "no dmabuf: NVMAP_ALLOC answers EINVAL"


@pytest.mark.parametrize("method", ["set_or_check_address_space", "unbind_channel"])
def test_a_model_that_breaks_is_a_difference(
    sequences: list[RecordedSequence], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """In a call, and at the end, when the channels are closed."""
    monkeypatch.setattr(Tsg, method, None)
    (verdict,) = iter_verdicts([pick(sequences, "36.4.3", "rule/chan/tsg before as")])
    assert "the model broke: TypeError(" in verdict.differences[0][1]


def test_the_table_counts_by_release_and_kind(sequences: list[RecordedSequence]) -> None:
    names = ("rule/as/alloc", "place/distinct/0")
    chosen = [pick(sequences, r, n) for r in ("35.6", "36.4.3") for n in names]
    verdicts = list(iter_verdicts(chosen))
    verdicts[0].differences.append((0, "made up"))
    lines = [line.split() for line in agreement_table_lines(verdicts)[1:]]
    assert [line[:3] for line in lines] == [
        ["35.6", "all", "1/2"],
        ["35.6", "place", "1/1"],
        ["35.6", "rule", "0/1"],
        ["36.4.3", "all", "2/2"],
        ["36.4.3", "place", "1/1"],
        ["36.4.3", "rule", "1/1"],
    ]


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(ANSWERS), "--only", "rule/tsg/*"]) == 0
    out = capsys.readouterr().out
    assert "36.4.3   rule             2/2" in out
    data = json.loads(gzip.decompress(ANSWERS.read_bytes()))
    for release in data["releases"].values():
        release["sequences"] = release["sequences"][:3]
        for sequence in release["sequences"]:
            sequence["calls"][1]["ret"] = -1
    assert main(["judge", str(write(tmp_path / "x.json", data)), "--show", "1"]) == 1
    captured = capsys.readouterr()
    assert "36.4.3 rule/as/alloc, call 1: ALLOC_AS: nvgpu EPERM, model EINVAL" in captured.out
    assert "5 more sequences differ" in captured.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON, plain or gzip"),
        ("[]", "not recorded answers of schema 1"),
        ('{"schema": 2, "releases": {}}', "not recorded answers of schema 1"),
        ('{"schema": 1, "releases": {}}', "holds no sequence"),
        ('{"schema": 1, "releases": {"9": {"profile": "r9", "sequences": []}}}', "'r9'"),
        ('{"schema": 1, "releases": {"36": {"profile": "r36"}}}', "damaged"),
    ],
)
def test_bad_files(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.json"
    path.write_text(content)
    assert main(["judge", str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err and str(path) in err and err.count("\n") == 1


def test_bad_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(tmp_path / "none")]) == 2
    assert "No such file or directory; expected a file of answers" in capsys.readouterr().err
    assert main(["judge", str(ANSWERS), "--only", "nothing"]) == 2
    assert "--only 'nothing'" in capsys.readouterr().err
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(ANSWERS.read_bytes()[:1000])
    assert main(["judge", str(broken)]) == 2


def test_a_damaged_call_names_its_place(sequences: list[RecordedSequence]) -> None:
    changed = altered(pick(sequences, "35.6", "rule/as/alloc"))
    del changed.calls[3]["in"]
    with pytest.raises(SimError, match=r"35\.6 rule/as/alloc, call 3 is damaged"):
        list(iter_verdicts([changed]))
