"""The models that are timed: the engine's loop as it serves, and tinygrad.llm's own network.

This module imports tinygrad; see `tinygrad_runner`.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device
from tinygrad.engine.realize import Ops

from orinbench.measure.backends.backend import (
    LoadRequest,
    NonfiniteLogitsError,
    SequenceExecutor,
)
from orinbench.measure.backends.transformer_executor import TransformerExecutor
from orinllm.batching.cache import SlotStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import Runner, StepRow
from orinllm.batching.scheduler import NO_NUMBERS, Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.choose.sampling import DrawRequest, Logprobs, Sampling
from orinllm.cpu.executor import CpuRunner
from orinllm.gpu.kernels.buffers import KEY_TYPES, pages_for_tokens
from orinllm.loader import Network, SharingOptions, make_runner, plan_network
from orinllm.mmproj import network_for_pictures

_GREEDY = Sampling(temperature=0)


def make_serving_runner(network: Network, sequences: int = 1, general: bool = False) -> Runner:
    """Return the engine's runner of a network on tinygrad's default device.

    On the fused kernels it has memory for so many sequences' whole contexts.
    """
    share = SharingOptions(sequences, sequences * pages_for_tokens(network.context))
    return make_runner(network, plan_network(network, str(Device.DEFAULT)), general, share)


def load_network(asked: LoadRequest) -> Network:
    """Return the engine's network of a GGUF file."""
    trained = Network.read(asked.model).config.trained_context
    length = min(asked.max_context, trained)
    return network_for_pictures(
        Network.read(asked.model, length, KEY_TYPES[asked.key_type]), asked.mmproj
    )


def load_runner(model: str, max_context: int, sequences: int = 1, key_type: str = "f16") -> Runner:
    """Return the engine's runner of a GGUF file, as `make_serving_runner`."""
    network = load_network(LoadRequest(model, max_context, sequences, key_type))
    return make_serving_runner(network, sequences)


class RunnerExecutor(SequenceExecutor):
    """`SequenceExecutor` of the engine's runner, whose first slot it has."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.name, self.vocab_size = runner, runner.name, runner.vocab_size
        self._pages = range(pages_for_tokens(runner.context))
        self._text: list[int] = []
        self._token: int | None = None

    def fill_cache(self, tokens: Sequence[int], start: int, end: int) -> None:
        """See `SequenceExecutor`."""
        self._text = list(tokens[:end])
        for at in range(start, end, self.runner.chunk):
            self.runner.fill_pages(self._pages, tokens, at, min(at + self.runner.chunk, end))

    def prefill_and_submit_token(self, tokens: Sequence[int], start: int) -> None:
        """See `SequenceExecutor`; the last piece is as large as the scheduler's."""
        last, chunk = len(tokens) - 1, self.runner.chunk
        whole = start + max(0, last - 1 - start) // chunk * chunk
        self.fill_cache(tokens, start, whole)
        self._text, self._token = list(tokens), None
        row = StepRow(tokens[last], last, self._pages, DrawRequest(_GREEDY, self._text))
        self.runner.prefill_and_submit_token(row, whole)

    def submit_step(self, token: int | None = None, position: int = 0) -> None:
        """See `SequenceExecutor`."""
        if token is None:
            token, position = self.wait_for_token(), len(self._text)
        self._text[position:] = [token]
        self._token = None
        self.runner.submit_step(
            [StepRow(token, position, self._pages, DrawRequest(_GREEDY, self._text))]
        )

    def wait_for_token(self) -> int:
        """See `SequenceExecutor`."""
        if self._token is None:
            self._token = self.runner.wait_for_tokens()[0].token
        return self._token

    def wait_for_logits(self) -> NDArray[np.float32]:
        """See `SequenceExecutor`."""
        self.wait_for_token()
        found: NDArray[np.float32] = self.runner.last_logits()[0]
        return found

    def watch_layer_inputs(self, positions: int) -> NDArray[np.float32] | None:
        """See `SequenceExecutor`."""
        runner = self.runner
        if isinstance(runner, FusedRunner):
            config, watch = runner.executor.memory.config, runner.executor.watch_layer_inputs
        elif isinstance(runner, CpuRunner):
            config, watch = runner.path.config, runner.path.watch_layer_inputs
        else:
            return None
        given = np.full((len(config.layers) + 1, positions, config.dim), np.nan, np.float32)

        def seen(layer: int, start: int, rows: NDArray[np.float32]) -> None:
            given[layer, start : start + len(rows)] = rows

        watch(seen if positions else None)
        return given


def has_recurrent_states(runner: Runner) -> bool:
    """Say whether its model has recurrent states, which do not go back."""
    if isinstance(runner, FusedRunner):
        return runner.executor.memory.states is not None
    return isinstance(runner, CpuRunner) and bool(runner.path.config.n_state_floats)


class _TokenClock:
    """A sink that notes when tokens came (time.perf_counter_ns)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first = self.last = 0
        self.error: str | None = None

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        """See `TokenSink`."""
        self.last = time.perf_counter_ns()
        self.first = self.first or self.last
        self.tokens.append(token)
        return False

    def on_end(self, reason: str, error: str | None) -> None:
        """See `TokenSink`."""
        self.error = error


class TimedScheduler:
    """The engine's scheduler on a runner: the loop that serves, in the thread that asks.

    A slot keeps what its last sequence left, so a prompt at a depth is a sequence that goes on.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.name, self.vocab_size = runner, runner.name, runner.vocab_size
        # Its states do not go back: a prompt at a depth would be timed with the depth.
        self.recurrent = has_recurrent_states(runner)
        self.forget_prompts()

    def forget_prompts(self) -> None:
        """Forget what slots keep: the next prompts are computed from their first token on."""
        self._store = SlotStore(self.runner.slots, self.runner.context, not self.recurrent)

    def time_answers(
        self, prompts: Sequence[Sequence[int]], n_tokens: int, ways: Sequence[Sampling] = ()
    ) -> tuple[int, int, list[list[int]]]:
        """Answer prompts, all together, with so many tokens each, whatever they are.

        `ways` says how each draws its tokens; empty: the most likely ones. Returns the ns until
        each had its first token, those until all had their last, and the tokens. Raises what the
        runner raises, and NonfiniteLogitsError where logits are none.
        """
        clocks = [_TokenClock() for _ in prompts]
        each = zip(prompts, ways or [_GREEDY] * len(prompts), clocks, strict=True)
        asked = [
            ScheduledSequence([*ids], how, n_tokens, frozenset(), clock) for ids, how, clock in each
        ]
        scheduler = Scheduler(self.runner, self._store, SchedulerObserver(), len(asked))
        start = time.perf_counter_ns()
        scheduler.submit(asked)
        scheduler.stop_when_idle()
        scheduler.run()
        if scheduler.failure is not None:
            raise scheduler.failure
        for clock in clocks:
            if clock.error is not None:
                raise (NonfiniteLogitsError if clock.error == NO_NUMBERS else RuntimeError)(
                    clock.error
                )
        first, last = (max(getattr(c, name) for c in clocks) for name in ("first", "last"))
        return first - start, last - start, [clock.tokens for clock in clocks]


Timed = TimedScheduler | TransformerExecutor


def n_kernels_and_launches(linear: Any) -> tuple[int, int]:
    """Return (kernels, launches) of one run of a LINEAR.

    Kernels are programs and copies, those inside graphs included; launches are the calls that the
    host makes for them.
    """
    calls = linear.src
    kernels = 0
    for call in calls:
        body = call.src[0]
        is_graph = body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"
        kernels += len(body.src[0].src) if is_graph else 1
    return kernels, len(calls)


# What a timed region holds, by the path's name.
INCLUDED = {
    "fused": "the scheduler's turns, the forward pass, the draw of each token on the device, the "
    "copies of a prompt's token ids to the device, and of each token's id, not of its logits, to "
    "the host, while the next one is computed",
    **dict.fromkeys(
        ("cpu", "general"),
        "the scheduler's turns, the forward pass to the logits, and the draw of each token on the "
        "host",
    ),
    "jit": "copies of random token ids to the device, the forward pass, and on the device "
    "temperature, Gumbel noise and argmax over the logits",
}


def prompt_chunk_length(timed: Timed) -> int | None:
    """Return how many tokens of a prompt go through at once; None: all."""
    if isinstance(timed, TransformerExecutor):
        return timed.chunk
    return timed.runner.chunk if isinstance(timed.runner, FusedRunner) else None


def token_kernels_and_launches(timed: Timed, sequences: int = 1) -> tuple[int | None, int | None]:
    """Return them, None where they are not known; on a CPU a token is one program."""
    if isinstance(timed, TransformerExecutor):
        return n_kernels_and_launches(timed.captured_calls)
    if isinstance(timed.runner, FusedRunner):
        return n_kernels_and_launches(
            timed.runner.executor.find_or_make_decoder(sequences).next_graph.first_turn_linear
        )
    return (1, 1) if Device.DEFAULT == "CPU" else (None, None)
