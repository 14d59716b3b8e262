"""Files: split, read-only, cut, damaged. Whatever is wrong is one line that names the file."""

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF

MATRIX = np.arange(64, dtype=np.float32).reshape(2, 32)


def write(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_array("some.words", ["one", "two", "", "drei"])
    writer.add_array("some.numbers", [1, -2, 3])
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_tensor("blk.0.weight", MATRIX)
    writer.add_tensor("blk.1.weight", MATRIX.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf")


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as found:
        GGUF.open(path)
    text = str(found.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text


@pytest.mark.parametrize(
    "words",
    [
        ["Ġa", "ü", "\u3000", "😀" * 9],
        ["one", "\0", "two"],
        ["one", "two", "\0" * 7],
        ["", "", "x", ""],
        ["x" * 255, "y" * 256, "z" * 70000],
        ["a"] * 1000,
        ["b" * 100] * 100,
    ],
)
def test_strings_of_every_length(tmp_path: Path, words: list[str]) -> None:
    """Those that are found by the zeros of their lengths, and those that must be walked."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("some.words", words)
    writer.add_array("other.words", words[::-1])
    writer.add_tensor("blk.0.weight", MATRIX)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = GGUF.open(tmp_path / "m.gguf")
    assert opened.metadata["some.words"] == words
    assert opened.metadata["other.words"] == words[::-1]
    np.testing.assert_array_equal(opened.f32_or_f16_tensor("blk.0.weight"), MATRIX)


def test_a_file_and_a_folder_without_write_permission(path: Path) -> None:
    before = path.read_bytes()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        if os.geteuid() == 0:
            # Permissions do not bind root: the kernel tells how it was opened.
            opened = GGUF.open(path)
            modes = [line.split()[1] for line in _maps() if line.endswith(str(path))]
            assert modes == ["rw-p"], "mapped privately: nothing goes back into the file"
        else:
            opened = GGUF.open(path)
    finally:
        path.parent.chmod(0o755)
    # tinygrad's copies may write to what is mapped; the file stays as it is.
    opened.tensor_bytes("blk.0.weight")[:] = 0
    assert path.read_bytes() == before


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_nothing_but_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "is no regular file" in refused(tmp_path / "fifo")
    assert "is no regular file" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "nothing")
    (tmp_path / "empty").touch()
    assert "is empty" in refused(tmp_path / "empty")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot be read: Too many levels of symbolic links" in refused(tmp_path / "loop")


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"PK\x03\x04", r"not a GGUF file: it starts with b'PK\x03\x04' instead of b'GGUF'"),
        (b"GGUF\x00\x00\x00\x03", "is a big-endian GGUF; only little-endian ones are read"),
        (b"GGUF\x01\x00\x00\x00", "is a GGUF of version 1; read are 2 and 3"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "damaged or truncated in the GGUF header"),
    ],
)
def test_other_formats(tmp_path: Path, start: bytes, says: str) -> None:
    (tmp_path / "m.gguf").write_bytes(start if len(start) < 8 else start.ljust(64, b"\0"))
    assert says in refused(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", [b"some.words", b"blk.0.weight"])
def test_a_name_that_would_break_the_line(path: Path, name: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(name, name.replace(b".", b"\n"), 1))
    shown = name.decode().replace(".", "\n")
    assert f"the name {shown!r} holds what cannot be printed" in refused(path)


# The file stays between examples, only what is read of it differs.
FILE = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FILE
@given(st.data())
def test_a_file_cut_anywhere(path: Path, data: st.DataObject) -> None:
    whole = (path.parent / "m.gguf").read_bytes()
    cut = path.parent / "cut.gguf"
    cut.write_bytes(whole[: data.draw(st.integers(1, _end(path) - 1))])
    text = refused(cut)
    assert "truncated" in text or "not a GGUF" in text


def _end(path: Path) -> int:
    """Bytes up to the end of the last tensor; what follows is padding."""
    tensors = GGUF.open(path).tensors.values()
    return max(tensor.offset + tensor.n_bytes for tensor in tensors)


@FILE
@given(at=st.integers(0, 400), raw=st.binary(min_size=1, max_size=9))
def test_damage_is_told_or_harmless(path: Path, at: int, raw: bytes) -> None:
    """No bytes of a header end in anything but BadInput, or in tensors within the file."""
    whole = bytearray(path.read_bytes())
    whole[at : at + len(raw)] = raw
    bad = path.parent / "bad.gguf"
    bad.write_bytes(whole)
    try:
        opened = GGUF.open(bad)
        values = [opened.metadata[key] for key in opened.metadata]
    except BadInput as error:
        assert str(error).startswith(f"{bad}: ") and "\n" not in str(error)
        return
    assert len(values) == len(opened.metadata)
    assert all(len(opened.tensor_bytes(name)) == t.n_bytes for name, t in opened.tensors.items())


def test_a_length_beyond_all_memory(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[8:16] = struct.pack("<Q", 2**63)
    path.write_bytes(whole)
    assert "goes on beyond the end" in refused(path)


def offset_of(path: Path, name: str, offset: int) -> Path:
    """Say that a matrix begins so many bytes behind the header."""
    whole = bytearray(path.read_bytes())
    at = whole.index(name.encode()) + len(name) + struct.calcsize("<IQQI")
    struct.pack_into("<Q", whole, at, offset)
    path.write_bytes(whole)
    return path


def test_tensors_that_overlap_or_begin_anywhere(path: Path) -> None:
    text = refused(offset_of(path, "blk.1.weight", 224))
    assert "tensors blk.0.weight and blk.1.weight overlap" in text
    assert "tensor blk.1.weight begins at 258, no multiple of 32" in refused(
        offset_of(path, "blk.1.weight", 258)
    )


def test_a_key_that_stands_twice(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_bool("a.bool", True)
    writer.add_bool("a.byte", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    path.write_bytes(path.read_bytes().replace(b"a.byte", b"a.bool"))
    assert "a.bool appears twice" in refused(path)


@pytest.mark.parametrize(
    ("count", "says"), [("2", "split.count is '2'"), (-5, "split.count is -5")]
)
def test_a_count_of_parts_that_is_none(tmp_path: Path, count: str | int, says: str) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = GGUFValueType.STRING if isinstance(count, str) else GGUFValueType.INT32
    writer.add_key_value("split.count", count, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert f"{says}; a whole number was expected" in refused(tmp_path / "m.gguf")


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Write a model in three files; give the path of one."""
    for index in range(3):
        writer = GGUFWriter(tmp_path / f"m-{index + 1:05d}-of-00003.gguf", "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 3)
        writer.add_tensor(f"blk.{index}.weight", MATRIX + index)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    yield lambda index: tmp_path / f"m-{index + 1:05d}-of-00003.gguf"


def test_split_files(split: Callable[[int], Path]) -> None:
    opened = GGUF.open(split(0))
    assert len(opened.files) == 3
    for index in range(3):
        np.testing.assert_array_equal(
            opened.f32_or_f16_tensor(f"blk.{index}.weight"), MATRIX + index
        )
    assert "give the first one, whose name ends in -00001-of-00003.gguf" in refused(split(1))


def test_a_part_that_is_missing_or_renamed(split: Callable[[int], Path]) -> None:
    split(2).rename(split(2).with_name("other.gguf"))
    with pytest.raises(BadInput, match=r"m-00003-of-00003\.gguf: no such file"):
        GGUF.open(split(0))
    split(2).symlink_to(split(0))
    with pytest.raises(BadInput, match=r"is part 1 of a model; its name is that of part 3"):
        GGUF.open(split(0))
    renamed = split(0).rename(split(0).with_name("first.gguf"))
    assert "is a part of a model in 3 files" in refused(renamed)
    assert "is a part of a model in 3 files" in refused(split(1).rename(split(0)))
