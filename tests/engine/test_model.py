"""`Model.load(path).generate(...)`: a real model and synthetic ones, on a CPU."""

import itertools
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.engine.models import smollm2
from tinygrad.helpers import Context

from orinbench.model import open_model
from orinbench.reference import Reference
from orinllm.errors import BadInput
from orinllm.model import Model
from orinllm.sampling import Sampling

GREEDY = Sampling(temperature=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
Synthetic = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def smol() -> Model:
    return Model.load(smollm2(), device="CPU", context=512)


def fresh(model: Model) -> None:
    """Let the model forget what it knows."""
    model.begin(None, [-1])


def test_a_real_model_says_what_the_reference_says(smol: Model) -> None:
    """Greedy tokens are the float64 reference's, and make a sentence."""
    ids = smol.encode(QUESTION)
    answer = smol.generate(QUESTION, GREEDY)
    text = answer.text
    assert text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    logits = Reference(open_model(smollm2())).logits([*ids, *answer.tokens], len(answer.tokens) + 1)
    best = list(map(int, np.argmax(logits, axis=1)))
    assert best[:-1] == answer.tokens
    assert best[-1] in smol.tokenizer.end_ids


def test_a_seed_gives_the_same_text_whatever_ran_before(smol: Model) -> None:
    def text(seed: int) -> str:
        return smol.generate(QUESTION, Sampling(seed=seed, temperature=1.5), max_tokens=12).text

    first = text(1)
    assert text(2) != first
    fresh(smol)
    assert text(1) == first


def test_a_known_beginning_is_not_computed_again(smol: Model) -> None:
    fresh(smol)
    first = smol.generate(QUESTION, GREEDY)
    text = first.text
    assert first.n_cached == 0
    again = smol.generate(QUESTION, GREEDY)
    assert again.text == text
    assert again.n_cached == again.n_prompt - 1
    more = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    longer = smol.generate(more, GREEDY, max_tokens=8)
    reused = longer.text
    assert longer.n_cached >= first.n_prompt
    fresh(smol)
    assert smol.generate(more, GREEDY, max_tokens=8).text == reused


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        (["France"], "The capital of "),
        (["l of Fr"], "The capita"),
        (["Berlin", "is P"], "The capital of France "),
        (["of Spain"], "The capital of France is Paris."),
        ("l of Fr", "The capita"),
        (["The"], ""),
        (["Paris.!"], "The capital of France is Paris."),
        ("France", "The capital of "),
    ],
)
def test_stop_texts_may_lie_across_tokens(smol: Model, stop: str | list[str], want: str) -> None:
    answer = smol.generate(QUESTION, GREEDY, stop=stop)
    seen = ""
    for piece in answer:
        seen += piece.text
        assert want.startswith(seen), "more was shown than the answer has"
    assert seen == want
    assert answer.finish_reason == "stop"


def test_an_empty_stop_text_is_none(smol: Model) -> None:
    with pytest.raises(BadInput, match="stop: an empty text"):
        smol.generate(QUESTION, GREEDY, stop=["a", ""])


def test_max_tokens(smol: Model) -> None:
    answer = smol.generate(QUESTION, GREEDY, max_tokens=3)
    assert answer.text == "The capital of"
    assert (len(answer.tokens), answer.finish_reason) == (3, "length")


def test_pieces_join_to_what_the_tokens_say(smol: Model) -> None:
    """Characters of several tokens are held back, and no token is counted that is none."""
    wild = Sampling(temperature=20.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    answer = smol.generate("Zeichen: é 漢字 🙂", wild, max_tokens=40)
    text = answer.text
    assert text == smol.tokenizer.decode(answer.tokens)
    assert min(answer.tokens) >= 0


def test_cancel_ends_at_the_next_piece(smol: Model) -> None:
    answer = smol.generate(QUESTION, GREEDY)
    pieces = iter(answer)
    first = next(pieces)
    answer.cancel()
    assert list(pieces) == []
    assert answer.tokens == [first.token]
    assert answer.finish_reason == "cancelled"
    assert smol.generate(QUESTION, GREEDY).text == "The capital of France is Paris."


def test_one_answer_at_a_time(smol: Model) -> None:
    """An answer begun first cannot go on with another's keys and values."""
    fresh(smol)
    first, second = smol.generate(QUESTION, GREEDY), smol.generate("Once upon", GREEDY)
    pieces = iter(first)
    next(pieces)
    next(iter(second))
    with pytest.raises(BadInput, match="another answer of this model began"):
        next(pieces)
    # Begun later than made: what is known is looked up then.
    late = smol.generate(QUESTION, GREEDY)
    assert smol.generate("Twice upon a time", GREEDY, max_tokens=2).text
    assert late.text == "The capital of France is Paris."


def test_the_context_ends_an_answer(smol: Model, synthetic: Synthetic) -> None:
    tiny = Model.load(synthetic("tiny", "F16"), device="CPU", context=16)
    prompt = list(range(10, 22))
    answer = tiny.generate(prompt, GREEDY)
    assert answer.text is not None
    if answer.finish_reason == "length":
        assert len(answer.tokens) == 16 - len(prompt)
    assert len(list(itertools.islice(tiny.generate(prompt[:15], Sampling(seed=2)), 9))) <= 4
    with pytest.raises(BadInput, match="the prompt has 16 tokens and leaves no room"):
        tiny.generate(list(range(16)))
    with pytest.raises(BadInput, match="the prompt is empty"):
        tiny.generate([])


def test_two_models_in_one_process(smol: Model, synthetic: Synthetic) -> None:
    other = Model.load(synthetic("tiny-qwen3", "Q8_0"), device="CPU", context=64)
    alone = other.generate([5, 6, 7], GREEDY, max_tokens=8)
    want = (smol.generate(QUESTION, GREEDY).text, alone.text, alone.tokens)
    fresh(smol)
    fresh(other)
    one = smol.generate(QUESTION, GREEDY)
    two = other.generate([5, 6, 7], GREEDY, max_tokens=8)
    texts = ["", ""]
    for pair in itertools.zip_longest(one, two):
        for index, piece in enumerate(pair):
            texts[index] += piece.text if piece else ""
    assert (texts[0], texts[1], two.tokens) == want


def changed(source: Path, target: Path, key: str, value: str) -> Path:
    """Copy a file with one text of its metadata made another of the same length."""
    shutil.copy(source, target)
    reader = gguf.GGUFReader(target, "r+")
    field = reader.fields[key]
    old = bytes(field.parts[field.data[0]])
    field.parts[field.data[0]][:] = np.frombuffer(value.encode().ljust(len(old)), np.uint8)
    reader.data.flush()
    return target


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", "lama", r"architecture 'lama ?' is not supported; supported are"),
        ("tokenizer.ggml.model", "xxx", "tokenizer"),
        ("tokenizer.chat_template", "{% if %}", "template"),
        ("tokenizer.chat_template", "{{ raise_exception('no') }}", "no"),
    ],
)
def test_bad_metadata_is_one_line(tmp_path: Path, key: str, value: str, says: str) -> None:
    path = changed(smollm2(), tmp_path / "bad.gguf", key, value)
    with pytest.raises(BadInput) as found:
        Model.load(path, device="CPU", context=64).encode([{"role": "user", "content": "x"}])
    assert re.search(says, str(found.value))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("free", "says"),
    [(320_000_000, "0.3 GB that CPU has free: 6720 tokens fit"), (150_000_000, "not even its wei")],
)
def test_a_context_larger_than_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, says: str
) -> None:
    """On a CPU the weights are bytes and scales: 165 MB."""
    monkeypatch.setattr("orinllm.network.free_memory", lambda device: free)
    with pytest.raises(BadInput, match=says):
        Model.load(smollm2(), device="CPU", context=8192)


@pytest.mark.parametrize("token", [-1, 49152, 10**9])
def test_tokens_that_the_model_does_not_know(smol: Model, token: int) -> None:
    says = f"the prompt has a token {token}, which is not from 0 to 49151"
    with pytest.raises(BadInput, match=says):
        smol.generate([1, token, 2])


def test_more_words_than_rows(tmp_path: Path) -> None:
    """A token's row would be read behind the table."""
    path, rows = tmp_path / "short.gguf", 40_000
    path.write_bytes(smollm2().read_bytes())
    whole = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    at = whole.index(name) + len(name) + struct.calcsize("<IQ")
    assert struct.unpack_from("<Q", whole, at) == (49152,)
    struct.pack_into("<Q", whole, at, rows)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="its vocabulary has 49152 tokens and its matrices 40000 ro"):
        Model.load(path, device="CPU", context=64)


def test_a_device_that_does_not_open_says_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVDevice:
        def __init__(self, name: str) -> None:
            raise ExceptionGroup("none", [RuntimeError("no nvgpu"), OSError("no nvidiactl")])

    monkeypatch.setattr("tinygrad.runtime.ops_nv.NVDevice", NVDevice)
    why = "does not open: no nvgpu; no nvidiactl; CPU always"
    with pytest.raises(BadInput, match=f"^--device NV:77: {why}"):
        Model.load(smollm2(), device="NV:77")
    monkeypatch.setenv("DEV", "NV")
    with Context(DEV="NV"), pytest.raises(BadInput, match=f"^DEV=NV: {why}"):
        Model.load(smollm2())


def test_a_model_without_a_template_takes_no_messages(smol: Model) -> None:
    plain = Model(smol.header, smol.plan, smol.executor)
    plain.template = None
    with pytest.raises(BadInput, match="has no chat template; it continues text"):
        plain.encode(QUESTION)


def test_logits_that_are_no_numbers(smol: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smol.executor, "token", lambda: -1)
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(BadInput, match="its logits are no numbers"):
            next(iter(smol.generate(QUESTION, sampling)))
    fresh(smol)
