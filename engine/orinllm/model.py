"""A model of a GGUF file, ready to answer: `Model.load(path).generate("Hello")`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad import Device

from orinllm.errors import BadInput
from orinllm.executor import Executor
from orinllm.network import Network, make_executor, plan_network
from orinllm.plan import Plan
from orinllm.sampling import Sampling, sample
from orinllm.template import ChatTemplate
from orinllm.tokenizer import Tokenizer
from orinllm.weights import Say, quiet

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Piece:
    """One token of an answer, and the characters that it completes."""

    token: int  # -1: characters that were held back until the answer ended
    text: str


@dataclass(frozen=True)
class Header:
    """What a file says of its model and of its text; nothing of it is on a device."""

    network: Network
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model continues text and does not chat

    @staticmethod
    def read(path: str | Path, context: int | None = None) -> "Header":
        """Read a file; raises BadInput, one line that begins with the path, for a bad one."""
        network = Network.read(path, context)
        metadata = network.gguf.metadata
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
            has_template = "tokenizer.chat_template" in metadata
            template = ChatTemplate.from_metadata(metadata, tokenizer) if has_template else None
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return Header(network, tokenizer, template)


class Generation:
    """An answer while it grows: iterate over its pieces. `cancel` ends it at the next one.

    finish_reason: "stop" (the model ended it, or a stop text came), "length", "cancelled"; None
    while it goes on.
    """

    def __init__(self, pieces: Iterator[Piece], n_prompt: int, n_cached: int) -> None:
        self.n_prompt, self.n_cached = n_prompt, n_cached
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._pieces, self._cancelled = pieces, False

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            if piece.token >= 0:
                self.tokens.append(piece.token)
            yield piece
            if self._cancelled:
                self.finish_reason = "cancelled"
                return

    def cancel(self) -> None:
        """End the answer; what was said stays."""
        self._cancelled = True

    @property
    def text(self) -> str:
        """All of the answer; waits until it has ended."""
        return "".join(piece.text for piece in self)


class Model:
    """A model on a device, one request at a time. Several models may share a process."""

    def __init__(self, header: Header, plan: Plan, executor: Executor) -> None:
        self.header, self.plan, self.executor = header, plan, executor
        self.tokenizer, self.template = header.tokenizer, header.template
        self._held: list[int] = []  # tokens whose keys and values the executor has

    @staticmethod
    def load(
        path: str | Path,
        *,
        device: str | None = None,
        context: int | None = None,
        general: bool = False,
        say: Say = quiet,
    ) -> "Model":
        """Load a GGUF file onto a tinygrad device (None: the best that opens).

        `context` is how many tokens a sequence may have, prompt and answer; `general` leaves the
        fused kernels out. `say` hears how far it is. Raises BadInput for a file or a context that
        cannot be.
        """
        header = Header.read(path, context)
        plan = plan_network(header.network, device or str(Device.DEFAULT))
        return Model(header, plan, make_executor(header.network, plan, general, say))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a text, of messages, or of tokens themselves."""
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_id
            start = [bos] if self.tokenizer.add_bos and bos is not None else []
            return start + self.tokenizer.encode(prompt)
        ids: list[int] = []
        messages: list[Message] = []
        for part in prompt:
            (ids if isinstance(part, int) else messages).append(part)  # type: ignore[arg-type]
        if not messages:
            return ids
        if self.template is None:
            raise BadInput(
                f"{self.header.network.gguf.path}: has no chat template; it continues text, "
                "but takes no messages"
            )
        return self.template.encode(messages)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Start an answer to a text, to messages ({"role": ..., "content": ...}) or to tokens.

        Ends where the model ends it, before a text of `stop`, after `max_tokens`, or with the
        context. Raises BadInput for a prompt that does not fit the context.
        """
        ids = self.encode(prompt)
        if not ids:
            raise BadInput("the prompt is empty: at least one token is needed")
        if len(ids) >= self.header.network.context:
            raise BadInput(
                f"the prompt has {len(ids)} tokens and leaves no room in a context of "
                f"{self.header.network.context}"
            )
        most = self.header.network.context - len(ids)
        most = most if max_tokens is None else min(most, max_tokens)
        pairs = zip(ids, self._held, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        cached = min(same, len(ids) - 1)
        if not self.header.network.config.layers and cached < len(self._held):
            cached = 0  # tinygrad.llm's networks may have recurrent states, which cannot go back
        job = _Job(self, ids, cached, sampling or Sampling(), most)
        return job.start(tuple(stop))

    def held(self, tokens: Sequence[int]) -> None:
        """Remember which tokens' keys and values the executor has."""
        self._held = list(tokens)


class _Job:
    """One request on a model's executor."""

    def __init__(
        self, model: Model, ids: list[int], cached: int, sampling: Sampling, most: int
    ) -> None:
        self.model, self.ids, self.cached = model, ids, cached
        self.sampling, self.most = sampling, most

    def start(self, stop: tuple[str, ...]) -> Generation:
        generation: Generation

        def pieces() -> Iterator[Piece]:
            stream, held_back = self.model.tokenizer.stream(), ""
            longest = max(map(len, stop), default=1) - 1
            for token in self._tokens():
                if token in self.model.tokenizer.end_ids:
                    generation.finish_reason = "stop"
                    break
                text = held_back + stream.push(token)
                at = min((i for s in stop if (i := text.find(s)) >= 0), default=-1)
                if at >= 0:
                    generation.finish_reason = "stop"
                    yield Piece(token, text[:at])
                    return
                keep = _begun(text, stop, longest)
                held_back = text[len(text) - keep :]
                yield Piece(token, text[: len(text) - keep])
            else:
                generation.finish_reason = "length"
            if rest := held_back + stream.flush():
                yield Piece(-1, rest)

        generation = Generation(pieces(), len(self.ids), self.cached)
        return generation

    def _tokens(self) -> Iterator[int]:
        """Yield tokens, at most `most`; the model remembers what the executor holds."""
        executor, ids = self.model.executor, list(self.ids)
        self.model.held(ids[: self.cached])
        executor.fill(ids, self.cached, len(ids) - 1)
        executor.step(ids[-1], len(ids) - 1)
        for index in range(self.most):
            self.model.held(ids)
            token = self._next(ids, index)
            if token < 0:
                raise ValueError("the model's logits are no numbers: the file or a kernel is bad")
            yield token
            if index + 1 < self.most:
                ids.append(token)
                if self.sampling.greedy:
                    executor.step()
                else:
                    executor.step(token, len(ids) - 1)

    def _next(self, ids: list[int], index: int) -> int:
        if self.sampling.greedy:
            return self.model.executor.token()
        return sample(self.model.executor.logits(), self.sampling, ids, index)


def _begun(text: str, stop: tuple[str, ...], longest: int) -> int:
    """Return how many last characters may be the beginning of a stop text."""
    return next(
        (
            n
            for n in range(min(longest, len(text)), 0, -1)
            if any(s.startswith(text[-n:]) for s in stop)
        ),
        0,
    )
