import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.engine.models import LLAMA_CPP, templates, tokenizer

from orinllm.text.answer import AnswerParser, AnswerReader, Delta, StopTexts
from orinllm.text.template import ChatTemplate
from orinllm.text.tools import ToolCall

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
_USER = {"role": "user", "content": "Hi"}
_ARGUMENTS = {"city": "Zürich </x> {1}", "days": 2, "more": [{"a": None}, True, 1.5]}
_WEATHER = ToolCall("weather", '{"city": "Bern", "days": 2}')

# A template of each family, by llama.cpp's name of its file.
_LLAMA = "meta-llama-Llama-3.1-8B-Instruct"
_HERMES = "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
_QWEN3, _QWEN35, _CODER = "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder"
_NEMO, _SMALL = "mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"
_GEMMA, _GPT_OSS, _GLM = "google-gemma-4-31B-it", "openai-gpt-oss-120b", "GLM-4.6"


@functools.cache
def _template(stem: str) -> ChatTemplate:
    path = LLAMA_CPP / "templates" / f"{stem}.jinja"
    return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer("gpt-2"))


def _sum(deltas: list[Delta]) -> Delta:
    return functools.reduce(Delta.__add__, deltas)


def _read(stem: str, text: str, size: int, tools: Any = _TOOLS, **variables: Any) -> list[Delta]:
    """Give the text to a parser in pieces of `size` characters."""
    parser = AnswerParser.for_template(_template(stem), tools, **variables)
    deltas = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    return [*deltas, parser.flush()]


def _parsed(stem: str, text: str, tools: Any = _TOOLS, **variables: Any) -> Delta:
    """Return what an answer is; it is the same however the answer is cut into pieces."""
    whole = _sum(_read(stem, text, len(text) or 1, tools, **variables))
    for size in (1, 2, 3, 5, 11):
        assert _sum(_read(stem, text, size, tools, **variables)) == whole
    return whole


# -- what a template writes of an answer, the parser reads back ------------------------------------


def _written(stem: str, message: dict[str, Any], tools: Any) -> str:
    """Return the answer's text as the model's own template writes it into a history."""
    template = _template(stem)
    asked = template.render([_USER], tools=tools)
    answered = template.render([_USER, message], tools=tools, add_generation_prompt=False)
    if not answered.startswith(asked):  # this prompt says that there is no reasoning
        asked = asked.removesuffix("<|channel>thought\n<channel|>")
    assert answered.startswith(asked)
    text = answered[len(asked) :].rstrip()
    ends = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|tool_response>", "<|call|>")
    for end in (*ends, "<|end_of_text|>", "<seed:eos>"):
        text = text.removesuffix(end)
    return text


@pytest.mark.parametrize(
    "stem",
    [
        *(_LLAMA, "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
        *("Qwen-Qwen2.5-7B-Instruct", _QWEN3, _QWEN35, _CODER, _HERMES),
        *("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "ibm-granite-granite-4.0", _GLM),
        *(_NEMO, _SMALL, "mistralai-Ministral-3-14B-Reasoning-2512", _GEMMA, _GPT_OSS),
        *("LFM2.5-8B-A1B", "StepFun3.5-Flash", "unsloth-mistral-Devstral-Small-2507"),
    ],
)
def test_a_call_comes_back_as_the_template_wrote_it(stem: str) -> None:
    function = {"name": "weather", "arguments": _ARGUMENTS}
    call = {"id": "abcdef123", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = _parsed(stem, _written(stem, message, _TOOLS))
    assert (answer.content, answer.reasoning) == ("", "")
    (found,) = answer.tool_calls
    assert found.name == "weather"
    assert json.loads(found.arguments) == _ARGUMENTS


@pytest.mark.parametrize("stem", [_QWEN3, _QWEN35, _GPT_OSS, _GLM, "ByteDance-Seed-OSS"])
def test_reasoning_comes_back_as_the_template_wrote_it(stem: str) -> None:
    message = {"role": "assistant", "content": "Cold.", "reasoning_content": "Let me\n\nthink."}
    answer = _parsed(stem, _written(stem, message, None), None)
    assert (answer.content, answer.reasoning) == ("Cold.", "Let me\n\nthink.")


# -- families --------------------------------------------------------------------------------------

_CALLS = {
    _QWEN3: '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n'
    "</tool_call>",
    _CODER: "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    _GLM: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    _GEMMA: '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>',
    _SMALL: '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 2}',
}


@pytest.mark.parametrize("stem", _CALLS)
def test_words_and_two_calls(stem: str) -> None:
    answer = _parsed(stem, f"I look it up.\n\n{_CALLS[stem]}\n{_CALLS[stem]}")
    assert answer == Delta("I look it up.", "", (_WEATHER, _WEATHER))
    assert len({call.id for call in answer.tool_calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in answer.tool_calls)


@pytest.mark.parametrize("stem", _CALLS)
def test_marks_are_words_where_there_are_no_tools(stem: str) -> None:
    assert _parsed(stem, f"x {_CALLS[stem]} y", None).content == f"x {_CALLS[stem]} y"


@pytest.mark.parametrize("stem", _CALLS)
@pytest.mark.parametrize("cut", [3, 14, 20, 40])
def test_a_call_that_the_answer_s_end_cut_off_is_not_lost(stem: str, cut: int) -> None:
    text = _CALLS[stem][:cut]
    assert _parsed(stem, f"x {text}") == Delta(f"x {text}")


def test_the_end_of_an_answer_closes_a_call() -> None:
    text = _CALLS[_QWEN3].removesuffix("\n</tool_call>")
    assert _parsed(_QWEN3, text) == Delta("", "", (_WEATHER,))


@pytest.mark.parametrize(
    "body",
    ["weather(1)", "{}", '{"name": 3}', '{"name": "weather", "arguments": 3}', "[" * 5000, "{]"],
)
def test_what_is_no_call_is_shown(body: str) -> None:
    text = f"<tool_call>{body}</tool_call> so"
    assert _sum(_read(_QWEN3, text, len(text))) == Delta(text)


def test_a_closing_mark_in_an_argument_closes_nothing() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>'
    (call,) = _parsed(_QWEN3, text).tool_calls
    assert json.loads(call.arguments) == {"city": "</tool_call>"}


def test_xml_s_strings_are_bare_and_the_rest_is_json() -> None:
    text = (
        "<tool_call><function=weather><parameter=city>\n12\n</parameter><parameter=days>12"
        "</parameter><parameter=why>no json</parameter></function></tool_call>"
    )
    (call,) = _parsed(_CODER, text).tool_calls
    assert json.loads(call.arguments) == {"city": "12", "days": 12, "why": "no json"}


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
    answer = _parsed(_LLAMA, text)
    assert answer.tool_calls == (_WEATHER,) * calls
    assert calls or answer.content == text


def test_an_answer_that_begins_with_a_brace_is_not_held_back() -> None:
    deltas = _read(_LLAMA, '{"x": [1, 2, 3], "y": 4}', 1)
    assert "".join(delta.content for delta in deltas[:-2]).startswith('{"x": [1, 2, 3], "y"')


def test_mistral_s_array_of_calls_with_ids() -> None:
    text = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern", "days": 2}, "id": "x"}]'
    (call,) = _parsed(_NEMO, text).tool_calls
    assert (call, call.id) == (_WEATHER, "x")


def test_gemma_s_values() -> None:
    text = '<|tool_call>call:f{a:[1,{b:<|"|>x,}<|"|>}],c:true,d:null,e:-1.5,g:{},h:[]}<tool_call|>'
    (call,) = _parsed(_GEMMA, text).tool_calls
    assert json.loads(call.arguments) == {
        "a": [1, {"b": "x,}"}],
        "c": True,
        "d": None,
        "e": -1.5,
        "g": {},
        "h": [],
    }


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
        (f"<think>Hm.</think>\n{_CALLS[_QWEN3]}", Delta("", "Hm.", (_WEATHER,))),
        ("  Yes <thin", Delta("  Yes <thin")),
    ],
)
def test_reasoning_at_the_beginning(text: str, want: Delta) -> None:
    assert _parsed(_QWEN3, text) == want


def test_reasoning_that_the_prompt_opened() -> None:
    text = "Hm.\n</think>\n\nYes."
    assert _parsed(_QWEN35, text, enable_thinking=True) == Delta("Yes.", "Hm.")
    assert _parsed(_QWEN35, "Yes.", enable_thinking=False) == Delta("Yes.")


def test_words_stream_as_they_come() -> None:
    deltas = _read(_QWEN3, "<think>ab</think>cd e", 1)
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
            Delta("", "Hm.", (_WEATHER,)),
        ),
        (
            f" to=functions.weather<|channel|>commentary {_COMMENTARY}<|call|>",
            Delta("", "", (_WEATHER,)),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            f" to=functions.weather {_COMMENTARY}<|call|>",
            Delta("I look.", "", (_WEATHER,)),
        ),
        ("Yes.", Delta("Yes.")),
        ("<|channel|>fin", Delta()),
        ("<|channel|>final<|message|>Yes <|", Delta("Yes <|")),
    ],
)
def test_harmony(text: str, want: Delta) -> None:
    assert _parsed(_GPT_OSS, text) == want


def test_harmony_without_tools_calls_nothing() -> None:
    text = f"<|channel|>commentary to=functions.weather {_COMMENTARY}"
    assert _parsed(_GPT_OSS, text, None) == Delta('{"city": "Bern", "days": 2}')


# -- nothing is lost -------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<", "think>", "tool_call>", "{", "}", "/", "a", " ", "\n", "[TOOL"])
    ),
    st.sampled_from([_LLAMA, _QWEN3, _CODER, _SMALL, _GEMMA]),
    st.integers(0, 1000),
)
def test_an_answer_without_marks_is_its_content(parts: list[str], stem: str, seed: int) -> None:
    text = "".join(parts)
    assume("<think>" not in text and "<tool_call>" not in text)
    chance = random.Random(seed)
    parser = AnswerParser.for_template(_template(stem), _TOOLS)
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
    parser = AnswerParser.for_template(_template(stem), _TOOLS)
    reader = AnswerReader(source, parser)
    deltas = [reader.push(token) for token in source.encode(text, special=True)]
    return _sum([*deltas, reader.flush()])


def test_control_tokens_reach_the_parser_that_knows_them_and_no_reader() -> None:
    text = f"Ja.{_CALLS[_GEMMA]}<|turn>é🦙"
    assert _read_tokens(_GEMMA, "gemma-4", text) == Delta("Ja.é🦙", "", (_WEATHER,))
    thought = "<|channel>thought\nHm.<channel|>Ja."  # a mark that is a token and a word
    assert _read_tokens(_GEMMA, "gemma-4", thought) == Delta("Ja.", "Hm.")
    assert _read_tokens(_QWEN3, "qwen2", "<|im_start|>é🦙") == Delta("é🦙")


def test_of_a_character_that_is_cut_nothing_is_shown() -> None:
    source = tokenizer("gpt-2")
    reader = AnswerReader(source, AnswerParser.for_template(_template(_QWEN3)))
    half = source.encode("🦙")[:1]
    assert _sum([*(reader.push(token) for token in half), reader.flush()]) == Delta()


# -- every template of llama.cpp's that takes tools reads its own calls ----------------------------

_BARE = {"name": "now", "description": "Says the time.", "parameters": {"type": "object"}}
_BOTH: Any = [
    {
        "type": "function",
        "function": {
            "name": "book_table",
            "description": "Books.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "p"},
                    "seats": {"type": "integer", "description": "s"},
                    "who": {"type": "array", "items": {"type": "string"}, "description": "w"},
                    "note": {"type": "string", "description": "n"},
                    "more": {"type": "object", "properties": {}, "description": "m"},
                },
                "required": ["place", "seats"],
            },
        },
    },
    {"type": "function", "function": {**_BARE, "parameters": {"type": "object", "properties": {}}}},
]
# Templates without a place for tools: these get them in plain JSON.
_WITHOUT = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
# Those that list tools, but drop the calls of the past.
_SILENT = {"LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"}
_LFM2 = "<|tool_call_start|>[book_table(place='Zur Post', seats=4)]<|tool_call_end|>"
_SAID = {
    "LFM2-8B-A1B": _LFM2,
    "LFM2.5-Instruct": _LFM2,
    "ibm-granite-granite-3.3-2B-Instruct": '<|tool_call|>[{"name": "book_table", '
    '"arguments": {"place": "Zur Post", "seats": 4}}]',
}


def _calls_of(*pairs: tuple[str, Any]) -> dict[str, Any]:
    calls = [
        {
            "type": "function",
            "id": f"call0000{index}",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _own_words(template: ChatTemplate, message: dict[str, Any]) -> str:
    """Return what a template writes of an answer, from where it is no more the prompt."""
    asked = template.render([_USER], tools=_BOTH)
    text = template.render([_USER, message], tools=_BOTH, add_generation_prompt=False)
    plain = template.render(
        [_USER, {"role": "assistant", "content": "orinsaid"}],
        tools=_BOTH,
        add_generation_prompt=False,
    )
    pairs = enumerate(zip(asked, text, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(asked), len(text)))
    if (begun := text.rfind("<", 0, same)) >= 0 and ">" not in text[begun:same]:
        same = begun  # two marks begin alike
    end = plain.rpartition("orinsaid")[2]
    return text[same:].removesuffix(end).rstrip()


# What parsers trip over: quotes, lines, brackets, texts that look like numbers, nested values.
_WORDS = 'He said "a\'s" <b> {x} [y],\nthen: π 🦙'
_HARD = {"place": "12", "seats": 4, "who": ["Ann", "12"], "note": _WORDS, "more": {"a": [1, "b"]}}
# Templates that say less: no second call, or words apart from their own marks.
_ONE_CALL = {
    *("GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "openai-gpt-oss-120b"),
    *("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"),
    "meta-llama-Llama-3.3-70B-Instruct",
}


def _every_cut(parser: AnswerParser, text: str) -> None:
    """Check that an answer is the same in one piece, in two (each cut), and letter by letter."""

    def parsed(*pieces: str) -> Delta:
        own = copy.deepcopy(parser)
        return _sum([*map(own.push, pieces), own.flush()])

    whole = parsed(text)
    assert parsed(*text) == whole
    for cut in range(1, len(text)):
        assert parsed(text[:cut], text[cut:]) == whole, text[:cut]


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.stem)
def test_every_template_reads_its_own_calls(path: Path) -> None:
    template = _template(path.stem)
    assert template.takes_tools == (path.stem not in _WITHOUT)
    assert "book_table" in template.render([_USER], tools=_BOTH)
    parser = AnswerParser.for_template(template, _BOTH)
    now: tuple[str, Any] = ("now", {})
    plain = ("book_table", {"place": "Zur Post, 7", "seats": 4})
    cases: list[list[tuple[str, Any]]] = [[now], [("book_table", _HARD)]]
    cases.append([plain] if path.stem in _ONE_CALL else [plain, now])
    for calls in cases:
        if path.stem in _WITHOUT:
            said = [json.dumps({"name": n, "arguments": a}) for n, a in calls]
            text = "; ".join(said)
        elif path.stem in _SILENT:
            text, calls = _SAID[path.stem], [("book_table", {"place": "Zur Post", "seats": 4})]
        else:
            text = _own_words(template, _calls_of(*calls))
        if template.starts_in_reasoning(tools=_BOTH):  # past answers may leave thoughts out
            assert template.reasoning_tag is not None
            close = template.reasoning_tag.close
            text = text if close in text else f"I see.{close}{text}"
        own = copy.deepcopy(parser)
        found = own.push(text) + own.flush()
        assert [(c.name, json.loads(c.arguments)) for c in found.tool_calls] == calls, text
        if calls == cases[2]:
            _every_cut(parser, text)


# -- what models of llama.cpp's templates say beside the rule, as its own tests tell ---------------

_ATEM = (
    '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Bern'
    '</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
_K2 = (
    '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bern", "days": 2}'
)
_K3, _K3_END = "<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"
_BARE_CODER = _CALLS[_CODER].removeprefix("<tool_call>\n")
_LFM = "<|tool_call_start|>[weather(city='Bern', days=2)]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("stem", "text", "want"),
    [
        # A thought that is not closed ends with the calls behind it; one that goes on has none.
        (_QWEN35, f"Hm.\n{_CALLS[_CODER]}", Delta("", "Hm.", (_WEATHER,))),
        (_QWEN35, f"Hm.\n{_CALLS[_CODER]}\n{_CALLS[_CODER]}\n", Delta("", "Hm.", (_WEATHER,) * 2)),
        (_QWEN35, f"Hm {_CALLS[_CODER]} or</think>No.", Delta("No.", f"Hm {_CALLS[_CODER]} or")),
        (_QWEN35, "A <tool_call> is</think>No.", Delta("No.", "A <tool_call> is")),
        (_QWEN35, f"Hm {_CALLS[_CODER]}</think>No.", Delta("No.", f"Hm {_CALLS[_CODER]}")),
        ("Kimi-K2-Thinking", f"<think>Hm.{_K2}", Delta("", "Hm.", (_WEATHER,))),
        ("Kimi-K2-Instruct", _K2, Delta("", "", (_WEATHER,))),
        # Marks that are left out, or stand alone.
        (_CODER, f"So.\n{_BARE_CODER}", Delta("So.", "", (_WEATHER,))),
        (_CODER, f"{_BARE_CODER}\n{_CALLS[_CODER]}", Delta("", "", (_WEATHER,) * 2)),
        (_CODER, "<function=weather> is it.", Delta("<function=weather> is it.")),
        (_QWEN3, "</think>\nYes.", Delta("Yes.")),
        (_GEMMA, "Yes.<|channel>thought\n<channel|><channel|>", Delta("Yes.")),
        # Words around an answer's words.
        ("Kimi-K3", f"Hm.<|close|>think<|sep|>{_K3}Yes.{_K3_END}", Delta("Yes.", "Hm.")),
        ("Kimi-K3", f"{_K3}Yes, response.{_K3_END}", Delta("Yes, response.")),
        ("meetkai-functionary-medium-v3.2", "all\nYes, all\nof it.", Delta("Yes, all\nof it.")),
        (
            "meetkai-functionary-medium-v3.2",
            'all\nYes.>>>weather\n{"city": "Bern", "days": 2}',
            Delta("Yes.", "", (_WEATHER,)),
        ),
        ("muse-glimmer", " to=user<|message|>Yes to=it.<|eot|>", Delta("Yes to=it.")),
        (
            "muse-glimmer",
            f" to=self<|message|>Hm {_ATEM}<|eom|><|start|>assistant to=user<|message|>Yes.",
            Delta("Yes.", f"Hm {_ATEM}"),
        ),
        (
            "muse-glimmer",
            f" to=user<|message|>I look.<|eom|><|start|>assistant to=weather<|message|>{_ATEM}",
            Delta("I look.", "", (_WEATHER,)),
        ),
        (
            "upstage-Solar-Open-100B",
            "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>",
            Delta("Yes.", "Hm."),
        ),
        ("Cohere2MoE", "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", Delta("Yes.", "Hm.")),
        ("Apriel-1.6-15b-Thinker-fixed", "Hm.\n[BEGIN FINAL RESPONSE]\nYes.", Delta("Yes.", "Hm.")),
        ("tencent-Hy3", "<think:opensource>Hm.</think:opensource>Yes.", Delta("Yes.", "Hm.")),
        # Python's calls with JSON's values, or with strings that are not escaped.
        (
            "LFM2.5-8B-A1B",
            f"<think>Hm {_LFM} or</think>{_LFM}",
            Delta("", f"Hm {_LFM} or", (_WEATHER,)),
        ),
    ],
)
def test_what_models_say_beside_the_rule(stem: str, text: str, want: Delta) -> None:
    parser = AnswerParser.for_template(_template(stem), _TOOLS)
    own = copy.deepcopy(parser)
    assert own.push(text) + own.flush() == want
    _every_cut(parser, text)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("city='say \"hi\", it's', days=2", {"city": 'say "hi", it\'s', "days": 2}),
        ("city='a\nb'", {"city": "a\nb"}),
        ('city={"a": [true, null]}', {"city": {"a": [True, None]}}),
        ("", {}),
    ],
)
def test_lfm2_s_calls_that_are_no_python(written: str, arguments: Any) -> None:
    text = f"<|tool_call_start|>[get-it({written}), get-it(days=3)]<|tool_call_end|>"
    tool = {"function": {**_TOOLS[0]["function"], "name": "get-it"}}  # type: ignore[dict-item]
    found = _parsed("LFM2.5-Instruct", text, [tool])
    assert [json.loads(call.arguments) for call in found.tool_calls] == [arguments, {"days": 3}]


@pytest.mark.parametrize("schema", [None, True, {"properties": None}, {"properties": {"a": True}}])
@pytest.mark.parametrize("stem", [_CODER, "MiniMax-M3", "LFM2.5-Instruct"])
def test_a_schema_that_says_nothing_of_its_arguments(stem: str, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    text = {
        _CODER: "<function=f><parameter=a>1</parameter></function>",
        "MiniMax-M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1'
        "]<]minimax[>[</a>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "LFM2.5-Instruct": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    }[stem]
    calls = _template(stem).call_format([tool])
    at = min(i for mark in calls.opens if (i := text.find(mark)) >= 0)
    found = calls.read(text[at:], True)
    assert found is not None and [(c.name, c.arguments) for c in found[0]] == [("f", '{"a": 1}')]


def test_a_thought_goes_on_while_it_comes() -> None:
    """A mark that a thought speaks of holds nothing back for longer than its line of words."""
    parser = AnswerParser.for_template(_template(_QWEN35), _TOOLS)
    parser.push(f"So {_CALLS[_CODER]}")
    assert parser.push(" would").reasoning.endswith("</tool_call> would")
    parser = AnswerParser.for_template(_template(_QWEN35), _TOOLS)
    assert parser.push("A <tool_call> is</think>No.") == Delta("No.", "A <tool_call> is")


def test_an_answer_ends_before_the_first_stop_text_however_it_is_cut() -> None:
    """Of several, of which one begins like another: nothing that becomes one is shown."""
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choices("ab<", k=draw.randrange(1, 12)))
        stops = ["".join(draw.choices("ab<", k=draw.randrange(2, 4))) for _ in range(3)]
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        reader, shown, stopped, left = StopTexts(stops), "", False, text
        while left and not stopped:
            n = draw.randrange(1, 3)
            part, stopped = reader.push(left[:n])
            shown, left = shown + part, left[n:]
        shown += "" if stopped else reader.flush()
        assert stopped == bool(ends)
        assert stopped or shown == text
        # Of two that end with one piece the one that begins first; it may be within a longer one.
        assert shown == text[: len(shown)] and all(stop not in shown for stop in stops)
