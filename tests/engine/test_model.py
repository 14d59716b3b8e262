"""`Model.load(path).generate(...)`: a real model and synthetic ones, on a CPU."""

import gc
import itertools
import os
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.conftest import Synthetic
from tests.engine.models import smollm2
from tinygrad.helpers import Context

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinllm.batching.cache import SlotStore
from orinllm.choose.sampling import DrawnTokens, Sampling
from orinllm.errors import BadInput, DeviceFault
from orinllm.loader import make_page_store
from orinllm.model import Generation, Model, ModelDescription
from orinllm.text.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smol() -> Model:
    return Model.load(smollm2(), device="CPU", context=512)


def fresh(model: Model) -> None:
    """Let the model forget what it knows."""
    model._scheduler.store = make_page_store(model.runner, model.description.network)


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


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"stop": ["a", ""]}, "stop: an empty text"),
        ({"stop": ["a", 5]}, "stop: a text or several were expected, not int"),
        ({"stop": 5}, "stop: a text or several were expected, not int"),
        ({"max_tokens": 0}, "max_tokens: 0 was given; 1 or more"),
        ({"max_tokens": "3"}, "max_tokens: '3' was given; 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 was given; 1 or more"),
    ],
)
def test_what_ends_an_answer_is_checked(smol: Model, asked: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        smol.generate(QUESTION, GREEDY, **asked)


def test_an_answer_whose_text_cannot_be_read_ends(
    smol: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is told, and nobody else's answer ends."""
    said = list[str]()

    def read(answer: Generation) -> None:
        try:
            said.append(answer.text)
        except RuntimeError as error:
            said.append(str(error))

    with monkeypatch.context() as patch:
        patch.setattr("orinllm.model.StopTextFilter.push", lambda self, text: 1 // 0)
        reader = threading.Thread(target=read, args=(smol.generate(QUESTION),), daemon=True)
        reader.start()
        reader.join(60)
    assert said == [
        "the answer could not be read: ZeroDivisionError: integer division or modulo by zero"
    ]
    assert smol.generate(QUESTION, GREEDY, max_tokens=3).text == "The capital of"


def test_a_token_that_the_file_suppresses(smol: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp (common/sampling.cpp), which leaves ids beyond the vocabulary out, too."""
    key = {"tokenizer.ggml.suppress_tokens": [*smol.tokenizer.encode(" Paris"), 99999, -1]}
    tokenizer = Tokenizer.from_metadata({**smol.description.network.gguf.metadata, **key})
    monkeypatch.setattr(smol, "tokenizer", tokenizer)
    for bias in ({}, {42: 1.0}):
        how = Sampling(temperature=0, logit_bias=bias)
        assert "Paris" not in smol.generate(QUESTION, how, max_tokens=12).text


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


def test_answers_that_are_asked_for_together(smol: Model) -> None:
    """One that is read later was computed meanwhile; one that nobody has any more is not."""
    fresh(smol)
    first, second = smol.generate(QUESTION, GREEDY), smol.generate("Once upon", GREEDY)
    pieces = iter(first)
    early = next(pieces).text
    del second
    gc.collect()
    late = smol.generate(QUESTION, GREEDY)
    assert smol.generate("Twice upon a time", GREEDY, max_tokens=2).text
    assert late.text == early + first.text == "The capital of France is Paris."


def test_many_threads_ask_one_model(smol: Model) -> None:
    """Every call is answered or refused; a text is the one that each gives alone."""
    sampling = [GREEDY, Sampling(seed=4), Sampling(temperature=1.5, seed=2)]
    want = [smol.generate(QUESTION, how, max_tokens=6).text for how in sampling]

    def ask(n: int) -> str:
        if n % 5 == 4:
            with pytest.raises(BadInput):
                smol.generate([n, -1])
            return ""
        said = smol.generate(QUESTION, sampling[n % 3], max_tokens=6)
        if n % 7 == 6:
            next(iter(said))
            said.cancel()
            return ""
        return said.text

    with ThreadPoolExecutor(16) as pool:
        for n, text in enumerate(pool.map(ask, range(48))):
            assert text in ("", want[n % 3])


def test_a_refusal_waits_for_no_answer(smol: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    collect, held, go = smol.runner.wait_for_tokens, threading.Event(), threading.Event()

    def late() -> Any:
        held.set()
        go.wait(60)
        return collect()

    monkeypatch.setattr(smol.runner, "wait_for_tokens", late)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: smol.generate(QUESTION, GREEDY, max_tokens=2).text)
        assert held.wait(60)
        with pytest.raises(BadInput):
            smol.generate([1, -1])
        assert not other.done()
        go.set()
        assert other.result()


def test_a_model_that_is_closed(smol: Model) -> None:
    """Answers under way end, and later calls are refused."""
    other = Model(smol.description, smol.plan, smol.runner, SlotStore(1, 512))
    said = other.generate(QUESTION, GREEDY)
    next(iter(said))
    other.close()
    assert len(list(said)) <= 10
    assert said.finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="the model was closed"):
        other.generate(QUESTION)


def test_a_device_that_fails_ends_every_answer(
    smol: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait, too, and those that come later."""
    other = Model(smol.description, smol.plan, smol.runner, SlotStore(1, 512))

    asked = threading.Event()

    def fails() -> None:
        assert asked.wait(60)
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(smol.runner, "wait_for_tokens", fails)
    answers = [other.generate(QUESTION, GREEDY) for _ in range(3)]
    asked.set()
    for answer in answers:
        with pytest.raises(DeviceFault, match=r"^CPU: failed: an illegal memory access"):
            answer.text  # noqa: B018
    with pytest.raises(DeviceFault, match=r"^CPU: failed: an illegal memory access"):
        other.generate(QUESTION)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([5, *QUESTION], "has a message at 1, among tokens"),
        ([*QUESTION, 5], "has a int at 1, among messages"),
        ([5, 6.0], "has a float at 1"),
        ([5, "x"], "has a str at 1"),
        (np.ones((2, 2), np.int64), "has a ndarray at 0"),
        (np.ones(2), "has a float64 at 0"),
        (b"text", "is of type bytes"),
        (bytearray(b"text"), "is of type bytearray"),
        (memoryview(b"text"), "is of type memoryview"),
        ({5, 6}, "is of type set"),
        ([5, True], "has a bool at 1"),
        (QUESTION[0], "is of type dict"),
        (None, "is of type NoneType"),
        (np.int64(5), "is of type int64"),
        (np.array(5), "is of type ndarray"),
    ],
)
def test_prompts_that_are_none(smol: Model, prompt: Any, says: str) -> None:
    with pytest.raises(BadInput, match=f"^the prompt {says}.*; a text, a list or an array of tok"):
        smol.generate(prompt)


class NeverComplete:
    """A constraint that does not say when an answer is complete."""

    def allowed_mask(self) -> None: ...

    def take_token(self, token: int) -> None: ...


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampling": "greedy"}, "sampling: a str; a Sampling was expected"),
        ({"constraint": "json"}, "constraint: a str; one of text/grammar.py was"),
        (
            {"constraint": NeverComplete()},
            "constraint: a NeverComplete; one of text/grammar.py was",
        ),
        ({"max_tokens": np.int64(0)}, "max_tokens: .*0.* was given"),
    ],
)
def test_what_else_is_none(smol: Model, given: dict[str, Any], says: str) -> None:
    """It never comes to the thread that serves all, which would end with it."""
    with pytest.raises(BadInput, match=f"^{says}"):
        smol.generate([5], **given)
    two: Any = np.int64(2)
    assert len(list(smol.generate([5], GREEDY, max_tokens=two))) == 2


def test_an_array_of_tokens(smol: Model) -> None:
    ids = smol.encode(QUESTION)
    for kind in (np.int32, np.uint16):
        assert smol.encode(np.array(ids, kind)) == ids
    assert smol.encode(iter(ids)) == ids


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
    """Copy a file's beginning with one text made another of the same length; weights are zeros."""
    with source.open("rb") as file:
        content = bytearray(file.read(4 << 20))
    start = content.index(key.encode()) + len(key) + 4 + 8  # the value's type and length
    (size,) = struct.unpack_from("<Q", content, start - 8)
    content[start : start + size] = value.encode().ljust(size)
    target.write_bytes(content)
    os.truncate(target, source.stat().st_size)
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
        template = ModelDescription.read(path, 64).template
        assert template is not None
        template.encode([{"role": "user", "content": "x"}])
    assert re.search(says, str(found.value))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("free", "says"),
    [(220_000_000, "0.2 GB that CPU has free: 5312 tokens fit"), (90_000_000, "not even its wei")],
)
def test_a_context_larger_than_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, says: str
) -> None:
    """On a CPU the weights lie as in the file: 96.5 MB."""
    monkeypatch.setattr("orinllm.loader.free_memory_bytes", lambda device: free)
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
    plain = Model(smol.description, smol.plan, smol.runner, SlotStore(1, 512))
    plain.template = None
    with pytest.raises(BadInput, match="has no chat template; it continues text"):
        plain.encode(QUESTION)


def test_logits_that_are_no_numbers(smol: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smol.runner, "wait_for_tokens", lambda: [DrawnTokens(-1)])
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(BadInput, match="its logits are no numbers"):
            next(iter(smol.generate(QUESTION, sampling)))
    fresh(smol)
