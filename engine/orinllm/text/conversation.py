"""A chat's history: from a user's line to the prompt's tokens, from the answer's tokens to text."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from orinllm.errors import BadInput
from orinllm.text.answer import AnswerParser, AnswerTokenReader, Delta
from orinllm.text.template import ChatTemplate
from orinllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from orinllm.network.vision.pictures import Picture


class Conversation:
    """The messages so far.

    Attributes:
      messages: The history, without the system prompt.
      system: The system prompt; None leaves it to the template.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        system: str | None = None,
        **variables: Any,
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._variables = variables
        self.system = system
        self.messages: list[dict[str, Any]] = []

    def prepare_picture(self, source: Any) -> Picture:
        """Return a picture for a message; raises BadInput for none, or where the model is blind."""
        if self._template.picture_encoder is None:
            raise BadInput("the model reads text only; it sees with --mmproj FILE")
        return self._template.picture_encoder.prepare_picture(source)

    def add_question(self, text: str, pictures: Sequence[Picture] = ()) -> list[int]:
        """Add a user's message, with pictures before its text; return the prompt's tokens.

        Raises:
          BadInput: The template refuses the message; the history is as it was before.
        """
        content: Any = text
        if pictures:
            seen = [{"type": "image", "image": picture} for picture in pictures]
            content = [*seen, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            return self._template.encode([*system, *self.messages], **self._variables)
        except BadInput:
            self.messages.pop()
            raise

    def read_answer(self, tokens: Iterable[int]) -> Generator[Delta, None, None]:
        """Yield what the model says, as its tokens come, and add it to the history.

        Tokens after one that ends an answer are not read. An answer that is not read to its end
        (the user stopped it) is in the history as far as it went, once this iterator is closed.
        """
        parser = AnswerParser.for_template(self._template, **self._variables)
        reader = AnswerTokenReader(self._tokenizer, parser)
        said = Delta()
        try:
            for token in tokens:
                if token in self._tokenizer.end_ids:
                    break
                delta = reader.push(token)
                said += delta
                yield delta
        finally:
            rest = reader.flush()
            said += rest
            self._add_answer(said)
        yield rest

    def reset(self) -> None:
        """Forget the history; the system prompt stays."""
        self.messages.clear()

    def _add_answer(self, said: Delta) -> None:
        message = {"role": "assistant", "content": said.content}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        self.messages.append(message)
