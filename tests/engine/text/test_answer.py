import json
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.engine.models import tokenizer
from tests.engine.text.answers import (
    CALLS,
    CODER,
    GEMMA,
    GLM,
    GPT_OSS,
    LLAMA,
    NEMO,
    QWEN3,
    QWEN35,
    SMALL,
    TOOLS,
    USER,
    WEATHER,
    joined,
    parsed,
    read,
    template_of,
)

from orinllm.text.answer import AnswerParser, AnswerTokenReader, Delta, StopTextFilter

# -- what a template writes of an answer, the parser reads back ------------------------------------


@pytest.mark.parametrize("stem", [QWEN3, QWEN35, GPT_OSS, GLM, "ByteDance-Seed-OSS"])
def test_reasoning_comes_back_as_the_template_wrote_it(stem: str) -> None:
    template = template_of(stem)
    message = {"role": "assistant", "content": "Cold.", "reasoning_content": "Let me\n\nthink."}
    answered = template.render([USER, message], add_generation_prompt=False)
    text = answered.removeprefix(template.render([USER])).rstrip()
    for end in ("<|im_end|>", "<seed:eos>"):
        text = text.removesuffix(end)
    answer = parsed(stem, text, None)
    assert (answer.content, answer.reasoning) == ("Cold.", "Let me\n\nthink.")


# -- families --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", CALLS)
def test_words_and_two_calls(stem: str) -> None:
    answer = parsed(stem, f"I look it up.\n\n{CALLS[stem]}\n{CALLS[stem]}")
    assert answer == Delta("I look it up.", "", (WEATHER, WEATHER))
    assert len({call.id for call in answer.tool_calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.tool_calls)


@pytest.mark.parametrize("stem", CALLS)
def test_marks_are_words_where_there_are_no_tools(stem: str) -> None:
    assert parsed(stem, f"x {CALLS[stem]} y", None).content == f"x {CALLS[stem]} y"


@pytest.mark.parametrize("stem", CALLS)
@pytest.mark.parametrize("cut", [3, 14, 20, 40])
def test_a_call_that_the_answer_s_end_cut_off_is_not_lost(stem: str, cut: int) -> None:
    text = CALLS[stem][:cut]
    assert parsed(stem, f"x {text}") == Delta(f"x {text}")


def test_the_end_of_an_answer_closes_a_call() -> None:
    text = CALLS[QWEN3].removesuffix("\n</tool_call>")
    assert parsed(QWEN3, text) == Delta("", "", (WEATHER,))


@pytest.mark.parametrize(
    "body",
    ["weather(1)", "{}", '{"name": 3}', '{"name": "weather", "arguments": 3}', "[" * 5000, "{]"],
)
def test_what_is_no_call_is_shown(body: str) -> None:
    text = f"<tool_call>{body}</tool_call> so"
    assert joined(read(QWEN3, text, len(text))) == Delta(text)


@pytest.mark.parametrize(
    ("stem", "text", "arguments"),
    [
        # A closing mark in an argument closes nothing.
        (
            *(QWEN3, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'),
            {"a": "</tool_call>"},
        ),
        # XML's strings are bare, and the rest is JSON.
        (
            CODER,
            "<tool_call><function=weather><parameter=city>\n12\n</parameter><parameter=days>12"
            "</parameter><parameter=why>no json</parameter></function></tool_call>",
            {"city": "12", "days": 12, "why": "no json"},
        ),
        (
            GEMMA,
            '<|tool_call>call:f{a:[1,{b:<|"|>x,}<|"|>}],c:true,d:null,e:-1.5,g:{},h:[]}<tool_call|>',
            {"a": [1, {"b": "x,}"}], "c": True, "d": None, "e": -1.5, "g": {}, "h": []},
        ),
    ],
)
def test_what_arguments_are(stem: str, text: str, arguments: dict[str, Any]) -> None:
    (call,) = parsed(stem, text).tool_calls
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Bern", "days": 2}}', 1),
        (' {"name": "weather", "parameters": {"city": "Bern", "days": 2}}\n', 1),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Bern", "days": 2}}', 1),
        ('{"name": "weather", "parameters": {"city": "Bern", "days": 2}}; ' * 2, 2),
        ('{"name": "other", "parameters": {}}', 0),
        ('{"x": 1}', 0),
        ("{ int i; }", 0),
        ('So: {"name": "weather", "parameters": {}}', 0),
        ("<|python_tag|>print(1)", 0),
    ],
)
def test_llama_s_bare_objects(text: str, calls: int) -> None:
    answer = parsed(LLAMA, text)
    assert answer.tool_calls == (WEATHER,) * calls
    assert calls or answer.content == text


def test_an_answer_that_begins_with_a_brace_is_not_held_back() -> None:
    deltas = read(LLAMA, '{"x": [1, 2, 3], "y": 4}', 1)
    assert "".join(delta.content for delta in deltas[:-2]).startswith('{"x": [1, 2, 3], "y"')


def test_mistral_s_array_of_calls_with_ids() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern", "days": 2}, "id": "x"}]'
    (call,) = parsed(NEMO, text).tool_calls
    assert (call, call.id) == (WEATHER, "x")


# -- reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", Delta("Yes.", "Hm.")),
        ("\n<think>Hm.</think>Yes.\n", Delta("Yes.\n", "Hm.")),
        ("<think>Hm.", Delta("", "Hm.")),
        ("<think>Hm.</thi", Delta("", "Hm.</thi")),
        ("Yes, <think> is a tag.", Delta("Yes, <think> is a tag.")),
        ("<think></think>Yes.", Delta("Yes.")),
        (f"<think>Hm.</think>\n{CALLS[QWEN3]}", Delta("", "Hm.", (WEATHER,))),
        ("  Yes <thin", Delta("  Yes <thin")),
    ],
)
def test_reasoning_at_the_beginning(text: str, want: Delta) -> None:
    assert parsed(QWEN3, text) == want


def test_reasoning_that_the_prompt_opened() -> None:
    text = "Hm.\n</think>\n\nYes."
    assert parsed(QWEN35, text, enable_thinking=True) == Delta("Yes.", "Hm.")
    assert parsed(QWEN35, "Yes.", enable_thinking=False) == Delta("Yes.")


def test_words_stream_as_they_come() -> None:
    deltas = read(QWEN3, "<think>ab</think>cd e", 1)
    assert [delta.reasoning for delta in deltas if delta.reasoning] == ["a", "b"]
    assert [delta.content for delta in deltas if delta.content] == ["c", "d", " e"]


# -- gpt-oss ---------------------------------------------------------------------------------------

_ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
_COMMENTARY = '<|constrain|>json<|message|>{"city": "Bern", "days": 2}'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"{_ANALYSIS}<|channel|>final<|message|>Yes.", Delta("Yes.", "Hm.")),
        (f"{_ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", Delta("Yes.", "Hm.")),
        (
            f"{_ANALYSIS}<|channel|>commentary to=functions.weather {_COMMENTARY}",
            Delta("", "Hm.", (WEATHER,)),
        ),
        (
            f" to=functions.weather<|channel|>commentary {_COMMENTARY}<|call|>",
            Delta("", "", (WEATHER,)),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            f" to=functions.weather {_COMMENTARY}<|call|>",
            Delta("I look.", "", (WEATHER,)),
        ),
        ("Yes.", Delta("Yes.")),
        ("<|channel|>fin", Delta()),
        ("<|channel|>final<|message|>Yes <|", Delta("Yes <|")),
    ],
)
def test_harmony(text: str, want: Delta) -> None:
    assert parsed(GPT_OSS, text) == want


def test_harmony_without_tools_calls_nothing() -> None:
    text = f"<|channel|>commentary to=functions.weather {_COMMENTARY}"
    assert parsed(GPT_OSS, text, None) == Delta('{"city": "Bern", "days": 2}')


# -- nothing is lost -------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<", "think>", "tool_call>", "{", "}", "/", "a", " ", "\n", "[TOOL"])
    ),
    st.sampled_from([LLAMA, QWEN3, CODER, SMALL, GEMMA]),
    st.integers(0, 1000),
)
def test_an_answer_without_marks_is_its_content(parts: list[str], stem: str, seed: int) -> None:
    text = "".join(parts)
    assume("<think>" not in text and "<tool_call>" not in text)
    chance = random.Random(seed)
    parser = AnswerParser.for_template(template_of(stem), TOOLS)
    content, at = "", 0
    while at < len(text):
        size = chance.randint(1, 4)
        delta = parser.push(text[at : at + size])
        assert not delta.reasoning and not delta.tool_calls
        content, at = content + delta.content, at + size
    assert content + parser.flush().content == text


# -- tokens ----------------------------------------------------------------------------------------


def _read_tokens(stem: str, name: str, text: str) -> Delta:
    source = tokenizer(name)
    parser = AnswerParser.for_template(template_of(stem), TOOLS)
    reader = AnswerTokenReader(source, parser)
    deltas = [reader.push(token) for token in source.encode(text, special=True)]
    return joined([*deltas, reader.flush()])


def test_control_tokens_reach_the_parser_that_knows_them_and_no_reader() -> None:
    text = f"Ja.{CALLS[GEMMA]}<|turn>é🦙"
    assert _read_tokens(GEMMA, "gemma-4", text) == Delta("Ja.é🦙", "", (WEATHER,))
    thought = "<|channel>thought\nHm.<channel|>Ja."  # a mark that is a token and a word
    assert _read_tokens(GEMMA, "gemma-4", thought) == Delta("Ja.", "Hm.")
    assert _read_tokens(QWEN3, "qwen2", "<|im_start|>é🦙") == Delta("é🦙")


def test_of_a_character_that_is_cut_nothing_is_shown() -> None:
    source = tokenizer("gpt-2")
    reader = AnswerTokenReader(source, AnswerParser.for_template(template_of(QWEN3)))
    half = source.encode("🦙")[:1]
    assert joined([*(reader.push(token) for token in half), reader.flush()]) == Delta()


def test_a_thought_goes_on_while_it_comes() -> None:
    """A mark that a thought speaks of holds nothing back for longer than its line of words."""
    parser = AnswerParser.for_template(template_of(QWEN35), TOOLS)
    parser.push(f"So {CALLS[CODER]}")
    assert parser.push(" would").reasoning.endswith("</tool_call> would")


def test_an_answer_ends_before_the_first_stop_text_however_it_is_cut() -> None:
    """Of several, of which one begins like another: nothing that becomes one is shown."""
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choices("ab<", k=draw.randrange(1, 12)))
        stops = ["".join(draw.choices("ab<", k=draw.randrange(2, 4))) for _ in range(3)]
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        reader, shown, stopped, left = StopTextFilter(stops), "", False, text
        while left and not stopped:
            n = draw.randrange(1, 3)
            part, stopped = reader.push(left[:n])
            shown, left = shown + part, left[n:]
        shown += "" if stopped else reader.flush()
        assert stopped == bool(ends)
        assert stopped or shown == text
        # Of two that end with one piece the one that begins first; it may be within a longer one.
        assert shown == text[: len(shown)] and all(stop not in shown for stop in stops)
