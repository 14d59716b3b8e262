"""Chat templates: a conversation to the one text that a model was trained to continue.

A GGUF file carries its template as Jinja. It is code of whoever made the file, so it runs in a
process of its own (`rendering`), set up as the `transformers` library does it, and gives the same
text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from orinllm.errors import BadInput
from orinllm.reasoning import TAGS
from orinllm.rendering import renderer
from orinllm.tokenizer import GUARD, Tokenizer

Message = Mapping[str, Any]
#: The key-value of a file that holds its template.
KEY = "tokenizer.chat_template"
# Names of a message's reasoning; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "orinllm-probe"


class ChatTemplate:
    """One model's template.

    Attributes:
      source: The Jinja text.
      reads: Names of the variables that it reads, messages and tools among them.

    Args:
      source: The Jinja text.
      tokenizer: The model's tokenizer; it says what begins and ends a text.
      with_tools: Takes the conversations with tools, for models that have two templates.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, with_tools: ChatTemplate | None = None
    ) -> None:
        self.source = source
        self._with_tools = with_tools
        self._tokenizer = tokenizer
        self._bos, self._eos = (
            "" if token is None else tokenizer.token_bytes(token).decode()
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        try:
            self.reads = frozenset(self._render(None).split())
        except BadInput as error:
            raise BadInput(f"{KEY}: {error}") from None

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, name: str | None = None
    ) -> ChatTemplate:
        """Take the template from a GGUF file's key-values.

        Args:
          metadata: The key-values.
          tokenizer: The file's tokenizer.
          name: One of the file's named templates; None is the one without a name, and with it
            the one named "tool_use" for conversations with tools, if the file has it.

        Raises:
          BadInput: The file has no such template, or it is no Jinja.
        """
        key = f"{KEY}.{name}" if name else KEY
        source = metadata.get(key)
        if not isinstance(source, str):
            names = sorted(k.removeprefix(f"{KEY}.") for k in metadata if k.startswith(f"{KEY}."))
            others = f"; the file's named ones are {', '.join(names)}" if names else ""
            raise BadInput(
                f"{key}: the file has no such chat template{others}; a model without one"
                " continues text, but does not chat"
            )
        tool_use = metadata.get(f"{KEY}.tool_use")
        if name or not isinstance(tool_use, str):
            return cls(source, tokenizer)
        return cls(source, tokenizer, cls(tool_use, tokenizer))

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt's text, as `transformers` renders it.

        A beginning-of-sequence token at its start is left out if the tokenizer adds one.

        Args:
          messages: OpenAI's messages: role, content (text, parts or None), reasoning_content,
            tool_calls (arguments as JSON text or as an object).
          tools: OpenAI's tools, {"type": "function", "function": {...}} each.
          add_generation_prompt: End with what begins the model's answer.
          variables: What else the template reads, as enable_thinking or reasoning_effort.

        Raises:
          BadInput: The template refuses the conversation, or fails on it.
        """
        if (template := self.for_tools(tools)) is not self:
            return template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        prepared = [self._prepare(message) for message in messages]
        text = self._run(prepared, tools, add_generation_prompt, variables)
        return text.removeprefix(self._bos) if self._tokenizer.add_bos else text

    def encode(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the prompt's tokens; the arguments are those of `render`.

        Control tokens are the template's alone: their texts in messages and tools stay words.

        Raises:
          BadInput: As `render`.
        """
        text = self.render(
            _guarded(list(messages), self._tokenizer.guard),
            tools=_guarded(tools, self._tokenizer.guard),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        ids = self._tokenizer.encode(text, special=True)
        bos = self._tokenizer.bos_id
        return [bos, *ids] if self._tokenizer.add_bos and bos is not None else ids

    def for_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the one of a model's templates that conversations with these tools take."""
        return self._with_tools if tools and self._with_tools else self

    def generation_prompt(self, /, **variables: Any) -> str:
        """Return what the template puts before the model's answer; `render` names `variables`."""
        question = [{"role": "user", "content": _PROBE}]
        without = self.render(question, add_generation_prompt=False, **variables)
        asked = self.render(question, add_generation_prompt=True, **variables)
        # A conversation that is over may end with a token that one that goes on does not have.
        without = without.removesuffix(self._eos)
        same = 0
        while same < min(len(without), len(asked)) and without[same] == asked[same]:
            same += 1
        return asked[same:]

    def starts_in_reasoning(self, /, **variables: Any) -> bool:
        """Say if the answer's first words are reasoning, because the prompt opened it."""
        opens = tuple(tag.open.strip() for tag in TAGS)
        return self.generation_prompt(**variables).rstrip().endswith(opens)

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        given = {
            "bos_token": self._bos,
            "eos_token": self._eos,
            "documents": None,
            **variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(given)
        except BadInput as error:
            raise BadInput(f"chat template: {error}") from None

    def _render(self, variables: Mapping[str, Any] | None) -> str:
        """Return the template's text; without variables, the names of those that it reads."""
        now = datetime.now().isoformat()
        job = {"source": self.source, "guard": GUARD, "variables": variables, "now": now}
        return renderer().run(job)

    def _prepare(self, message: Message) -> dict[str, Any]:
        """Return a message in the form that this template reads."""
        prepared = dict(message)
        reasoning = next((message[k] for k in _REASONING if message.get(k) is not None), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = [_parsed_call(call) for call in prepared["tool_calls"]]
        content = prepared.get("content")
        if isinstance(content, list) and not self._reads_parts:
            prepared["content"] = "\n".join(_text_of(part) for part in content)
        elif isinstance(content, str) and not self._reads_text:
            prepared["content"] = [{"type": "text", "text": content}]
        elif content is None and "content" in prepared and self._prints_none:
            prepared["content"] = ""
        return prepared

    def _probe(self, *messages: Message) -> str:
        """Return what the template makes of messages, nothing if it refuses them."""
        try:
            return self._run(messages, None, False, {})
        except BadInput:
            return ""

    @functools.cached_property
    def _reads_text(self) -> bool:
        return not self._reads_parts or _PROBE in self._probe({"role": "user", "content": _PROBE})

    @functools.cached_property
    def _reads_parts(self) -> bool:
        """A template that only knows text prints the parts as Python's lists."""
        parts = [{"type": "text", "text": _PROBE}]
        text = self._probe({"role": "user", "content": parts})
        return _PROBE in text and repr(parts) not in text and json.dumps(parts) not in text

    @functools.cached_property
    def _prints_none(self) -> bool:
        """A template that does not know null prints Python's None, as if the model had said it."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "000000000", **call}]}
        question = {"role": "user", "content": _PROBE}
        asked, text = self._probe(question), self._probe(question, answer)
        return text.count("None") > asked.count("None")


def _parsed_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object: templates write them in their own way."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(
            f"tool call '{function.get('name')}': its arguments are no JSON: {error}"
        ) from None
    if not isinstance(parsed, dict):
        raise BadInput(f"tool call '{function.get('name')}': its arguments are no JSON object")
    parsed_function = {**function, "arguments": parsed}
    return {**call, "function": parsed_function} if "function" in call else parsed_function


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadInput(f"content part of type '{kind}': this model reads text only")


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """Return the same value with every text in it guarded, names of arguments included."""
    if isinstance(value, str):
        # Roles and kinds are plain names, which the template compares.
        return value if value.isidentifier() else guard(value)
    if isinstance(value, Mapping):
        return {_guarded(key, guard): _guarded(item, guard) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_guarded(item, guard) for item in value]
    return value
