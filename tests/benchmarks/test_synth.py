import errno
import hashlib
import itertools
import math
import os
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.benchmarks.orinbench_command import Patch

from orinbench.errors import BenchError
from orinbench.model import SUPPORTED_TYPES, open_model
from orinbench.synth import find_or_write_synthetic, synth_command, write_synthetic
from orinbench.synth.random_blocks import SYNTHETIC_TYPES, random_tensor_chunks
from orinbench.synth.shapes import QUANTS, SHAPES, ModelShape

# Of the tensors' bytes alone: the header depends on the gguf library's version.
TINY_Q6_K_SEED_0 = "6d9809cfd3ac8f21b2877872418defa9492f094479468ea7392e18fe9decc524"


def write(path: Path, shape: str = "tiny", quant: str = "Q6_K", seed: int = 0) -> Path:
    write_synthetic(path, shape, quant, seed)
    return path


def tensor_bytes(path: Path) -> bytes:
    return path.read_bytes()[GGUFReader(path).data_offset :]


shapes = st.builds(
    ModelShape,
    n_layers=st.integers(1, 3),
    n_embd=st.sampled_from((256, 512)),
    n_ff=st.sampled_from((256, 768)),
    n_heads=st.sampled_from((4, 8)),
    n_kv_heads=st.sampled_from((1, 2)),
    head_dim=st.sampled_from((64, 128)),
    vocab_size=st.integers(261, 2000),
    context_length=st.integers(1, 1 << 17),
    tied=st.booleans(),
    weight_std=st.floats(0.01, 0.1),
)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, quant=st.sampled_from(sorted(QUANTS)), seed=st.integers(0, 2**64 - 1))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, shape: ModelShape, quant: str, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("synth")
    with patch.dict(SHAPES, drawn=shape):
        path = write(directory / "a.gguf", "drawn", quant, seed)
        again = write(directory / "b.gguf", "drawn", quant, seed)
    assert path.read_bytes() == again.read_bytes()
    reader, model = GGUFReader(path), open_model(path)
    expected = {name: dims for name, dims, _ in shape.tensors()}
    assert {t.name: tuple(reversed(t.shape.tolist())) for t in reader.tensors} == expected
    assert model.has_tied_head == shape.tied
    assert (model.n_layers, model.n_embd, model.n_heads) == (
        shape.n_layers,
        shape.n_embd,
        shape.n_heads,
    )
    assert (model.vocab_size, model.context_length) == (shape.vocab_size, shape.context_length)
    assert path.stat().st_size == max(t.offset + t.n_bytes for t in model.tensors.values())
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        assert np.isfinite(weights).all()
        if tensor.name.endswith("norm.weight"):
            assert tensor.tensor_type == GGMLQuantizationType.F32
            assert abs(weights.mean() - 1) < 0.05
        else:
            assert tensor.tensor_type == QUANTS[quant].type_of(tensor.name, shape)
            # Every block draws its scale, so few blocks vary: five times the spread over seeds
            # of the std and the mean of one block (of one weight where there are no blocks).
            blocks = weights.size / GGML_QUANT_SIZES[tensor.tensor_type][0]
            of_std, of_mean = (1.7, 1.4) if blocks < weights.size else (3.2, 4.8)
            assert abs(weights.std() / shape.weight_std - 1) < 0.02 + of_std / blocks**0.5
            assert abs(weights.mean() / shape.weight_std) < 0.01 + of_mean / blocks**0.5
    shutil.rmtree(directory)


@pytest.mark.parametrize("tensor_type", SYNTHETIC_TYPES, ids=lambda t: t.name)
def test_weights_have_the_wanted_spread(tensor_type: GGMLQuantizationType) -> None:
    raw = np.concatenate(list(random_tensor_chunks(tensor_type, 1 << 20, 0.02, 0, "w")))
    weights = dequantize(raw.reshape(1024, -1), tensor_type).astype(np.float64)
    assert weights.shape == (1024, 1024)
    assert weights.std() == pytest.approx(0.02, rel=0.03)
    assert abs(weights.mean()) < 4e-4
    assert np.abs(weights).max() < 0.2
    assert tensor_type in SUPPORTED_TYPES


def test_the_same_seed_gives_the_same_bytes_for_ever(tmp_path: Path) -> None:
    digest = hashlib.sha256(tensor_bytes(write(tmp_path / "m.gguf"))).hexdigest()
    assert digest == TINY_Q6_K_SEED_0, "raise synth.GENERATION, or cached models lie"


def test_a_medium_file_mixes_types(tmp_path: Path) -> None:
    model = open_model(write(tmp_path / "m.gguf", quant="Q4_K_M"))
    types = Counter(tensor.type.name for tensor in model.tensors.values())
    assert types == {"Q4_K": 12, "Q6_K": 3, "F32": 5}
    assert model.tensors["token_embd.weight"].type.name == "Q6_K"
    assert model.type_label == "llama ?B Q4_K - Medium"


@pytest.mark.parametrize(
    ("shape", "label", "millions"),
    [
        *(("160m", "?B", 153), ("1b", "1B", 1236), ("3b", "3B", 3213), ("8b", "8B", 8030)),
        *(("0.5b", "1B", 494), ("qwen3-4b", "4B", 4022), ("gemma3-4b", "4B", 3880)),
        ("phi4-mini", "3B", 3836),
    ],
)
def test_the_shapes_are_what_their_names_say(shape: str, label: str, millions: int) -> None:
    weights = sum(math.prod(sizes) for _, sizes, _ in SHAPES[shape].tensors())
    assert round(weights / 1e6) == millions


def test_tinygrads_tokenizer_takes_the_vocabulary(tmp_path: Path) -> None:
    from tinygrad.llm.cli import SimpleTokenizer

    reader = GGUFReader(write(tmp_path / "m.gguf"))
    kv = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer = SimpleTokenizer.from_gguf_kv(kv)
    text = "Größe: 12 tokens, naïve\n\tbanana <|eot_id|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eot_id == 1023
    assert len(tokenizer.encode("banana")) == 4  # b, an, an, a
    assert len(set(kv["tokenizer.ggml.tokens"])) == 1024
    assert tokenizer.is_end(tokenizer.eos_id) and tokenizer.prefix() == [1019]


def test_memory_stays_small_whatever_the_tensor(tmp_path: Path) -> None:
    tracemalloc.start()
    for tensor_type in (GGMLQuantizationType.F16, GGMLQuantizationType.Q6_K):
        for chunk in itertools.islice(random_tensor_chunks(tensor_type, 1 << 30, 0.02, 0, "w"), 3):
            assert chunk.nbytes <= 16 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400e6


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: Patch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 << 20))
    with pytest.raises(BenchError, match=r"8b.gguf: needs 6\.\d\d GB but the disk has 0\.00 GB"):
        write(tmp_path / "8b.gguf", "8b")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GGUFWriter, "write_padding", full)
    with pytest.raises(BenchError, match="cannot be written: No space left on device"):
        write(tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_half_and_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def interrupt(done: int, total: int) -> None:
        assert 0 < done < total
        assert len(list(tmp_path.iterdir())) == 2  # the part is there
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic(path, "tiny", "Q6_K", 0, interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"old"


def test_the_cache_writes_once_and_mends_what_is_broken(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[tuple[int, int]] = []
    path = find_or_write_synthetic(
        "tiny", "Q8_0", 3, lambda done, total: calls.append((done, total))
    )
    assert path.parent == tmp_path / "tinygrad-orin" / "models"
    assert calls[-1][0] == calls[-1][1] == sum(
        tensor.n_bytes for tensor in open_model(path).tensors.values()
    )  # fmt: skip
    content, stamp = path.read_bytes(), path.stat().st_mtime_ns
    assert find_or_write_synthetic("tiny", "Q8_0", 3) == path
    assert path.stat().st_mtime_ns == stamp
    path.write_bytes(content[:-1])
    assert find_or_write_synthetic("tiny", "Q8_0", 3).read_bytes() == content
    assert find_or_write_synthetic("tiny", "Q8_0", 4) != path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "2b"], "--shape 2b: no such shape; there are tiny, "),
        (["--shape", "tiny", "--quant", "Q9_K"], "--quant Q9_K: no such type; there are F32, F16"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(synth_command, [*arguments, str(tmp_path / "m.gguf")])
    assert isinstance(result.exception, BenchError)
    assert str(result.exception).startswith(message)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BenchError, match="no such"):
        find_or_write_synthetic(arguments[1], arguments[-1], 0)


def test_the_command_says_what_it_wrote_and_does_not_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.gguf"
    arguments = ["--shape", "tiny", "--quant", "Q4_K", "--seed", "7", str(path)]
    refused = CliRunner().invoke(synth_command, arguments)
    assert "No such file or directory" in str(refused.exception)
    path.parent.mkdir()
    result = CliRunner().invoke(synth_command, arguments)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr == (
        f"{path}: synthetic tiny Q4_K seed 7: llama ?B Q4_K - Small, 1.4 M weights, 0.8 MB, "
        "a token reads 0.8 MB\n"
    )
    result = CliRunner().invoke(synth_command, arguments)
    assert str(result.exception) == f"{path}: exists already; pass --force to replace it"
    assert CliRunner().invoke(synth_command, ["--force", *arguments]).exit_code == 0
    result = CliRunner().invoke(synth_command, ["--force", "--context", "70000", *arguments])
    assert result.exit_code == 0 and open_model(path).context_length == 70000
    result = CliRunner().invoke(synth_command, [*arguments[:-1], str(tmp_path)])
    assert "is a directory" in str(result.exception)
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(synth_command, ["--force", *arguments[:-1], str(tmp_path / "pipe")])
    assert "is no regular file" in str(result.exception) and (tmp_path / "pipe").is_fifo()


def test_no_folder_is_made_silently(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"m\.gguf: cannot be written: No such file or directory"):
        write_synthetic(tmp_path / "typo" / "m.gguf", "tiny", "Q6_K", 0)
    assert not list(tmp_path.iterdir())
