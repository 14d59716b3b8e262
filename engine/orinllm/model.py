"""A model of a GGUF file, ready to answer: `Model.load(path).generate("Hello")`."""

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, SupportsIndex

from orinllm.batching.cache import PageStore
from orinllm.batching.proposers import DraftProposer, MtpProposer, Proposer
from orinllm.batching.runner import Runner
from orinllm.batching.scheduler import NO_NUMBERS, NO_ROWS, Scheduler, SchedulerClosedError
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver, TokenConstraint
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.choose.sampling import Logprobs, Sampling
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.device import open_and_name_device, raising_device_faults
from orinllm.gpu.kernels.buffers import F16, KvCacheType
from orinllm.gpu.path_plan import PathPlan
from orinllm.loader import MTP, Network, SharingOptions, make_page_store, make_runner, plan_network
from orinllm.network.vision.pictures import is_picture_row
from orinllm.progress import Say, say_nothing
from orinllm.text.answer import StopTextFilter
from orinllm.text.template import ChatTemplate, shared_renderer
from orinllm.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Iterable[SupportsIndex] | Iterable[Message]
_TOKENS = "tokenizer.ggml.tokens"
_PROMPTS = "a text, a list or an array of tokens, or a list of messages was expected"
# Iterable, but what they yield is no list of tokens: bytes of a text, or no order.
_NO_LISTS = (bytes, bytearray, memoryview, Mapping, AbstractSet)
# Seconds that the end of a model waits for the step under way.
_LAST_SECONDS = 5.0


@dataclass(frozen=True)
class AnswerToken:
    """One token of an answer, and the characters that it completes."""

    token: int  # -1: characters that were held back until the answer ended
    text: str


@dataclass(frozen=True)
class ModelDescription:
    """A file's model and its text, as the file describes them; nothing of it is on a device."""

    network: Network
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model continues text and does not chat

    @staticmethod
    def read(
        path: str | Path, context: int | None = None, kv: KvCacheType = F16
    ) -> "ModelDescription":
        """Read a file; raises BadInput, one line that begins with the path, for a bad one."""
        return ModelDescription.from_network(Network.read(path, context, kv))

    @staticmethod
    def from_network(network: Network) -> "ModelDescription":
        """Read the text's part of a file; raises BadInput, one line that begins with its path."""
        path, metadata = network.gguf.path, network.gguf.metadata
        has_template = "tokenizer.chat_template" in metadata
        if has_template:
            shared_renderer().start_or_get_process()  # while the vocabulary is read
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
        return ModelDescription(network, tokenizer, template)


@dataclass(frozen=True)
class _AnswerEnd:
    """The end of an answer: why, the characters that were held back, and what failed."""

    reason: str
    rest: str = ""
    error: str | None = None


class _AnswerSink:
    """An answer's sink: tokens become pieces in the scheduler's thread, and wait to be read."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.queue = SimpleQueue[AnswerToken | _AnswerEnd]()
        self._stream, self._stops, self._stopped = (
            tokenizer.new_stream(),
            StopTextFilter(stop),
            False,
        )

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """See `TokenSink`."""
        text, self._stopped = self._stops.push(self._stream.push(token))
        self.queue.put(AnswerToken(token, text))
        return self._stopped

    def on_end(self, reason: str, error: str | None) -> None:
        """See `TokenSink`."""
        rest = ""
        if not self._stopped and error is None:
            rest, stopped = self._stops.push(self._stream.flush())
            rest += "" if stopped else self._stops.flush()
        self.queue.put(_AnswerEnd("cancelled" if reason == "cut" else reason, rest, error))


class Generation:
    """An answer while it grows: iterate over its pieces. `cancel` ends it at the next one.

    It grows whether it is read or not, until nobody has it any more.

    tokens: what was read so far, without the token that ends an answer.
    finish_reason: "stop" (the model ended it, or a stop text came), "length", "cancelled"; None
      while it goes on.
    """

    def __init__(
        self, sequence: ScheduledSequence, pieces: _AnswerSink, model: "Model", scheduler: Scheduler
    ) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self._sequence, self._queue, self._scheduler = sequence, pieces.queue, scheduler
        self._model, self._cancelled = model, False
        weakref.finalize(self, scheduler.cancel, [sequence]).atexit = False

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._sequence.n_prompt

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that the model already knew; 0 before the first piece."""
        return self._sequence.n_cached

    @property
    def n_proposed(self) -> int:
        """Tokens that speculation proposed."""
        return self._sequence.n_guessed

    @property
    def n_accepted(self) -> int:
        """Tokens that speculation proposed right."""
        return self._sequence.n_right

    def __iter__(self) -> Iterator[AnswerToken]:
        """Yield pieces; raises DeviceFault where the device fails, BadInput for a damaged file."""
        while self.finish_reason is None:
            try:
                found = self._queue.get()
            except BaseException:  # Ctrl-C
                self.cancel()
                raise
            if self._cancelled:
                found = _AnswerEnd("cancelled")
            if isinstance(found, AnswerToken):
                self.tokens.append(found.token)
                yield found
                continue
            self.finish_reason = found.reason
            if found.error is not None:
                self._model.raise_answer_error(found.error)
            if found.rest:
                yield AnswerToken(-1, found.rest)

    def cancel(self) -> None:
        """End the answer; what was said stays. May be called from a signal's handler."""
        self._cancelled = True
        self._queue.put(_AnswerEnd("cancelled"))
        self._scheduler.cancel([self._sequence])

    @property
    def text(self) -> str:
        """The rest of the answer; waits until it has ended."""
        return "".join(piece.text for piece in self)


class Model:
    """A model on a device, for any number of threads. Several models may share a process.

    Answers are computed together, by a thread of the model's own: it is a client of the scheduler
    that serves (batching/scheduler.py), and each `generate` one of its requests.
    """

    def __init__(
        self, description: ModelDescription, plan: PathPlan, runner: Runner, store: PageStore
    ) -> None:
        self.description, self.plan, self.runner = description, plan, runner
        self.tokenizer, self.template = description.tokenizer, description.template
        self._guesses = SpeculatingRunner(runner)
        self._scheduler = Scheduler(self._guesses, store, SchedulerObserver(), sys.maxsize)
        thread = threading.Thread(target=self._scheduler.run, name="scheduler", daemon=True)
        self.close = weakref.finalize(self, _end_scheduler, self._scheduler, thread)
        thread.start()

    @staticmethod
    def load(
        path: str | Path,
        *,
        device: str | Callable[[], str] | None = None,
        context: int | None = None,
        general: bool = False,
        kv: KvCacheType = F16,
        mmproj: str | Path | None = None,
        say: Say = say_nothing,
    ) -> "Model":
        """Load a GGUF file onto a tinygrad device (None: the best that opens).

        `device` may be what returns the name of one that is open, as when another thread opens it.

        `context` is how many tokens a sequence may have, prompt and answer, and how many all that
        are answered at once have together; `general` leaves the fused kernels out; `kv` is the type
        of keys and values; with the file `mmproj` it sees pictures. `say` hears how far it is.
        Raises BadInput for a file, a context or a type that cannot be.
        """
        network = Network.read(path, context, kv)
        if mmproj is not None:
            from orinllm.mmproj import (  # decoders of pictures take their time
                enable_pictures,
                network_for_pictures,
            )

            network = network_for_pictures(network, mmproj)
        with ThreadPoolExecutor(1) as pool:
            # While the device opens and takes the weights.
            description = pool.submit(ModelDescription.from_network, network)
            plan = plan_network(
                network, device() if callable(device) else open_and_name_device(device)
            )
            runner = make_runner(network, plan, general, say=say)
        if mmproj is not None:
            enable_pictures(description.result().template, mmproj, network, plan.device)
        return Model(description.result(), plan, runner, make_page_store(runner, network))

    def speculate(self, proposer: Proposer | None) -> None:
        """Compute several tokens at once where a proposer guesses them; the text stays the same.

        An answer with penalties is computed token by token, and so are several at once. Raises
        BadInput where the path takes one token at a time.
        """
        if proposer is not None:
            require_takes_guesses(self.runner, self.plan, "speculation")
        self._guesses.proposer = proposer

    def load_proposer(self, path: str | Path, say: Say = say_nothing) -> Proposer:
        """Load a smaller model of the same vocabulary that proposes, onto the same device.

        "mtp" is the block that the model's own file has for it, whose own file may be given, too.
        Raises BadInput for a file that is none, or has none, and for a block while answers grow.
        """
        if (block := self.description.network.mtp_block_file(path)) is not None:
            if self._scheduler.n_running or self._scheduler.n_waiting:
                raise BadInput(f"{path}: a block is loaded while no answer grows; wait for those")
            proposer = load_mtp_proposer(self.description, self.plan, self.runner, block)
            # It takes something of each token, which is kept from now on.
            self._scheduler.store = make_page_store(self.runner, self.description.network)
            return proposer
        general = self.runner.name == "general"
        return load_draft_proposer(self.description, path, self.plan.device, general, say)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a text, of messages, or of tokens themselves (a list, an array).

        Raises BadInput for what is none of these, and for messages that have no template.
        """
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_id
            start = [bos] if self.tokenizer.add_bos and bos is not None else []
            return start + self.tokenizer.encode(prompt)
        one = getattr(prompt, "shape", None) == ()  # an array without dimensions
        if isinstance(prompt, _NO_LISTS) or not isinstance(prompt, Iterable) or one:
            raise BadInput(f"the prompt is of type {type(prompt).__name__}; {_PROMPTS}")
        parts: list[Any] = list(prompt)
        if not parts or not isinstance(parts[0], Mapping):
            return [_checked_token(at, part) for at, part in enumerate(parts)]
        for at, part in enumerate(parts):
            if not isinstance(part, Mapping):
                what = type(part).__name__
                raise BadInput(f"the prompt has a {what} at {at}, among messages; {_PROMPTS}")
        if self.template is None:
            raise BadInput(
                f"{self.description.network.gguf.path}: has no chat template; it continues text, "
                "but takes no messages"
            )
        return self.template.encode(parts)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        constraint: TokenConstraint | None = None,
    ) -> Generation:
        """Start an answer to a text, to messages ({"role": ..., "content": ...}) or to tokens.

        A part of a content {"type": "image", "image": ...} is a picture: a path, a file's bytes, a
        PIL image, or an array (height, width, 3) of bytes.

        Ends where the model ends it, before a text of `stop` (one or several), after `max_tokens`,
        with the context, or where `constraint` (text/grammar.py) says so. Raises BadInput for a
        prompt that does not fit the context, and DeviceFault where the device has failed before.
        """
        how = Sampling() if sampling is None else sampling
        if not isinstance(how, Sampling):
            raise BadInput(f"sampling: a {type(how).__name__}; a Sampling was expected")
        if constraint is not None and not isinstance(constraint, TokenConstraint):
            what = type(constraint).__name__
            raise BadInput(f"constraint: a {what}; one of text/grammar.py was expected")
        ids = self.encode(prompt)
        most = self._checked_most_answer_tokens(ids, how)
        if max_tokens is not None:
            if not isinstance(max_tokens, Integral) or max_tokens < 1:
                raise BadInput(f"max_tokens: {max_tokens!r} was given; 1 or more were expected")
            most = min(most, int(max_tokens))
        stops = _checked_stop_texts(stop)
        pieces = _AnswerSink(self.tokenizer, stops)
        ends = frozenset(self.tokenizer.end_ids)
        how = how.without_tokens(self.tokenizer.suppressed)
        sequence = ScheduledSequence(ids, how, most, ends, pieces, constraint)
        try:
            self._scheduler.submit([sequence])
        except SchedulerClosedError:
            self.raise_answer_error("the model was closed")
        return Generation(sequence, pieces, self, self._scheduler)

    def _checked_most_answer_tokens(self, ids: list[int], how: Sampling) -> int:
        """Return how many tokens an answer may have; raises BadInput for what cannot be asked."""
        network = self.description.network
        most = network.config.vocab_size
        if wrong := [token for token in ids if not (0 <= token < most or is_picture_row(token))]:
            raise BadInput(f"the prompt has a token {wrong[0]}, which is not from 0 to {most - 1}")
        for token in how.logit_bias:
            if not 0 <= token < most:
                raise BadInput(f"logit_bias: token {token} is not from 0 to {most - 1}")
        if not ids:
            raise BadInput("the prompt is empty: at least one token is needed")
        if len(ids) >= network.context:
            raise BadInput(
                f"the prompt has {len(ids)} tokens and leaves no room in a context of "
                f"{network.context}"
            )
        return network.context - len(ids)

    def raise_answer_error(self, why: str) -> NoReturn:
        """Raise what an answer ended with: DeviceFault, or BadInput for a damaged file."""
        if (failure := self._scheduler.failure) is not None:
            with raising_device_faults(self.plan.device):
                raise failure
        encoder = None if self.template is None else self.template.picture_encoder
        if why == NO_NUMBERS or (why == NO_ROWS and encoder is not None):
            own = self.description.network.gguf
            file = own if why == NO_NUMBERS or encoder is None else encoder.gguf
            what = "its logits" if why == NO_NUMBERS else "its rows of a picture"
            raise BadInput(
                f"{file.path}: {what} are no numbers; the file is damaged, or a kernel is wrong "
                "(orinbench check tells)"
            )
        raise RuntimeError(why)


def _end_scheduler(scheduler: Scheduler, thread: threading.Thread) -> None:
    """End all answers, and the thread, which may be the one that lets go of the model."""
    scheduler.end_all()
    scheduler.stop_when_idle()
    if thread is not threading.current_thread():
        thread.join(_LAST_SECONDS)


def _checked_stop_texts(stop: object) -> tuple[str, ...]:
    """Return the texts before which an answer ends; raises BadInput for what is none."""
    texts = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    for text in texts:
        if not isinstance(text, str):
            raise BadInput(f"stop: a text or several were expected, not {type(text).__name__}")
        if not text:
            raise BadInput("stop: an empty text, which is everywhere; leave it out")
    return texts


def _checked_token(at: int, part: object) -> int:
    if isinstance(part, Mapping):
        raise BadInput(f"the prompt has a message at {at}, among tokens; {_PROMPTS}")
    with suppress(TypeError):
        if not isinstance(part, bool):
            return operator.index(part)  # type: ignore[arg-type]
    raise BadInput(f"the prompt has a {type(part).__name__} at {at}; {_PROMPTS}")


def require_takes_guesses(runner: Runner, plan: PathPlan, what: str) -> None:
    """Raise BadInput, which begins with `what`, where a path takes one token at a time."""
    if runner.most_verified_tokens > 1:
        return
    raise BadInput(
        f"{what}: the {runner.name} path on {plan.device} takes one token at a time; the fused "
        "kernels and the CPU take several"
    )


def load_mtp_proposer(
    description: ModelDescription, plan: PathPlan, runner: Runner, gguf: GGUF
) -> MtpProposer:
    """Load a model's block that proposes, which is in a file, for what runs the model.

    Raises BadInput where there is none, or the path takes one token at a time.
    """
    config = description.network.require_mtp_block_config(gguf)
    what = f"--draft {MTP if gguf is description.network.gguf else gguf.path}"
    require_takes_guesses(runner, plan, what)
    from orinllm.cpu.executor import CpuRunner

    if isinstance(runner, CpuRunner):
        from orinllm.cpu.mtp_block import CpuMtpBlock

        return MtpProposer(CpuMtpBlock(runner.path, gguf, config))
    from orinllm.batching.fused_runner import FusedRunner

    assert isinstance(runner, FusedRunner)
    with raising_device_faults(plan.device):
        return MtpProposer(runner.make_mtp_block(description.network, gguf, config))


def load_draft_proposer(
    description: ModelDescription,
    path: str | Path,
    device: str,
    general: bool = False,
    say: Say = say_nothing,
) -> DraftProposer:
    """Load a smaller model of a model's vocabulary, which proposes; raises BadInput for others."""
    drafts = ModelDescription.read(path, None)
    own, other = (h.network.gguf.metadata.get(_TOKENS) for h in (description, drafts))
    if own is None or other is None or list(own) != list(other):
        raise BadInput(
            f"{path}: its vocabulary is not that of {description.network.gguf.path}; a draft model "
            "has the same tokens"
        )
    if drafts.network.config.n_state_floats:
        raise BadInput(
            f"{path}: {drafts.network.config.architecture} has recurrent states, which do not go "
            "back to where a guess was wrong; a draft model has keys and values alone"
        )
    context = min(description.network.context, drafts.network.config.trained_context)
    network = Network.read(path, context)
    share = SharingOptions(slots=1)
    return DraftProposer(make_runner(network, plan_network(network, device), general, share, say))
