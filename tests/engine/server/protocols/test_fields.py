"""Every field of OpenAI's protocol, by OpenAI's own client, against a real model on a CPU."""

import json
import math
import re
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from tests.engine.models import smollm2
from tests.engine.server.conftest import MODEL
from tests.engine.server.live import Live, Started, live, metric
from tests.engine.server.toy import toy

from orinllm.model import ModelDescription

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def words() -> ModelDescription:
    return ModelDescription.read(smollm2(), 512)


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": QUESTION, "temperature": 0, **fields}
    return api.chat.completions.create(**given)


def text(api: openai.OpenAI, **fields: Any) -> str:
    content = ask(api, **fields).choices[0].message.content
    assert isinstance(content, str)
    return content


def complete(api: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    given = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}
    return api.completions.create(**given)


def test_an_answer_and_its_counts(api: openai.OpenAI, words: ModelDescription) -> None:
    answer = ask(api)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert choice.message.role == "assistant"
    assert words.template is not None
    n_prompt, n_said = len(words.template.encode(QUESTION)), len(words.tokenizer.encode(ANSWER))
    assert (usage.prompt_tokens, usage.completion_tokens) == (n_prompt, n_said)
    assert usage.total_tokens == n_prompt + n_said
    again = ask(api).usage
    assert again.prompt_tokens_details.cached_tokens == n_prompt - 1
    fresh = ask(api, extra_body={"cache_prompt": False}).usage
    assert fresh.prompt_tokens_details.cached_tokens == 0


def test_a_stream_says_the_same(api: openai.OpenAI) -> None:
    chunks = list(ask(api, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(said) == ANSWER
    assert len([piece for piece in said if piece]) == 7
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    plain = list(ask(api, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_lengths(api: openai.OpenAI, name: str) -> None:
    choice = ask(api, **{name: 3}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("The capital of", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts(api: openai.OpenAI, stream: bool) -> None:
    """They may lie across tokens, and nothing of them is shown."""
    answer = ask(api, stop=["Berlin", "ance is P"], stream=stream)
    if stream:
        chunks = list(answer)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (said, chunks[-1].choices[0].finish_reason) == ("The capital of Fr", "stop")
    else:
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("The capital of Fr", "stop")
        assert text(api, stop=" of") == "The capital"


def test_a_seed_repeats_and_choices_differ(api: openai.OpenAI) -> None:
    wild = {"temperature": 1.5, "seed": 11, "max_tokens": 8, "top_p": 0.9, "n": 2}
    first, second = ask(api, **wild).choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content != second.message.content
    # The second choice is what the next seed gives alone.
    alone = text(api, **{**wild, "n": 1, "seed": 12})
    assert alone == second.message.content
    again = ask(api, **wild, stream=True)
    streamed = ["", ""]
    for chunk in again:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [first.message.content, second.message.content]
    unseeded = {text(api, **{**wild, "n": 1, "seed": None}) for _ in range(3)}
    assert len(unseeded) > 1


@pytest.mark.parametrize(
    "field", [{"top_p": 0.0001}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1}}]
)
def test_truncation_leaves_the_most_likely(api: openai.OpenAI, field: dict[str, Any]) -> None:
    assert text(api, temperature=2, seed=3, max_tokens=6, **field) == ANSWER[:-1]


def test_logprobs(api: openai.OpenAI, words: ModelDescription) -> None:
    choice = ask(api, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == ANSWER
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert (best.token, best.logprob) == (entry.token, entry.logprob) and best.logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
    streamed = [
        entry
        for chunk in ask(api, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]
    assert streamed[0].top_logprobs == []
    found = complete(api, "The capital of France is", logprobs=2, max_tokens=3).choices[0].logprobs
    best = [top[token] for token, top in zip(found.tokens, found.top_logprobs, strict=True)]
    assert found.token_logprobs == best and len(best) == 3
    assert found.text_offset == [0, len(found.tokens[0]), len("".join(found.tokens[:2]))]


def test_a_token_that_the_file_suppresses_is_in_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(toy()) as server:
        words = server.engine.tokenizer
        asked = {"model": "test", "max_tokens": 1}
        (first,) = words.encode(complete(server.client(), [500], **asked).choices[0].text)
        monkeypatch.setattr(words, "suppressed", frozenset({first}))
        other = complete(server.client(), [500], **asked).choices[0].text
    assert other and words.encode(other) != [first]


def test_logit_bias_and_penalties(api: openai.OpenAI, words: ModelDescription) -> None:
    (paris,) = words.tokenizer.encode(" Paris")
    assert "Paris" not in text(api, logit_bias={str(paris): -100}, max_tokens=12)
    (the,) = words.tokenizer.encode(" the")
    assert text(api, logit_bias={str(the): 100}, max_tokens=4) == " the" * 4
    plain = complete(api, "a a a a a a a a", max_tokens=8).choices[0].text
    for field in (
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"extra_body": {"repeat_penalty": 5}},
    ):
        assert complete(api, "a a a a a a a a", max_tokens=8, **field).choices[0].text != plain


def test_completions(api: openai.OpenAI, words: ModelDescription) -> None:
    prompt = "The capital of France is"
    answer = complete(api, prompt)
    assert answer.choices[0].text.startswith(" Paris")
    ids = words.tokenizer.encode(prompt)
    assert complete(api, ids).choices[0].text == answer.choices[0].text
    assert answer.usage.prompt_tokens == len(ids)
    both = complete(api, [prompt, "One, two, three,"], n=2, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[1].text == prompt + answer.choices[0].text
    assert both.choices[2].text.startswith("One, two, three, four")
    assert both.usage.prompt_tokens == len(ids) + len(words.tokenizer.encode("One, two, three,"))
    streamed = "".join(c.choices[0].text for c in complete(api, prompt, stream=True, echo=True))
    assert streamed == prompt + answer.choices[0].text
    sixteen = api.completions.create(model=MODEL, prompt=prompt, temperature=0)
    assert sixteen.usage is not None and sixteen.usage.completion_tokens == 16


def test_ends_may_be_ignored(api: openai.OpenAI) -> None:
    answer = ask(api, max_tokens=12, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].message.content.startswith(ANSWER)


def test_messages(api: openai.OpenAI) -> None:
    """Parts of text, OpenAI's name for the system, and what its client hands back."""
    first = ask(api).choices[0].message
    history: Any = [
        {"role": "developer", "content": "You answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
        first.model_dump(),
        {"role": "user", "content": "And of Italy?"},
    ]
    answer = ask(api, messages=history, max_tokens=24)
    assert "Rome" in answer.choices[0].message.content
    as_system: Any = [{**history[0], "role": "system"}, *history[1:]]
    assert text(api, messages=as_system, max_tokens=24) == answer.choices[0].message.content


def test_models_tokens_and_health(
    api: openai.OpenAI, smol: Started, words: ModelDescription
) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "orinllm"
    url, sentence = smol.url, "Größe: 3 <|im_end|>"
    tokens = httpx.post(f"{url}/tokenize", json={"content": sentence}).json()
    assert tokens["tokens"] == words.tokenizer.encode(sentence)
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
    back = httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"content": sentence}
    special = httpx.post(f"{url}/tokenize", json={"content": "<|im_end|>", "parse_special": True})
    assert special.json()["count"] == 1
    assert words.template is not None
    chat = httpx.post(f"{url}/tokenize", json={"messages": QUESTION}).json()
    assert chat["tokens"] == words.template.encode(QUESTION)
    assert httpx.get(f"{url}/health").json()["status"] == "ok"


def test_metrics_count(api: openai.OpenAI, smol: Started) -> None:
    names = [
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
        *("phase_seconds_total", "request_success_total"),
    ]
    before = {name: metric(smol.url, f"orinllm_{name}") for name in names}
    usage = ask(api).usage
    after = {name: metric(smol.url, f"orinllm_{name}") - before[name] for name in names}
    assert after.pop("phase_seconds_total") > 0
    assert after == {
        "prompt_tokens_total": usage.prompt_tokens,
        "generation_tokens_total": usage.completion_tokens,
        "prefix_cache_hits_total": usage.prompt_tokens_details.cached_tokens,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": usage.completion_tokens - 1,
        "request_success_total": 1,
    }
    assert metric(smol.url, "orinllm_num_requests_running") == 0


def test_json_mode(api: openai.OpenAI) -> None:
    answer = text(
        api,
        messages=[{"role": "user", "content": 'Say {"capital": "Paris"} as JSON.'}],
        response_format={"type": "json_object"},
        max_tokens=60,
    )
    assert isinstance(json.loads(answer), dict)
    assert text(api, response_format={"type": "text"}) == ANSWER


def refused(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, **fields}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 3}, "temperature", "3 is not from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "a string where a number was expected"),
        ({"temperature": True}, "temperature", "a boolean where a number"),
        ({"top_p": -0.1}, "top_p", "not from 0 to 1"),
        ({"n": 0}, "n", "0 is not from 1 to 128"),
        ({"n": 1.5}, "n", "a number where an integer was expected"),
        ({"max_tokens": 0}, "max_tokens", "0 is not from 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "neither a string"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21 is not from 0 to 20"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
        ({"grammar": "root ::= ("}, "grammar", "no GBNF"),
        (
            {"grammar": 'root ::= "a"', "structured_outputs": {"choice": ["a"]}},
            "grammar",
            "ask for two forms",
        ),
        ({"logit_processors": [1]}, "logit_processors", "not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "token 99999999 is not from 0 to"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "a string where an array was expected"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role", "'boss' is none of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "reads text and pictures only",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml' is none of"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                }
            },
            "response_format",
            "Invalid type: nothing",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"functions": [{"name": "f"}]}, "functions", "was replaced by tools"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    smol: Started, fields: dict[str, Any], param: str, says: str
) -> None:
    raw = json.dumps(refused(fields))
    reply = httpx.post(
        f"{smol.url}/v1/chat/completions", content=raw, headers={"Content-Type": "application/json"}
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


# What only hints: the fields, the name that the header says, and what --strict says of it.
HINTS: Any = [
    ({"stop": ["", "Z"]}, "stop", "none of them empty"),
    ({"stream_options": {}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "not supported",
    ),
    ({"reasoning_effort": "high"}, "reasoning_effort", "knows no 'high'"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort", "none of none, minimal"),
    ({"chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo", "does not read it"),
    ({"store": True}, "store", "stores nothing"),
    ({"metadata": {"a": "b"}}, "metadata", "stores nothing"),
    ({"service_tier": "flex"}, "service_tier", "one tier"),
    ({"verbosity": "low"}, "verbosity", "unknown field"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "unknown field"),
    ({"prompt_cache_key": "k"}, "prompt_cache_key", "unknown field"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "unknown field"),
    ({"safety_identifier": "u"}, "safety_identifier", "unknown field"),
    ({"best_off": 1}, "best_off", "unknown field"),
    ({"Größe\r\nx: 1": 1}, "Gr%C3%B6%C3%9Fe%0D%0Ax:%201", "unknown field"),
    (
        {"messages": [{"role": "user", "content": "Hi", "id": "m1"}]},
        "messages[0].id",
        "unknown field",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
                    ],
                }
            ]
        },
        "messages[0].content[0].cache_control",
        "unknown field",
    ),
    (
        {"tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}]},
        "tools[0].type",
        "only functions",
    ),
]


def post(url: str, fields: dict[str, Any]) -> httpx.Response:
    raw = json.dumps({"max_tokens": 1, **refused(fields)})
    headers = {"Content-Type": JSON}
    return httpx.post(f"{url}/v1/chat/completions", content=raw, headers=headers, timeout=60)


@pytest.mark.parametrize(("fields", "name", "says"), HINTS)
def test_what_only_hints_is_answered_and_named(
    smol: Started, fields: dict[str, Any], name: str, says: str
) -> None:
    reply = post(smol.url, fields)
    assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, name)


@pytest.fixture(scope="module")
def strict() -> Any:
    with live(toy(), strict=True) as server:
        yield server


@pytest.mark.parametrize(("fields", "name", "says"), HINTS)
def test_strict_refuses_what_only_hints(
    strict: Live, fields: dict[str, Any], name: str, says: str
) -> None:
    reply = post(strict.url, {**fields, "model": "test"})
    error = reply.json()["error"]
    assert (reply.status_code, quote(error["param"], safe="[]:")) == (400, name)
    assert says in error["message"]


def test_ignored_fields_are_counted_and_labels_are_few(smol: Started) -> None:
    def counted(name: str) -> float:
        return metric(smol.url, f'orinllm_ignored_fields_total{{field="{name}"}}')

    before = [counted(name) for name in ("store", "cache_control", "other")]
    many = {f"own{i}": 1 for i in range(40)}
    reply = post(smol.url, {**many, "store": True, **HINTS[-2][0]})
    assert reply.headers["x-ignored-fields"].endswith(", 10 more")
    after = [counted(name) for name in ("store", "cache_control", "other")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 40]
    assert "own1" not in httpx.get(f"{smol.url}/metrics").text
    assert "x-ignored-fields" not in post(smol.url, {}).headers


def test_names_of_vllm_and_llama_server(api: openai.OpenAI, words: ModelDescription) -> None:
    assert text(api, extra_body={"repetition_penalty": 1.0, "max_tokens": -1}) == ANSWER
    wanted = complete(api, "a a a a a a a a", extra_body={"repeat_penalty": 5}).choices[0].text
    found = complete(api, "a a a a a a a a", extra_body={"repetition_penalty": 5})
    assert found.choices[0].text == wanted
    longer = ask(api, max_tokens=20, extra_body={"min_tokens": 15}).usage
    assert longer.completion_tokens >= 15
    (of,) = words.tokenizer.encode(" of")
    assert text(api, extra_body={"stop_token_ids": [of]}) == "The capital"
    for more, wanted in (
        ({"structured_outputs": {"choice": ["red", "blue+"]}}, r"red|blue\+"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_regex": "x[ab]"}, "x[ab]"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json": {"enum": [3, 4]}}}, "3|4"),
        ({"json_schema": {"enum": [5, 6]}}, "5|6"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
    ):
        assert re.fullmatch(wanted, text(api, extra_body=more, max_tokens=20)), more
        if "response_format" not in more:
            assert re.fullmatch(wanted, complete(api, "It is", extra_body=more).choices[0].text)


def test_errors_as_the_client_sees_them(api: openai.OpenAI, smol: Started) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' does not exist"):
        ask(api, model="gpt-9")
    with pytest.raises(openai.BadRequestError) as large:
        ask(api, messages=[{"role": "user", "content": "word " * 600}])
    assert large.value.code == "context_length_exceeded"
    assert "512 tokens" in str(large.value) and "has 63" in str(large.value)
    with pytest.raises(openai.BadRequestError, match="token 99999999 is not from"):
        complete(api, [99999999])
    for wrong in ({"suffix": "x"}, {"best_of": 3}):
        with pytest.raises(openai.BadRequestError) as unsupported:
            complete(api, "x", **wrong)
        assert unsupported.value.code == "unsupported_parameter"
    url = smol.url
    broken = httpx.post(f"{url}/v1/completions", content=b"{", headers={"Content-Type": JSON})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx.post(f"{url}/v1/completions", content=b"{}").status_code == 415
    lost = httpx.get(f"{url}/v1/nothing")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "unknown_url")
    wrong_method = httpx.get(f"{url}/v1/chat/completions")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")


JSON = "application/json"
