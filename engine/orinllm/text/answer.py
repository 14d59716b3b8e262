"""A model's answer, taken apart while it grows: what it says, what it thinks, what it calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from orinllm.text.call_formats import CallFormat, Tool, ToolCall
from orinllm.text.learned_calls import TextsAroundAnswer
from orinllm.text.reasoning_tags import ReasoningTag
from orinllm.text.template import ChatTemplate
from orinllm.text.tokenizer import Tokenizer

_TOKEN = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True)
class Delta:
    """The part of an answer that a piece of text added.

    Attributes:
      content: For the reader.
      reasoning: The model's thoughts.
      tool_calls: Calls that are now complete.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: Delta) -> Delta:
        """Join what came with what came later."""
        return Delta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
        )


class AnswerParser(ABC):
    """Reads one answer; nothing of it is lost, and no mark is shown in part.

    Attributes:
      marks: Texts that mean something to it. In some families they are control tokens, so their
        text must reach it; other control tokens' must not (`AnswerTokenReader` sees to both).
    """

    marks: frozenset[str]

    @staticmethod
    def for_template(
        template: ChatTemplate, tools: Sequence[Tool] | None = None, /, **variables: Any
    ) -> AnswerParser:
        """Return a parser for one answer.

        Args:
          template: The model's template; the marks in it tell the family.
          tools: The tools of this conversation; without any, a text is never a call.
          variables: Those that the prompt was rendered with.
        """
        whole, template = template, template.template_for_tools(tools)
        if "<|channel|>" in template.source and "<|message|>" in template.source:
            return _HarmonyParser(bool(tools))
        calls = whole.call_format(tools) if tools else None
        return _MarkedParser(
            template.reasoning_tag,
            calls,
            template.starts_in_reasoning(tools=tools, **variables),
            template.texts_around_answer,
        )

    def __init__(self) -> None:
        self._buffer = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> Delta:
        """Take more of the answer; return what is certain by now."""
        self._buffer += text
        while self._try_read_to_mark(final=False):
            pass
        return self._take_delta()

    def flush(self) -> Delta:
        """End the answer; return what was held back."""
        while self._try_read_to_mark(final=True):
            pass
        self._give_out_rest()
        return self._take_delta()

    @abstractmethod
    def _try_read_to_mark(self, final: bool) -> bool:
        """Read up to the next mark; return False if nothing more can be read by now."""

    @abstractmethod
    def _give_out_rest(self) -> None:
        """Give out what no mark followed."""

    def _take_delta(self) -> Delta:
        delta = Delta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta

    def _take_text_before_mark(self, marks: Sequence[str], final: bool) -> tuple[str, str]:
        """Take the text before the next of `marks` off the buffer; return it and the mark.

        The mark stays in the buffer, and so does, unless `final`, an end that may become one.
        """
        found = [(at, -len(mark), mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        begun = len(self._buffer) - (0 if final else _begun_mark_length(self._buffer, marks))
        at, _, mark = min(found, default=(begun, 0, ""))
        if begun < at:  # a longer mark has begun before
            at, mark = begun, ""
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        return text, mark


class AnswerTokenReader:
    """Reads an answer token by token."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._stream = tokenizer.new_stream(special=True)
        self._shown = {mark.encode() for mark in parser.marks}

    def push(self, token: int) -> Delta:
        """Take the next token; return what is certain by now."""
        hidden = self._tokenizer.is_control(token)
        if hidden and self._tokenizer.token_bytes(token) not in self._shown:
            return Delta()
        return self._parser.push(self._stream.push(token))

    def flush(self) -> Delta:
        """End the answer; return what was held back, and nothing of a character that was cut."""
        return self._parser.flush()


def _begun_mark_length(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of a text with which one of `marks` begins."""
    return max(
        (
            size
            for mark in marks
            for size in range(1, min(len(mark), len(text) + 1))
            if text.endswith(mark[:size])
        ),
        default=0,
    )


class StopTextFilter:
    """Ends a text before the first of some texts, and shows nothing that may become one.

    `found` is the text that came.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more; return what can be shown, and whether a stop text came."""
        if not self._stops:
            return text, False
        text = self._held + text
        at, self.found = min(
            ((i, stop) for stop in self._stops if (i := text.find(stop)) >= 0), default=(-1, "")
        )
        if at >= 0:
            self._held = ""
            return text[:at], True
        shown = len(text) - _begun_mark_length(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


class _MarkedParser(AnswerParser):
    """Families with one pair of marks around reasoning and a format for calls."""

    def __init__(
        self,
        tag: ReasoningTag | None,
        calls: CallFormat | None,
        in_reasoning: bool,
        frame: TextsAroundAnswer,
    ) -> None:
        super().__init__()
        self._tag, self._format, self._frame = tag, calls, frame
        whole = {*(tag or ()), *(calls.marks if calls else ()), frame.opens, *frame.closes} - {""}
        # A mark may be several control tokens, with words between them.
        self.marks = frozenset(whole.union(*map(_TOKEN.findall, whole)))
        self._in_reasoning = in_reasoning and tag is not None
        self._began = False  # the reader has seen something
        self._after_mark = self._in_reasoning  # white space that only sets marks apart is dropped
        self._space = ""  # may stand before a mark, too

    def _try_read_to_mark(self, final: bool) -> bool:
        if self._in_reasoning and self._tag:
            ends = [mark for mark in (self._tag.close, self._frame.opens) if mark]
            text, mark = self._take_text_before_mark([*ends, *self._call_marks_in_thought()], final)
            self._add_text(self._reasoning, text)
            if mark in ends:
                self._pass_mark(mark, reasoning=False)
                return True
            return self._try_read_calls_in_thought(mark, final) if mark else False
        text, mark = self._take_text_before_mark(self._possible_marks(), final)
        # The marks that stand at the beginning alone are none once something was said.
        if text.strip() and not self._began:
            self._buffer = text + self._buffer
            self._began = True
            return True
        self._add_text(self._content, text)
        if not mark:
            return False
        if mark in (*(self._tag or ()), self._frame.opens, *self._frame.closes):
            self._pass_mark(mark, self._tag is not None and mark == self._tag.open)
            return True
        return self._try_read_calls_at_mark(mark, final)

    def _possible_marks(self) -> list[str]:
        marks = [*self._frame.closes]
        # Control tokens are no words of an answer.
        if self._tag and (self._frame.opens or not self._began or self._tag.open[:2] == "<|"):
            marks += self._tag
        if not self._began and self._frame.opens:
            marks.append(self._frame.opens)
        if self._format:
            marks += self._format.opening_marks(self._began)
        return marks

    def _call_marks_in_thought(self) -> Sequence[str]:
        """Return the marks of calls that end reasoning: models forget to close it."""
        return self._format.opening_marks(True) if self._format else ()

    def _pass_mark(self, mark: str, reasoning: bool) -> None:
        self._buffer = self._buffer[len(mark) :]
        self._in_reasoning, self._after_mark, self._space = reasoning, True, ""

    def _try_read_calls_at_mark(self, mark: str, final: bool) -> bool:
        assert self._format is not None
        try:
            found = self._format.read_calls(self._buffer, final)
        except (ValueError, RecursionError):
            self._began = True
            self._buffer = self._buffer[len(mark) :]
            self._add_text(self._content, mark)
            return True
        if found is None:
            return False
        calls, end = found
        self._calls += calls
        self._pass_mark(self._buffer[:end], reasoning=False)
        return True

    def _try_read_calls_in_thought(self, mark: str, final: bool) -> bool:
        """Read calls in a thought that was not closed: they are some if nothing follows them."""
        assert self._format is not None and self._tag is not None
        calls, rest, opens = list[ToolCall](), self._buffer, tuple(self._call_marks_in_thought())
        try:
            while rest.startswith(opens):
                found = self._format.read_calls(rest, final)
                if found is None and self._tag.close not in rest:
                    return False
                if found is None:
                    break
                calls += found[0]
                rest = rest[found[1] :].lstrip()
        except (ValueError, RecursionError):
            calls = []
        if not final and calls and any(o.startswith(rest) for o in (*opens, self._tag.close)):
            return False
        if calls and not rest:
            self._calls += calls
            self._pass_mark(self._buffer, reasoning=False)
        else:
            self._buffer = self._buffer[len(mark) :]
            self._add_text(self._reasoning, mark)
        return True

    def _add_text(self, where: list[str], text: str) -> None:
        """Give out a text, but for white space that may turn out to stand before a mark."""
        text = self._space + text
        if self._after_mark:
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._after_mark = False
            where.append(said)

    def _give_out_rest(self) -> None:
        if not self._in_reasoning:
            self._content.append(self._space)


class _HarmonyParser(AnswerParser):
    """gpt-oss: messages with a header each, which names a channel and whom they are for."""

    _ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
    _HEADERS = ("<|", "to=", "assistant")  # what a header begins with
    marks = frozenset({*_ENDS, "<|channel|>", "<|message|>", "<|constrain|>"})

    def __init__(self, has_tools: bool) -> None:
        super().__init__()
        self._has_tools = has_tools
        self._header: str | None = None  # None: between messages, within a header
        self._body = ""

    def _try_read_to_mark(self, final: bool) -> bool:
        if self._header is None:
            return self._try_read_header(final)
        text, mark = self._take_text_before_mark(self._ENDS, final)
        if self._recipient():
            self._body += text
        else:
            (self._reasoning if "analysis" in self._header else self._content).append(text)
        if mark:
            self._finish_message()
            self._buffer = self._buffer[len(mark) :]
        return bool(mark)

    def _try_read_header(self, final: bool) -> bool:
        at = self._buffer.find("<|message|>")
        if at >= 0:
            self._header = self._buffer[:at]
            self._buffer = self._buffer[at + len("<|message|>") :]
            return True
        # A model that writes no header at all still has something to say.
        start = self._buffer.lstrip()
        if not start or any(h.startswith(start[: len(h)]) for h in self._HEADERS):
            return False
        self._header = "final"
        return True

    def _recipient(self) -> str:
        """Return the function that the message calls; empty if it is for the reader."""
        header = self._header or ""
        if not self._has_tools or " to=" not in header:
            return ""
        name = header.split(" to=", 1)[1].replace("<|", " <|").split()[0]
        return name.removeprefix("functions.")

    def _finish_message(self) -> None:
        if self._recipient():
            self._calls.append(ToolCall(self._recipient(), self._body.strip() or "{}"))
        self._header, self._body = None, ""

    def _give_out_rest(self) -> None:
        if self._header is not None:
            self._finish_message()
