"""Texts of a wanted number of tokens, in real vocabularies and a synthetic one."""

from pathlib import Path

import pytest
from tests.benchmarks.gguf_files import write_sparse
from tests.benchmarks.orinbench_command import Patch

from orinbench.measure.backends.backend import BackendError, CaseLeftOutError
from orinbench.measure.backends.llama_cpp import LlamaCppBackend
from orinbench.measure.backends.llama_server import llama_server_arguments
from orinbench.measure.plan import CONTEXT_STEP, Case, Lane
from orinbench.measure.prompt_text import random_prompt_text, tokenize_prompt, tokenizer_of
from orinbench.synth.shapes import SHAPES

SMOLLM2 = Path(__file__).parents[3] / ".venv/SmolLM2-135M-Instruct.Q4_1.gguf"
CASE = Case(CONTEXT_STEP, 0, 0, text=True)  # fills the context that is made for its tokens


@pytest.mark.parametrize("n_tokens", [2, 7, 512])
def test_a_text_has_as_many_tokens_as_asked(tiny_path: Path, n_tokens: int) -> None:
    for path in (tiny_path, SMOLLM2):
        texts = [random_prompt_text(path, n_tokens, seed) for seed in (0, 0, 1)]
        assert [len(tokenize_prompt(tokenizer_of(path), text)) for text in texts] == [n_tokens] * 3
        assert texts[0] == texts[1]
        assert n_tokens < 7 or texts[1] != texts[2]


def test_a_text_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(CaseLeftOutError, match="no text has 0 tokens in this vocabulary"):
        random_prompt_text(SMOLLM2, 0, 0)
    with pytest.raises(CaseLeftOutError, match=r"tokenizer\.ggml"):
        random_prompt_text(write_sparse(tmp_path / "bare.gguf", SHAPES["tiny"]), 8, 0)


def llama(binary: Path, model: Path) -> LlamaCppBackend:
    return LlamaCppBackend(binary, Lane("llama.cpp", (CASE,), model), 60)


def test_llama_cpp_answers_a_text_through_its_server(
    fake_llama_bench: Path, fake_llama_server: Path, tiny_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SECONDS", "0.1")
    backend = llama(fake_llama_bench, tiny_path)
    assert backend.warm_up(CASE) is None
    sample = backend.time_repetition(CASE, 0)
    assert sample.ns > 1e8 and sample.extra["http_ms"] > 0
    monkeypatch.setenv("FAKE_LLAMA_SERVER", "miscounts")
    with pytest.raises(BackendError, match="made 257 tokens of a text of 256"):
        backend.time_repetition(CASE, 0)
    monkeypatch.setenv("FAKE_LLAMA_SERVER", "dies")
    with pytest.raises(BackendError, match="llama-server: ended with status 1: error: cannot"):
        backend.time_repetition(CASE, 0)


def test_without_a_server_the_row_is_left_out(
    fake_llama_bench: Path, tiny_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CaseLeftOutError, match="no llama-server beside llama-bench or on PATH"):
        llama(fake_llama_bench, tiny_path).warm_up(CASE)


def test_settings_in_llama_servers_words() -> None:
    settings = (
        *(("n_ubatch", 64), ("flash_attn", "1"), ("no_kv_offload", 1), ("use_mmap", 0)),
        *(("repack", 1), ("tensor_split", "3/1"), ("n_gpu_layers", 99)),
    )
    words = "-ub 64 -fa on --no-kv-offload --no-mmap -ts 3,1 -ngl 99"
    assert llama_server_arguments(settings) == words.split()
    with pytest.raises(CaseLeftOutError, match="llama-server has no -embd"):
        llama_server_arguments((("embeddings", 1),))
