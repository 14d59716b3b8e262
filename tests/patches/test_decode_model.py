"""0012-0014, 0020, 0022-0025: whole models, against a float64 LLaMA and the general path."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.patches.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
from gguf import GGMLQuantizationType, GGUFReader, LlamaFileType

from orinbench import shapes
from orinbench.model import open_model
from orinbench.reference import Reference
from orinbench.synth import write_synthetic

PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]
# Of a file of Q6_K: a type without a kernel, halves beside int8 in a projection, unlike partners.
MIXED = {"attn_q": "IQ4_XS", "attn_v": "Q8_0", "ffn_up": "Q4_K"}


@pytest.fixture
def load(tmp_path: Path, clang: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Load the tiny model of a quantization on the emulated GPU; also its float64 reference."""
    from tests.patches import cuda_emulation
    from tinygrad import Context

    cuda_emulation.install()
    monkeypatch.setenv("PATH", f"{clang}{os.pathsep}{os.environ['PATH']}")

    def loaded(quant: str, context: int = 128) -> tuple[Any, Reference]:
        from tinygrad.llm.model import Transformer

        path = tmp_path / f"{quant}.gguf"
        write_synthetic(path, "tiny", quant, seed=5)
        return Transformer.from_gguf(path, max_context=context)[0], Reference(open_model(path))

    with Context(DEV="EMU"):
        yield loaded


def logits(model: Any) -> Any:
    out = np.empty(model.fused.logits.size, np.float32)
    model.fused.logits.copyout(out.data.cast("B"))
    return out.astype(np.float64)


def take(model: Any, prompt: list[int], n: int) -> list[int]:
    generator = model.generate(list(prompt))
    return [next(generator) for _ in range(n)]


def test_raw_names_the_bytes_of_every_tensor(tmp_path: Path) -> None:
    from tinygrad import Context
    from tinygrad.llm.gguf import gguf_load

    path = tmp_path / "tiny.gguf"
    write_synthetic(path, "tiny", "Q4_K_M", seed=5)
    whole = path.read_bytes()
    with Context(DEV="CPU"):
        raw = gguf_load(path)[1].raw
    tensors = GGUFReader(path).tensors
    assert len(tensors) == len(raw)
    for tensor in tensors:
        _, offset, typ, dims = raw[tensor.name]
        assert (typ, dims) == (tensor.tensor_type, tuple(tensor.shape))
        assert whole[offset : offset + tensor.n_bytes] == tensor.data.tobytes()


@pytest.mark.parametrize("quant", ["Q6_K", "Q5_K_M", "Q4_K_M", "Q8_0", "F16"])
def test_greedy_tokens_are_those_of_float64(load: Any, quant: str) -> None:
    """Every token is float64's, or its logit is within the measured error of the largest one."""
    model, reference = load(quant)
    tokens = PROMPT[:5]
    generator = model.generate(tokens)
    for _ in range(12):
        before = list(tokens)
        token = next(generator)
        want, got = reference.logits(before)[-1], logits(model)
        error = np.abs(got - want).max()
        # int8 activations cost 0.5 % a matrix; F16 weights meet halves
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < (
            0.004 if quant == "F16" else 0.04
        )
        assert token == got.argmax()
        assert want.max() - want[token] <= 2 * error
        assert tokens == [*before, token]


def test_a_chunk_leaves_what_its_tokens_leave(load: Any) -> None:
    model, reference = load("Q6_K")
    caches = [block.cache_kv.uop.base.buffer for block in model.blk]

    def state(prefill: Any) -> tuple[Any, list[Any]]:
        model.fused.prefill, model._cached_tokens = prefill, []
        take(model, PROMPT, 1)
        kept = []
        for cache in caches:
            dtype = {2: np.float16, 4: np.float32}[cache.dtype.itemsize]  # 0011 halves it
            out = np.empty(cache.size, dtype)
            cache.copyout(out.data.cast("B"))
            shape = (2, 2, 128, 64)
            kept.append(out.reshape(shape)[:, :, : len(PROMPT)].astype(np.float64))
        return logits(model), kept

    assert model.fused.prefill is not None
    want = reference.logits(PROMPT)[-1]
    chunk, tokens = state(model.fused.prefill), state(None)
    for one, other in zip(chunk[1], tokens[1], strict=True):
        assert np.linalg.norm(one - other) / np.linalg.norm(other) < 0.02
    errors = [np.linalg.norm(x - want) / np.linalg.norm(want) for x in (chunk[0], tokens[0])]
    assert errors[0] < 0.02  # the last token alone has int8 activations
    assert errors[1] < 0.04


def test_a_prompt_that_continues_reuses_the_cache(load: Any) -> None:
    model, _ = load("Q8_0")
    first = take(model, PROMPT[:20], 3)
    longer = [*PROMPT[:20], *first, *PROMPT[20:33]]
    assert model.get_start_pos(longer) == 22
    again = take(model, longer, 3)
    model._cached_tokens = []
    assert take(model, longer, 3) == again


def test_generation_ends_with_the_context(load: Any) -> None:
    model, _ = load("Q8_0", 32)
    tokens = PROMPT[:29]
    assert len(list(model.generate(tokens))) == 3
    assert len(tokens) == 32
    assert list(model.generate(PROMPT[:32])) == list(model.generate(PROMPT[:40])) == []


def test_greedy_tokens_are_those_of_the_general_path(load: Any) -> None:
    model, _ = load("Q6_K")
    fused = take(model, PROMPT[:9], 6)
    model.fused, model._cached_tokens = None, []
    assert take(model, PROMPT[:9], 6) == fused


@pytest.mark.parametrize("batch", [2, 4])
def test_a_batch_is_its_sequences(load: Any, batch: int) -> None:
    """A prompt of each, then tokens: float64's, or within the error as above."""
    from tinygrad import Tensor

    model, reference = load("Q6_K")
    zero = Tensor(0.0).contiguous()
    alone = take(model, PROMPT[:9], 3)
    rows = [[(t * (i + 3) + i) % 1000 for t in PROMPT[:33]] for i in range(batch)]
    out, pos = model(Tensor(rows, dtype="int32"), 0, zero), 0
    for _ in range(3):
        assert model.fused is not None
        assert model.fused.batch == batch
        pos = len(rows[0])
        got = logits(model).reshape(batch, -1)
        for i, token in enumerate(out.tolist()):
            want = reference.logits(rows[i])[-1]
            assert np.linalg.norm(got[i] - want) / np.linalg.norm(want) < 0.04
            assert token == [got[i].argmax()]
            assert want.max() - want[token[0]] <= 2 * np.abs(got[i] - want).max()
            rows[i].append(token[0])
        out = model(out, pos, zero)
    assert take(model, PROMPT[:9], 3) == alone  # one sequence again


def test_a_large_batch_takes_the_general_path(
    load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinygrad import Context, Tensor

    model, reference = load("F16", 32)
    rows = [[3 + i, 50 * i, 9] for i in range(5)]
    with Context(DEBUG=1):
        out = model(Tensor(rows, dtype="int32"), 0, Tensor(0.0).contiguous()).tolist()
    assert model.fused is None
    assert "general path, batch: 5 sequences, and the kernels take 4 at most" in (
        capsys.readouterr().out
    )
    for row, token in zip(rows, out, strict=True):
        want = reference.logits(row)[-1]
        assert want.max() - want[token[0]] <= 0.01 * want.std()


def test_temperature_samples(load: Any) -> None:
    model, _ = load("Q8_0")
    generator = model.generate(PROMPT[:4], temperature=30.0)
    drawn = [next(generator) for _ in range(6)]
    assert all(0 <= token < model.fused.logits.size for token in drawn)
    assert drawn != take(model, PROMPT[:4], 6)  # at this temperature


def test_debug_says_the_path_of_each_tensor(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinygrad import Context

    with Context(DEBUG=1):
        assert load("Q6_K")[0].fused is not None
        out = capsys.readouterr().out
        assert "llm: blk.0.attn_q.weight Q6_K 256x256: fused kernels" in out
        monkeypatch.setattr("tinygrad.llm.kernels.nv.COPIES", 0, raising=False)
        assert load("IQ4_XS")[0].fused is None
        out = capsys.readouterr().out
    assert (
        "llm: blk.1.ffn_up.weight GGML type 23 256x512: general path, no kernel for its type" in out
    )
    assert "llm: blk.0.attn_norm.weight GGML type 0 256: general path, " in out


def test_a_mixed_file_stays_on_the_kernels(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In chunks and one by one, float64's logits within the error."""
    from tinygrad import Context
    from tinygrad.llm.kernels import nv

    def type_of(name: str, _: shapes.Shape) -> GGMLQuantizationType:
        return GGMLQuantizationType[MIXED.get(name.split(".")[-2], "Q6_K")]

    mixture = shapes.Quant(LlamaFileType.MOSTLY_Q6_K, type_of)
    monkeypatch.setitem(shapes.QUANTS, "mixed", mixture)
    with Context(DEBUG=1):
        model, reference = load("mixed")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("llm: ")]
    assert [line for line in said if "copy" in line][:3] == [
        "llm: blk.0.attn_q.weight GGML type 23 256x256: fused kernels on a copy of 0.1 MB,"
        " no kernel for its type",
        "llm: blk.0.ffn_gate.weight Q6_K 256x512: fused kernels on a copy of 0.3 MB,"
        " gate and up share a launch and their type",
        "llm: blk.0.ffn_up.weight Q4_K 256x512: fused kernels on a copy of 0.3 MB,"
        " gate and up share a launch and their type",
    ]
    assert all(": fused kernels" in line for line in said)
    assert nv.copied(model.attach.args[2]) == {}  # kernels of another batch make no copies anew
    for tokens in (PROMPT, PROMPT[:5]):
        (token,) = take(model, tokens, 1)
        want, got = reference.logits(tokens)[-1], logits(model)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.04
        assert token == got.argmax()
        assert want.max() - want[token] <= 2 * np.abs(got - want).max()

    monkeypatch.setattr(nv, "COPIES", 0)
    with Context(DEBUG=1):
        assert load("mixed")[0].fused is None
    assert "memory: F16 copies would take 1.3 MB, more than the " in capsys.readouterr().out


def test_a_model_of_bf16_needs_no_copies(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tinygrad import Context

    with Context(DEBUG=1):
        model, reference = load("BF16")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("llm: ")]
    assert "llm: blk.0.attn_q.weight BF16 256x256: fused kernels" in said
    assert not [line for line in said if "copy" in line]
    assert take(model, PROMPT, 1) == [logits(model).argmax()]
    want = reference.logits(PROMPT)[-1]
    assert np.linalg.norm(logits(model) - want) / np.linalg.norm(want) < 0.004


def test_other_devices_keep_the_general_path(tmp_path: Path) -> None:
    from tinygrad import Context
    from tinygrad.llm.model import Transformer

    path = tmp_path / "tiny.gguf"
    write_synthetic(path, "tiny", "Q6_K", seed=5)
    with Context(DEV="CPU"):
        assert Transformer.from_gguf(path, max_context=32)[0].fused is None
