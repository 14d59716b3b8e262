"""Corrupted models of more than twenty kinds: none reaches a figure, and none ends in a traceback.

The engine is the reference's own code over the same file, so it computes what an engine without any
check of its own would; two kinds go through the whole command with tinygrad.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from tests.benchmarks.check.test_gate import perfect
from tests.benchmarks.gguf_files import write_family
from tests.benchmarks.orinbench_command import Capture, orinbench

from orinbench.check import HALF_WEIGHTS, EngineToCheck, judge_engine, require_passed
from orinbench.check.greedy import GreedyGeneration
from orinbench.check.nonfinite import generation_fault
from orinbench.errors import BenchError
from orinbench.model import ModelInfo, open_model

Corrupt = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("whole") / "whole.gguf", "llama")


def put(name: str, value: float, at: int = 3) -> Corrupt:
    """Write one weight of a tensor anew."""

    def corrupt(path: Path) -> None:
        (tensor,) = [t for t in GGUFReader(path).tensors if t.name == name]
        dtype = np.float32 if tensor.tensor_type == 0 else np.float16
        weights = np.memmap(path, dtype, "r+", int(tensor.data_offset), (at + 1,))
        weights[at] = value
        weights.flush()

    return corrupt


def fill(name: str, value: float) -> Corrupt:
    """Write all weights of a tensor anew."""

    def corrupt(path: Path) -> None:
        (tensor,) = [t for t in GGUFReader(path).tensors if t.name == name]
        dtype = np.float32 if tensor.tensor_type == 0 else np.float16
        weights = np.memmap(path, dtype, "r+", int(tensor.data_offset), (int(tensor.n_elements),))
        weights[:] = value
        weights.flush()

    return corrupt


def replace(old: bytes, new: bytes) -> Corrupt:
    """Replace the first such bytes of the header."""

    def corrupt(path: Path) -> None:
        content = path.read_bytes()
        assert old in content and len(old) == len(new)
        path.write_bytes(content.replace(old, new, 1))

    return corrupt


def number(key: str, value: bytes) -> Corrupt:
    """Write a number of the metadata anew."""

    def corrupt(path: Path) -> None:
        content = bytearray(path.read_bytes())
        place = content.index(key.encode()) + len(key) + 4
        content[place : place + len(value)] = value
        path.write_bytes(bytes(content))

    return corrupt


def cut(share: float) -> Corrupt:
    def corrupt(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return corrupt


KINDS: dict[str, tuple[Corrupt, int, str]] = {
    # name: what is done to the file, exit code, what is said
    "NaN in the embedding": (put("token_embd.weight", np.nan), 3, "token_embd.weight"),
    "NaN in a query": (put("blk.1.attn_q.weight", np.nan), 3, "blk.1.attn_q.weight (layer 1)"),
    "NaN in a key": (put("blk.0.attn_k.weight", np.nan), 3, "blk.0.attn_k.weight (layer 0)"),
    "NaN in a value": (put("blk.0.attn_v.weight", np.nan), 3, "blk.0.attn_v.weight (layer 0)"),
    "inf in an output": (put("blk.1.attn_output.weight", np.inf), 3, "blk.1.attn_output.weight"),
    "-inf in a gate": (put("blk.0.ffn_gate.weight", -np.inf), 3, "blk.0.ffn_gate.weight"),
    "inf in an up": (put("blk.0.ffn_up.weight", np.inf), 3, "blk.0.ffn_up.weight (layer 0)"),
    "NaN in a down": (put("blk.1.ffn_down.weight", np.nan), 3, "blk.1.ffn_down.weight (layer 1)"),
    "NaN in a norm": (put("blk.1.ffn_norm.weight", np.nan), 3, "blk.1.ffn_norm.weight (layer 1)"),
    "inf in the last norm": (put("output_norm.weight", np.inf), 3, "output_norm.weight"),
    "all NaN": (fill("blk.0.attn_norm.weight", np.nan), 3, "blk.0.attn_norm.weight (layer 0): 128"),
    "an embedding of zeros": (fill("token_embd.weight", 0.0), 3, "spread"),
    "a last norm of zeros": (fill("output_norm.weight", 0.0), 3, "spread"),
    "cut in the data": (cut(0.7), 2, "truncated: tensor"),
    "cut in the header": (cut(0.003), 2, "damaged or truncated in the GGUF header"),
    "another magic": (replace(b"GGUF", b"GGML"), 2, "not a GGUF file"),
    "a missing tensor": (
        replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"), 2, "ffn_up.weight is missing"),
    "a missing norm": (
        replace(b"output_norm.weight", b"output_nope.weight"), 2, "output_norm.weight is missing"),
    "more layers": (number("llama.block_count", struct.pack("<I", 3)), 2, "blk.2.attn_norm"),
    "no layers": (number("llama.block_count", struct.pack("<I", 0)), 2, "block_count is 0"),
    "more heads": (number("llama.attention.head_count", struct.pack("<I", 8)), 2, "has the shape"),
    "a wider model": (number("llama.embedding_length", struct.pack("<I", 256)), 2, "has the shape"),
    "NaN for an epsilon": (
        number("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", np.nan)), 2,
        "layer_norm_rms_epsilon is nan"),
    "NaN for a frequency": (
        number("llama.rope.freq_base", struct.pack("<f", np.nan)), 2, "rope.freq_base is nan"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_kind_reaches_a_figure(kind: str, whole: Path, tmp_path: Path) -> None:
    corrupt, code, says = KINDS[kind]
    path = tmp_path / "corrupted.gguf"
    path.write_bytes(whole.read_bytes())
    corrupt(path)
    with pytest.raises(BenchError) as caught:
        model = open_model(path)
        require_passed(
            model, judge_engine(model, EngineToCheck("e", lazily(model), HALF_WEIGHTS), n_tokens=2)
        )
    assert caught.value.exit_code == code
    assert says in str(caught.value) and "\n" not in str(caught.value)


def lazily(model: ModelInfo) -> Any:
    """An engine whose file is read when it is asked, after what the gate looks at first."""
    return lambda prompts, n_tokens: perfect(model)(prompts, n_tokens)


@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "output_norm.weight"])
def test_what_half_precision_cannot_hold_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    """Finite in the file and in float64; an engine in half precision answers with NaN."""
    path = tmp_path / "corrupted.gguf"
    path.write_bytes(whole.read_bytes())
    fill(name, 1e38)(path)

    def engine(prompts: Any, n_tokens: int) -> list[GreedyGeneration]:
        return [GreedyGeneration([0] * n_tokens, np.full((n_tokens, 320), np.nan)) for _ in prompts]

    verdict = judge_engine(open_model(path), EngineToCheck("e", engine, HALF_WEIGHTS), 2)
    assert "640 of 640 logits are not finite; it begins behind " + name in verdict.summary_line()
    assert "half precision ends at 65504" in verdict.summary_line()


def test_no_chance_is_a_log_probability(whole: Path) -> None:
    values = np.zeros((1, 320))
    values[0, 1], values[0, 2] = -np.inf, np.nan
    assert (
        generation_fault(open_model(whole), [GreedyGeneration([0], values, normalized=True)])
        is None
    )
    assert generation_fault(open_model(whole), [GreedyGeneration([0], values)]) is not None


@pytest.mark.parametrize("token", [-1, 320, 10**9])
def test_a_token_that_is_none_is_a_failed_check(whole: Path, token: int) -> None:
    model = open_model(whole)

    def engine(prompts: Any, n_tokens: int) -> list[GreedyGeneration]:
        return [GreedyGeneration([token] * n_tokens, np.zeros((n_tokens, 320))) for _ in prompts]

    verdict = judge_engine(model, EngineToCheck("e", engine, HALF_WEIGHTS), n_tokens=2)
    assert not verdict.passed
    assert verdict.summary_line().startswith(
        f"e: FAILED: token {token} is not among the model's 320; "
    )
    assert verdict.summary_line().endswith("it begins in the engine")


def test_an_engine_that_dies_of_nan_is_a_failed_check(whole: Path, tmp_path: Path) -> None:
    """Of logits that are all NaN some argmax is no token, whose embedding cannot be read."""
    path = tmp_path / "corrupted.gguf"
    path.write_bytes(whole.read_bytes())

    def engine(prompts: Any, n_tokens: int) -> list[GreedyGeneration]:
        raise BenchError("tinygrad: killed by SIGSEGV")

    candidate = EngineToCheck("e", engine, HALF_WEIGHTS)
    with pytest.raises(BenchError, match="SIGSEGV"):
        judge_engine(open_model(path), candidate, n_tokens=2)
    put("token_embd.weight", np.nan)(path)
    verdict = judge_engine(open_model(path), candidate, n_tokens=2)
    says = "it begins in the file: weights not finite in token_embd.weight: 1"
    assert verdict.summary_line() == f"e: FAILED: tinygrad: killed by SIGSEGV; {says}"


@pytest.mark.usefixtures("no_llama_bench", "known_bandwidth")
@pytest.mark.parametrize("kind", ["NaN in a down", "a missing tensor"])
def test_the_command_prints_no_figure(
    kind: str, whole: Path, tmp_path: Path, capsys: Capture
) -> None:
    corrupt, code, says = KINDS[kind]
    path = tmp_path / "corrupted.gguf"
    path.write_bytes(whole.read_bytes())
    corrupt(path)
    flags = ["-m", str(path), "--backend", "tinygrad:CPU", "-p", "8", "-n", "0", "-r", "1"]
    assert orinbench("llama-bench", *flags, "--no-cold-start") == code
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err.splitlines()[-1]


def test_nan_of_llama_cpp_is_a_failed_check(
    whole: Path, fake_llama_server: Path, tmp_path: Path, capsys: Capture
) -> None:
    corrupt, code, says = KINDS["NaN in a down"]
    path = tmp_path / "corrupted.gguf"
    path.write_bytes(whole.read_bytes())
    corrupt(path)
    beside = str(fake_llama_server.with_name("llama-bench"))
    flags = ["-m", str(path), "--backend", "llama.cpp", "--llama-bench", beside, "-n", "2"]
    assert orinbench("check", *flags) == code
    captured = capsys.readouterr()
    assert "llama.cpp: FAILED: " in captured.out and "logits are not finite" in captured.out
    assert says in captured.out
    assert captured.err.splitlines()[-1] == "orinbench: 1 of 1 checks failed"
