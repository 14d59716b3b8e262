"""Every template of llama.cpp's that takes tools: the calls of its model are read."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.models import templates
from tests.engine.text.answers import (
    CALLS,
    CODER,
    GEMMA,
    QWEN3,
    QWEN35,
    TOOLS,
    USER,
    WEATHER,
    joined,
    parsed,
    template_of,
)

from orinllm.text.answer import AnswerParser, Delta
from orinllm.text.template import ChatTemplate

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
    asked = template.render([USER], tools=_BOTH)
    text = template.render([USER, message], tools=_BOTH, add_generation_prompt=False)
    plain = template.render(
        [USER, {"role": "assistant", "content": "orinsaid"}],
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
_HARD = {
    "place": "12",
    "seats": 4,
    "who": ["Ann", "12"],
    "note": _WORDS,
    "more": {"a": [1, "b", True, 1.5]},
}
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
        return joined([*map(own.push, pieces), own.flush()])

    whole = parsed(text)
    assert parsed(*text) == whole
    for cut in range(1, len(text)):
        assert parsed(text[:cut], text[cut:]) == whole, text[:cut]


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.stem)
def test_every_template_reads_its_own_calls(path: Path) -> None:
    template = template_of(path.stem)
    assert template.takes_tools == (path.stem not in _WITHOUT)
    assert "book_table" in template.render([USER], tools=_BOTH)
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
_BARE_CODER = CALLS[CODER].removeprefix("<tool_call>\n")
_LFM = "<|tool_call_start|>[weather(city='Bern', days=2)]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("stem", "text", "want"),
    [
        # A thought that is not closed ends with the calls behind it; one that goes on has none.
        (QWEN35, f"Hm.\n{CALLS[CODER]}", Delta("", "Hm.", (WEATHER,))),
        (QWEN35, f"Hm.\n{CALLS[CODER]}\n{CALLS[CODER]}\n", Delta("", "Hm.", (WEATHER,) * 2)),
        (QWEN35, f"Hm {CALLS[CODER]} or</think>No.", Delta("No.", f"Hm {CALLS[CODER]} or")),
        (QWEN35, "A <tool_call> is</think>No.", Delta("No.", "A <tool_call> is")),
        (QWEN35, f"Hm {CALLS[CODER]}</think>No.", Delta("No.", f"Hm {CALLS[CODER]}")),
        ("Kimi-K2-Thinking", f"<think>Hm.{_K2}", Delta("", "Hm.", (WEATHER,))),
        ("Kimi-K2-Instruct", _K2, Delta("", "", (WEATHER,))),
        # Marks that are left out, or stand alone.
        (CODER, f"So.\n{_BARE_CODER}", Delta("So.", "", (WEATHER,))),
        (CODER, f"{_BARE_CODER}\n{CALLS[CODER]}", Delta("", "", (WEATHER,) * 2)),
        (CODER, "<function=weather> is it.", Delta("<function=weather> is it.")),
        (QWEN3, "</think>\nYes.", Delta("Yes.")),
        (GEMMA, "Yes.<|channel>thought\n<channel|><channel|>", Delta("Yes.")),
        # Words around an answer's words.
        ("Kimi-K3", f"Hm.<|close|>think<|sep|>{_K3}Yes.{_K3_END}", Delta("Yes.", "Hm.")),
        ("Kimi-K3", f"{_K3}Yes, response.{_K3_END}", Delta("Yes, response.")),
        ("meetkai-functionary-medium-v3.2", "all\nYes, all\nof it.", Delta("Yes, all\nof it.")),
        (
            "meetkai-functionary-medium-v3.2",
            'all\nYes.>>>weather\n{"city": "Bern", "days": 2}',
            Delta("Yes.", "", (WEATHER,)),
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
            Delta("I look.", "", (WEATHER,)),
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
            Delta("", f"Hm {_LFM} or", (WEATHER,)),
        ),
    ],
)
def test_what_models_say_beside_the_rule(stem: str, text: str, want: Delta) -> None:
    parser = AnswerParser.for_template(template_of(stem), TOOLS)
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
    tool = {"function": {**TOOLS[0]["function"], "name": "get-it"}}  # type: ignore[dict-item]
    found = parsed("LFM2.5-Instruct", text, [tool])
    assert [json.loads(call.arguments) for call in found.tool_calls] == [arguments, {"days": 3}]


@pytest.mark.parametrize("schema", [None, True, {"properties": None}, {"properties": {"a": True}}])
@pytest.mark.parametrize("stem", [CODER, "MiniMax-M3", "LFM2.5-Instruct"])
def test_a_schema_that_says_nothing_of_its_arguments(stem: str, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    text = {
        CODER: "<function=f><parameter=a>1</parameter></function>",
        "MiniMax-M3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1'
        "]<]minimax[>[</a>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "LFM2.5-Instruct": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    }[stem]
    calls = template_of(stem).call_format([tool])
    at = min(i for mark in calls.opens if (i := text.find(mark)) >= 0)
    found = calls.read_calls(text[at:], True)
    assert found is not None and [(c.name, c.arguments) for c in found[0]] == [("f", '{"a": 1}')]
