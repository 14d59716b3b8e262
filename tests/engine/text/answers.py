"""Answers of models of several families, and how a parser reads them in pieces."""

import functools
from typing import Any

from tests.engine.models import LLAMA_CPP, tokenizer

from orinllm.text.answer import AnswerParser, Delta
from orinllm.text.call_formats import ToolCall
from orinllm.text.template import ChatTemplate

TOOLS = [
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
USER = {"role": "user", "content": "Hi"}
WEATHER = ToolCall("weather", '{"city": "Bern", "days": 2}')

# A template of each family, by llama.cpp's name of its file.
LLAMA = "meta-llama-Llama-3.1-8B-Instruct"
QWEN3, QWEN35, CODER = "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder"
NEMO, SMALL = "mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"
GEMMA, GPT_OSS, GLM = "google-gemma-4-31B-it", "openai-gpt-oss-120b", "GLM-4.6"


@functools.cache
def template_of(stem: str) -> ChatTemplate:
    path = LLAMA_CPP / "templates" / f"{stem}.jinja"
    return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer("gpt-2"))


def joined(deltas: list[Delta]) -> Delta:
    return functools.reduce(Delta.__add__, deltas)


def read(stem: str, text: str, size: int, tools: Any = TOOLS, **variables: Any) -> list[Delta]:
    """Give the text to a parser in pieces of `size` characters."""
    parser = AnswerParser.for_template(template_of(stem), tools, **variables)
    deltas = [parser.push(text[i : i + size]) for i in range(0, len(text), size)]
    return [*deltas, parser.flush()]


def parsed(stem: str, text: str, tools: Any = TOOLS, **variables: Any) -> Delta:
    """Return what an answer is; it is the same however the answer is cut into pieces."""
    whole = joined(read(stem, text, len(text) or 1, tools, **variables))
    for size in (1, 2, 3, 5, 11):
        assert joined(read(stem, text, size, tools, **variables)) == whole
    return whole


CALLS = {
    QWEN3: '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n'
    "</tool_call>",
    CODER: "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    GLM: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    GEMMA: '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>',
    SMALL: '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 2}',
}
