"""Chat templates: a conversation to the one text that a model was trained to continue.

A GGUF file carries its template as Jinja. It is code of whoever made the file, so it runs in a
process of its own (processes/jinja_process.py), set up as the `transformers` library does it, and
gives the same text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from orinllm.errors import BadInput
from orinllm.text.call_formats import CallFormat, LlamaFormat, Tool, find_known_format_maker
from orinllm.text.learned_calls import (
    PROBE,
    PROBES,
    LearningResult,
    TextsAroundAnswer,
    common_start_length,
    learn_call_format_or_none,
    probe_texts_around_answer,
)
from orinllm.text.messages import (
    Message,
    fully_described_tool,
    parsed_calls,
    text_of_part,
    unparsed_call,
    with_parsed_calls,
    with_tools_as_text,
)
from orinllm.text.processes.job_process import JobProcess
from orinllm.text.reasoning_tags import TAGS, ReasoningTag
from orinllm.text.tokenizer import GUARD, Tokenizer

if TYPE_CHECKING:
    from orinllm.mmproj import PictureEncoder
    from orinllm.network.vision.pictures import Picture

#: The key-value of a file that holds its template.
KEY = "tokenizer.chat_template"
# Names of a message's reasoning; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "orinllm-probe"
# Sets of variables of which it is known whether an answer starts in reasoning: a key of 32 bytes.
_MOST_TOLD = 1024
# What stands for a picture in templates that know none: a character that no text may have.
_MARK = {"type": "text", "text": "\ufdd1"}


class TemplateRenderer(JobProcess):
    """Renders templates; one for a process is enough, and threads may share it.

    A template may take `seconds` of CPU time, and all of them `memory` bytes.
    """

    def __init__(self, seconds: float = 3, memory: int = 1 << 30) -> None:
        super().__init__("orinllm.text.processes.jinja_process", seconds, memory)

    def render_job(self, job: Mapping[str, Any]) -> str:
        """Return what a template makes of variables; raises BadInput where it fails."""
        return str(self.run_job(job)["text"])


@functools.cache
def shared_renderer() -> TemplateRenderer:
    """Return the renderer that all models of this process share."""
    return TemplateRenderer()


class GuardedPrompt(NamedTuple):
    """A rendered prompt whose messages hold no control tokens, and the pictures in it."""

    text: str
    pictures: tuple[Picture, ...]


class ChatTemplate:
    """One model's template.

    Attributes:
      source: The Jinja text.
      reads: Names of the variables that it reads, messages and tools among them.
      picture_encoder: Makes rows of a prompt of messages' pictures; None: it reads text only.

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
        self.picture_encoder: PictureEncoder | None = None
        self._starts_in_reasoning: dict[bytes, bool] = {}  # by what the template was told
        self._tokenizer = tokenizer
        self._bos, self._eos = (
            "" if token is None else tokenizer.token_bytes(token).decode()
            for token in (tokenizer.bos_id, tokenizer.eos_id)
        )
        try:
            self.reads = frozenset(self._render_in_process(None).split())
        except BadInput as error:
            raise BadInput(f"{KEY}: {error}") from None

    def enable_pictures(self, encoder: PictureEncoder) -> None:
        """Let messages have pictures."""
        slot = self._tokenizer.encode(encoder.projector.slot, special=True)
        if len(slot) != 1:
            raise BadInput(
                f"the vocabulary has no token {encoder.projector.slot}, which stands for a picture"
            )
        for template in (self, self._with_tools):
            if template is not None:
                template.picture_encoder = encoder

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
        if (template := self.template_for_tools(tools)) is not self:
            return template.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        if tools and not self.takes_tools:
            called = with_parsed_calls(messages)
            messages, tools = with_tools_as_text(called, tools, self._accepts_system_message), None
        prepared = [self._prepared_message(message) for message in messages]
        try:
            text = self._render_messages(prepared, tools, add_generation_prompt, variables)
        except BadInput:
            # OpenAI's tools need no description; some templates want one.
            if tools is None or (whole := list(map(fully_described_tool, tools))) == list(tools):
                raise
            text = self._render_messages(prepared, whole, add_generation_prompt, variables)
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

        Control tokens are the template's alone: their texts in messages and tools stay words. A
        part {"type": "image", "image": ...} of a message is a picture, as
        `PictureEncoder.prepare_picture` takes it; its rows are numbers below 0
        (network/vision/pictures.py).

        Raises:
          BadInput: As `render`, or for a picture where the model sees none, or that is none.
        """
        given = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        return self.tokens_of_guarded(self.render_guarded(messages, **given))

    def render_guarded(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> GuardedPrompt:
        """Return the text for `tokens_of_guarded`: messages hold no control tokens."""
        pictures: list[Picture] = []
        if any(isinstance(message.get("content"), list) for message in messages):
            messages = [self._with_pictures_taken(message, pictures) for message in messages]
        text = self.render(
            _guarded_texts(list(messages), self._tokenizer.guard_control_tokens),
            tools=_guarded_texts(tools, self._tokenizer.guard_control_tokens),
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        return GuardedPrompt(
            self._with_picture_texts(text, pictures) if pictures else text, tuple(pictures)
        )

    def tokens_of_guarded(self, rendered: GuardedPrompt) -> list[int]:
        """Return the tokens of a text of `render_guarded`."""
        text, pictures = rendered
        ids = self._tokenizer.encode(text, special=True)
        if pictures:
            assert self.picture_encoder is not None
            slot = self._tokenizer.encode(self.picture_encoder.projector.slot, special=True)
            ids = self.picture_encoder.insert_picture_rows(ids, slot[0], pictures)
        bos = self._tokenizer.bos_id
        return [bos, *ids] if self._tokenizer.add_bos and bos is not None else ids

    def _with_pictures_taken(self, message: Message, pictures: list[Picture]) -> Message:
        """Add a message's pictures to those before; return it as this template reads it."""
        parts: list[Any] = []
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if isinstance(part, Mapping) and part.get("type") == "image":
                if self.picture_encoder is None:
                    raise BadInput(
                        "the message has a picture, and this model reads text only; a model with "
                        "an mmproj file sees (--mmproj)"
                    )
                pictures.append(self.picture_encoder.prepare_picture(part.get("image")))
                part = {"type": "image"} if self._accepts_picture_parts else _MARK
            parts.append(part)
        return {**message, "content": parts} if parts else message

    def _with_picture_texts(self, text: str, pictures: Sequence[Picture]) -> str:
        """Return a prompt's text with that of each picture in the place of its mark."""
        encoder = self.picture_encoder
        assert encoder is not None
        mark = encoder.projector.slot if self._accepts_picture_parts else str(_MARK["text"])
        before, *rest = text.split(mark)
        if len(rest) != len(pictures):
            raise BadInput(f"chat template: it has {len(rest)} places for {len(pictures)} pictures")
        return before + "".join(
            encoder.prompt_text(picture, not self._accepts_picture_parts) + behind
            for picture, behind in zip(pictures, rest, strict=True)
        )

    @functools.cached_property
    def _accepts_picture_parts(self) -> bool:
        """A template that knows no pictures leaves such parts out, or prints something else."""
        assert self.picture_encoder is not None
        parts = [{"type": "image"}, {"type": "text", "text": _PROBE}]
        text = self._rendered_or_empty({"role": "user", "content": parts})
        return text.count(self.picture_encoder.projector.slot) == 1 and _PROBE in text

    def template_for_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        """Return the one of a model's templates that conversations with these tools take."""
        return self._with_tools if tools and self._with_tools else self

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Say if the template tells the model of tools, and how their calls look is known."""
        template = self.template_for_tools(PROBES)
        return template._lists_tools and template._format_maker is not None

    def call_format(self, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
        """Return the format of calls; templates that take no tools get them in plain JSON."""
        template = self.template_for_tools(tools)
        if not self.takes_tools or template._format_maker is None:
            return LlamaFormat(tools)
        return template._format_maker(tools)

    @functools.cached_property
    def _lists_tools(self) -> bool:
        try:
            return PROBE in self._render_messages(
                [{"role": "user", "content": _PROBE}], PROBES, True, {}
            )
        except BadInput:
            return False

    @functools.cached_property
    def _learned_calls(self) -> LearningResult | None:
        """Return the template's text of calls."""
        return learn_call_format_or_none(
            lambda messages, tools, asks: self._render_messages(
                [self._prepared_message(message, True) for message in messages], tools, asks, {}
            )
        )

    @functools.cached_property
    def _format_maker(self) -> Callable[[Sequence[Tool]], CallFormat] | None:
        """The format that reads what the template writes: one that is known, or the learned one."""
        source = self.source
        if "<|channel|>" in source and "<|message|>" in source:
            return lambda tools: LlamaFormat(tools)  # harmony's parser reads its calls itself
        if self._learned_calls is None:  # past calls are not shown: the marks must say it
            return find_known_format_maker(source)
        for make in (find_known_format_maker(source), self._learned_calls.format_maker):
            if make is not None and self._learned_calls.is_read_by(make(PROBES)):
                return make
        return None

    @functools.cached_property
    def reasoning_tag(self) -> ReasoningTag | None:
        """The marks of reasoning; None: the template knows none."""
        try:
            asked = self._render_messages([{"role": "user", "content": _PROBE}], None, True, {})
        except BadInput:
            asked = ""
        # Some templates put a mark together, and only the prompt shows it.
        return next(
            (
                tag
                for tag in TAGS
                if tag.close in self.source
                or tag.open in asked
                or f"assistant{tag.open}" in self.source
            ),
            None,
        )

    @functools.cached_property
    def texts_around_answer(self) -> TextsAroundAnswer:
        """Words that the template has around what an answer says."""
        return probe_texts_around_answer(
            lambda messages, asks: self._render_messages(messages, None, asks, {})
        )

    def generation_prompt(self, /, **variables: Any) -> str:
        """Return what the template puts before the model's answer; `render` names `variables`."""
        question = [{"role": "user", "content": _PROBE}]
        without = self.render(question, add_generation_prompt=False, **variables)
        asked = self.render(question, add_generation_prompt=True, **variables)
        # A conversation that is over may end with a token that one that goes on does not have.
        without = without.removesuffix(self._eos)
        return asked[common_start_length(without, asked) :]

    def starts_in_reasoning(self, /, **variables: Any) -> bool:
        """Say if the answer's first words are reasoning, because the prompt opened it."""
        told = sha256(repr(sorted(variables.items())).encode()).digest()
        known = self._starts_in_reasoning  # requests have threads: it may be cleared meanwhile
        if (found := known.get(told)) is None:
            opens = tuple(tag.open.strip() for tag in TAGS)
            found = self.generation_prompt(**variables).rstrip().endswith(opens)
            if len(known) >= _MOST_TOLD:
                known.clear()
            known[told] = found
        return found

    def _render_messages(
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
        if "functions" in self.reads:  # FireFunction's name for them
            given["functions"] = json.dumps(list(tools or ()), indent=4)
            given["datetime"] = f"{datetime.now():%b %d %Y, %H:%M:%S}"
        try:
            return self._render_in_process(given)
        except BadInput as error:
            raise BadInput(f"chat template: {error}") from None

    def _render_in_process(self, variables: Mapping[str, Any] | None) -> str:
        """Return the template's text; without variables, the names of those that it reads."""
        now = datetime.now().isoformat()
        job = {"source": self.source, "guard": GUARD, "variables": variables, "now": now}
        return shared_renderer().render_job(job)

    def _prepared_message(self, message: Message, probing: bool = False) -> dict[str, Any]:
        """Return a message in the form that this template reads."""
        if not probing and message.get("tool_calls") and self._learned_calls is None:
            # The template would drop the calls.
            (message,) = with_tools_as_text(with_parsed_calls([message]), None, True)
        prepared = dict(message)
        reasoning = next((message[k] for k in _REASONING if message.get(k) is not None), None)
        if reasoning is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        if prepared.get("tool_calls"):
            calls = parsed_calls(prepared)
            prepared["tool_calls"] = (
                list(map(unparsed_call, calls)) if self._wants_text_arguments else calls
            )
        content = prepared.get("content")
        if isinstance(content, list) and not self._accepts_content_parts:
            prepared["content"] = "\n".join(text_of_part(part) for part in content)
        elif isinstance(content, str) and not self._accepts_text_content:
            prepared["content"] = [{"type": "text", "text": content}]
        elif content is None and "content" in prepared and self._prints_none:
            prepared["content"] = ""
        return prepared

    def _rendered_or_empty(self, *messages: Message) -> str:
        """Return what the template makes of messages, nothing if it refuses them."""
        try:
            return self._render_messages(messages, None, False, {})
        except BadInput:
            return ""

    @functools.cached_property
    def _accepts_system_message(self) -> bool:
        text = {"role": "system", "content": _PROBE}
        return _PROBE in self._rendered_or_empty(text, {"role": "user", "content": "?"})

    @functools.cached_property
    def _accepts_text_content(self) -> bool:
        return not self._accepts_content_parts or _PROBE in self._rendered_or_empty(
            {"role": "user", "content": _PROBE}
        )

    @functools.cached_property
    def _accepts_content_parts(self) -> bool:
        """A template that only knows text prints the parts as Python's lists."""
        parts = [{"type": "text", "text": _PROBE}]
        text = self._rendered_or_empty({"role": "user", "content": parts})
        return _PROBE in text and repr(parts) not in text and json.dumps(parts) not in text

    @functools.cached_property
    def _wants_text_arguments(self) -> bool:
        """Functionary's template fails on arguments that are no JSON text."""
        question, function = {"role": "user", "content": _PROBE}, {"name": "f", "arguments": {}}

        def shown(call: Any) -> bool:
            return bool(
                self._rendered_or_empty(question, {"role": "assistant", "content": "", **call})
            )

        call = {"type": "function", "id": "000000000", "function": function}
        return not shown({"tool_calls": [call]}) and shown({"tool_calls": [unparsed_call(call)]})

    @functools.cached_property
    def _prints_none(self) -> bool:
        """A template that does not know null prints Python's None, as if the model had said it."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "000000000", **call}]}
        question = {"role": "user", "content": _PROBE}
        asked, text = self._rendered_or_empty(question), self._rendered_or_empty(question, answer)
        # One that refuses the probe may want tools beside it: an empty text is safe in all.
        return not text or text.count("None") > asked.count("None")


def _guarded_texts(value: Any, guard: Callable[[str], str]) -> Any:
    """Return the same value with every text in it guarded, names of arguments included."""
    if isinstance(value, str):
        # Roles and kinds are plain names, which the template compares.
        return value if value.isidentifier() else guard(value)
    if isinstance(value, Mapping):
        return {
            _guarded_texts(key, guard): _guarded_texts(item, guard) for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_guarded_texts(item, guard) for item in value]
    return value
