"""A model of a GGUF file, ready to answer: `Model.load(path).generate("Hello")`."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orinllm.device import faults_of, open_device
from orinllm.errors import BadInput
from orinllm.executor import SamplingExecutor
from orinllm.launches.buffers import F16, KeyType
from orinllm.network import Network, make_executor, plan_network
from orinllm.plan import Plan
from orinllm.rendering import renderer
from orinllm.sampling import Sampling
from orinllm.speculation import Draft, Proposer
from orinllm.template import ChatTemplate
from orinllm.tokenizer import Tokenizer
from orinllm.weights import Say, quiet

Message = Mapping[str, Any]
_TOKENS = "tokenizer.ggml.tokens"
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Piece:
    """One token of an answer, and the characters that it completes."""

    token: int  # -1: characters that were held back until the answer ended
    text: str


@dataclass(frozen=True)
class Header:
    """A file's model and its text, as the file describes them; nothing of it is on a device."""

    network: Network
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model continues text and does not chat

    @staticmethod
    def read(path: str | Path, context: int | None = None, kv: KeyType = F16) -> "Header":
        """Read a file; raises BadInput, one line that begins with the path, for a bad one."""
        return Header.of(Network.read(path, context, kv))

    @staticmethod
    def of(network: Network) -> "Header":
        """Read the text's part of a file; raises BadInput, one line that begins with its path."""
        path, metadata = network.gguf.path, network.gguf.metadata
        has_template = "tokenizer.chat_template" in metadata
        if has_template:
            renderer().start()  # while the vocabulary is read
        try:
            tokenizer = Tokenizer.from_metadata(metadata)
            template = ChatTemplate.from_metadata(metadata, tokenizer) if has_template else None
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        if tokenizer.vocab_size > (rows := network.config.vocab_size):
            raise BadInput(
                f"{path}: its vocabulary has {tokenizer.vocab_size} tokens and its matrices {rows} "
                "rows; a row for each token was expected"
            )
        return Header(network, tokenizer, template)


class Generation:
    """An answer while it grows: iterate over its pieces. `cancel` ends it at the next one.

    tokens: what was said so far, without the token that ends an answer.
    n_prompt, n_cached: tokens of the prompt, and how many of them the model already knew (0 before
      the first piece).
    n_proposed, n_accepted: tokens that speculation proposed, and those that it proposed right.
    finish_reason: "stop" (the model ended it, or a stop text came), "length", "cancelled"; None
      while it goes on.
    """

    def __init__(self, request: "_Request") -> None:
        self.n_prompt, self.n_cached = len(request.ids), 0
        self.n_proposed = self.n_accepted = 0
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._pieces, self._cancelled = request.pieces(self), False

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces; raises BadInput if the model began another answer meanwhile."""
        while not self._cancelled:
            piece = next(self._pieces, None)
            if piece is None:
                return
            if self._cancelled:
                break
            if piece.token >= 0:
                self.tokens.append(piece.token)
            yield piece
        self.finish_reason = self.finish_reason or "cancelled"

    def cancel(self) -> None:
        """End the answer; what was said stays. May be called from a signal's handler."""
        self._cancelled = True

    @property
    def text(self) -> str:
        """The rest of the answer; waits until it has ended."""
        return "".join(piece.text for piece in self)


class Model:
    """A model on a device, one request at a time. Several models may share a process."""

    def __init__(self, header: Header, plan: Plan, executor: SamplingExecutor) -> None:
        self.header, self.plan, self.executor = header, plan, executor
        self.tokenizer, self.template = header.tokenizer, header.template
        self._held: list[int] = []  # tokens whose keys and values the executor has
        self._current: object = None  # the request that has the executor
        self.proposer: Proposer | None = None

    @staticmethod
    def load(
        path: str | Path,
        *,
        device: str | Callable[[], str] | None = None,
        context: int | None = None,
        general: bool = False,
        kv: KeyType = F16,
        say: Say = quiet,
    ) -> "Model":
        """Load a GGUF file onto a tinygrad device (None: the best that opens).

        `device` may be what returns the name of one that is open, as when another thread opens it.

        `context` is how many tokens a sequence may have, prompt and answer; `general` leaves the
        fused kernels out; `kv` is the type of keys and values. `say` hears how far it is. Raises
        BadInput for a file, a context or a type that cannot be.
        """
        network = Network.read(path, context, kv)
        with ThreadPoolExecutor(1) as pool:
            header = pool.submit(Header.of, network)  # while the device opens and takes the weights
            plan = plan_network(network, device() if callable(device) else open_device(device))
            with faults_of(plan.device):
                executor = make_executor(network, plan, general, say)
        return Model(header.result(), plan, executor)

    def speculate(self, proposer: Proposer | None) -> None:
        """Compute several tokens at once where a proposer guesses them; the text stays the same.

        An answer with penalties is computed token by token. Raises BadInput where the executor
        takes one token at a time.
        """
        if proposer is not None and self.executor.most_verified == 1:
            raise BadInput(
                f"speculation: the general path on {self.plan.device} takes one token at a time; "
                "the fused kernels and the CPU take several"
            )
        self.proposer = proposer

    def draft(self, path: str | Path, say: Say = quiet) -> Proposer:
        """Load a smaller model of the same vocabulary that proposes, onto the same device.

        Raises BadInput for a file that is none.
        """
        general = self.executor.name == "general"
        return load_draft(self.header, path, self.plan.device, general, say)

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
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """Start an answer to a text, to messages ({"role": ..., "content": ...}) or to tokens.

        Ends where the model ends it, before a text of `stop` (one or several), after `max_tokens`,
        or with the context. Raises BadInput for a prompt that does not fit the context.
        """
        ids = self.encode(prompt)
        most = self.header.network.config.vocab_size
        if wrong := [token for token in ids if not 0 <= token < most]:
            raise BadInput(f"the prompt has a token {wrong[0]}, which is not from 0 to {most - 1}")
        if not ids:
            raise BadInput("the prompt is empty: at least one token is needed")
        if len(ids) >= self.header.network.context:
            raise BadInput(
                f"the prompt has {len(ids)} tokens and leaves no room in a context of "
                f"{self.header.network.context}"
            )
        most = self.header.network.context - len(ids)
        most = most if max_tokens is None else min(most, max_tokens)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(stops):
            raise BadInput("stop: an empty text, which is everywhere; leave it out")
        return Generation(_Request(self, ids, sampling or Sampling(), most, stops))

    def begin(self, request: object, ids: Sequence[int]) -> int:
        """Give the executor to a request; return how many of its tokens are already there."""
        self._current = request
        pairs = zip(ids, self._held, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        cached = min(same, len(ids) - 1)
        if not self.header.network.config.layers and cached < len(self._held):
            cached = 0  # tinygrad.llm's networks may have recurrent states, which cannot go back
        self._held = list(ids[:cached])
        return cached

    def hold(self, request: object, tokens: Sequence[int]) -> None:
        """Remember what the executor holds; raises BadInput if it is another request's by now."""
        if request is not self._current:
            raise BadInput(
                "another answer of this model began before this one had ended; a model gives one "
                "at a time"
            )
        self._held = list(tokens)


def load_draft(
    header: Header, path: str | Path, device: str, general: bool = False, say: Say = quiet
) -> Draft:
    """Load a smaller model of a model's vocabulary, which proposes; raises BadInput for others."""
    drafts = Header.read(path, None)
    own, other = (h.network.gguf.metadata.get(_TOKENS) for h in (header, drafts))
    if own is None or other is None or list(own) != list(other):
        raise BadInput(
            f"{path}: its vocabulary is not that of {header.network.gguf.path}; a draft model has "
            "the same tokens"
        )
    context = min(header.network.context, drafts.network.config.trained_context)
    network = Network.read(path, context)
    return Draft(make_executor(network, plan_network(network, device), general, say))


@dataclass(frozen=True, eq=False)
class _Request:
    """One request on a model's executor: a prompt's tokens, and at most so many of an answer."""

    model: Model
    ids: list[int]
    sampling: Sampling
    most: int
    stop: tuple[str, ...]

    def pieces(self, generation: Generation) -> Iterator[Piece]:
        """Yield the answer; its end and what was known before are noted in `generation`.

        Raises DeviceFault where the device fails.
        """
        stream, held_back = self.model.tokenizer.stream(), ""
        longest = max(map(len, self.stop), default=1) - 1
        tokens = self._tokens(generation)
        while (token := self._next(tokens)) is not None:
            if token in self.model.tokenizer.end_ids:
                generation.finish_reason = "stop"
                break
            text = held_back + stream.push(token)
            at = min((i for s in self.stop if (i := text.find(s)) >= 0), default=-1)
            if at >= 0:
                generation.finish_reason = "stop"
                yield Piece(token, text[:at])
                return
            keep = _begun(text, self.stop, longest)
            held_back = text[len(text) - keep :]
            yield Piece(token, text[: len(text) - keep])
        else:
            generation.finish_reason = "length"
        if rest := held_back + stream.flush():
            yield Piece(-1, rest)

    def _next(self, tokens: Iterator[int]) -> int | None:
        with faults_of(self.model.plan.device):
            return next(tokens, None)

    def _tokens(self, generation: Generation) -> Iterator[int]:
        """Yield tokens, at most `most`; the model remembers what the executor holds."""
        executor, ids = self.model.executor, list(self.ids)
        generation.n_cached = cached = self.model.begin(self, ids)
        executor.sample(self.sampling, ids)
        executor.begin(ids, cached)
        if self.model.proposer is not None and not self.sampling.penalized:
            yield from self._proposed(self.model.proposer, generation, ids)
            return
        tokens = executor.follow(self.most)
        for _ in range(self.most):
            self.model.hold(self, ids)
            token = self._checked(next(tokens))
            yield token
            ids.append(token)

    def _proposed(
        self, proposer: Proposer, generation: Generation, ids: list[int]
    ) -> Iterator[int]:
        """Yield tokens, several of a pass where the proposer guessed them."""
        executor, end = self.model.executor, len(ids) + self.most
        proposer.begin(self.sampling)
        if self.most:
            self.model.hold(self, ids)
            ids.append(self._checked(executor.token()))
            yield ids[-1]
        while len(ids) < end:
            self.model.hold(self, ids[:-1])
            room = min(executor.most_verified, end - len(ids)) - 1
            proposed = proposer.propose(ids, room) if room else []
            drawn = executor.verify([ids[-1], *proposed], len(ids) - 1)
            pairs = zip(proposed, drawn, strict=False)
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            generation.n_proposed += len(proposed)
            generation.n_accepted += right
            for token in drawn[: right + 1]:
                self.model.hold(self, ids)
                yield self._checked(token)
                ids.append(token)

    def _checked(self, token: int) -> int:
        if token < 0:
            raise BadInput(
                f"{self.model.header.network.gguf.path}: its logits are no numbers; the file is "
                "damaged, or a kernel is wrong (orinbench check tells)"
            )
        return token


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
