"""Logarithms of a prompt's tokens: `echo` with `logprobs`, as lm-eval asks for them."""

import json
from typing import Any

import httpx
import pytest
from tests.engine.models import smollm2
from tests.engine.server.conftest import MODEL
from tests.engine.server.live import Started

from orinllm.model import ModelDescription


@pytest.fixture(scope="module")
def words() -> ModelDescription:
    return ModelDescription.read(smollm2(), 512)


def complete(smol: Started, prompt: Any, **fields: Any) -> Any:
    given = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
    return smol.client().completions.create(**given)


def test_logprobs_of_a_prompt(smol: Started, words: ModelDescription) -> None:
    """Each is what the model says of the token behind the tokens before it, which are a prompt."""
    ids = words.tokenizer.encode("The capital of France is Paris.")
    found = complete(smol, ids, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert (found.text, found.finish_reason) == ("The capital of France is Paris.", "length")
    assert found.logprobs.token_logprobs[0] is None and found.logprobs.top_logprobs[0] is None
    for at in range(1, len(ids)):
        bias: Any = {str(ids[at]): 100}
        one = (
            complete(smol, ids[:at], logprobs=1, max_tokens=1, logit_bias=bias).choices[0].logprobs
        )
        assert one.tokens[0] == found.logprobs.tokens[at]
        assert found.logprobs.token_logprobs[at] == pytest.approx(one.token_logprobs[0], abs=0.02)
        assert found.logprobs.top_logprobs[at].keys() == one.top_logprobs[0].keys()


def test_what_lm_eval_asks_for_its_loglikelihoods(smol: Started, words: ModelDescription) -> None:
    """The body of its local-completions model, and how it reads the answer (parse_logprobs)."""
    end = min(words.tokenizer.end_ids)
    texts = [words.tokenizer.encode(t) for t in ("One, two, three, four", "Hello", "Yes. No")]
    prompts = [*texts, [*texts[0], end, *texts[2]]]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    asked = {**body, "seed": 1234, "echo": True}
    reply = httpx.post(f"{smol.url}/v1/completions", json=asked, timeout=60).json()
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(prompt) + 1
        own, top = found["token_logprobs"][1:-1], found["top_logprobs"][1:-1]
        assert len(own) == len(prompt) - 1 and all(value < 0 for value in own)
        assert all(max(best.values()) >= value for value, best in zip(own, top, strict=True))
        text, offsets = choice["text"], found["text_offset"]
        assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)
    first = reply["choices"][0]
    assert first["logprobs"]["tokens"] == ["One", ",", " two", ",", " three", ",", " four", ","]
    assert first["logprobs"]["text_offset"] == [0, 3, 4, 8, 9, 15, 16, 21]
    assert reply["choices"][3]["logprobs"]["token_logprobs"][1:7] == pytest.approx(
        first["logprobs"]["token_logprobs"][1:7], abs=0.02
    )
    ended = {**asked, "prompt": "What is it?", "logit_bias": {str(end): 100}}
    only = httpx.post(f"{smol.url}/v1/completions", json=ended, timeout=60).json()["choices"][0]
    assert len(only["logprobs"]["tokens"]) == 1 + len(words.tokenizer.encode("What is it?"))
    lines = httpx.post(f"{smol.url}/v1/completions", json={**asked, "stream": True}, timeout=60)
    chunks = [json.loads(line[6:]) for line in lines.text.split("\n\n")[:-2]]
    streamed: list[Any] = [[] for _ in prompts]
    for chunk in chunks:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})[
            "token_logprobs"
        ]
    assert [len(values) for values in streamed] == [len(prompt) + 1 for prompt in prompts]
