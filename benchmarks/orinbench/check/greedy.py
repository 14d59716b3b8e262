"""Greedy decoding with logits by the engines that the correctness gate judges.

`decode_greedily` runs in a worker, which `tinygrad_decode_function`'s result starts and asks; that
of `llama_cpp_decode_function` asks a `llama-server`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orinbench.errors import BenchError
from orinbench.measure.backends.backend import BackendError, LoadRequest, SequenceExecutor
from orinbench.measure.backends.worker_process import WorkerProcess
from orinllm.progress import Say, say_nothing


@dataclass(frozen=True)
class GreedyGeneration:
    """Tokens decoded greedily, and what the engine thought of each position's alternatives."""

    tokens: list[int]
    # (tokens, vocab_size). Logits, or with `normalized` their log-softmax; NaN where unknown.
    logits: NDArray[np.float64]
    normalized: bool = False
    fused: bool = False  # by the hand-written kernels of patched tinygrad
    # What each layer was given, and what the last one left, of prompt and tokens: (layers + 1,
    # positions, width), NaN where it was not computed. None: the engine does not say.
    layers: NDArray[np.float32] | None = None


def prefixed_say(say: Say, where: str) -> Say:
    """Return what says `where` in front of each text."""
    return lambda text: say(f"{where}: {text}")


# From prompts and a number of tokens to one generation for each prompt.
DecodeFunction = Callable[[Sequence[Sequence[int]], int], list[GreedyGeneration]]


# Lengths of prompts that are cut. Longer ones have several chunks anyway, parts of shorter ones
# would be steps.
_CUT = range(32, 512)


def decode_greedily(
    executor: SequenceExecutor, prompt: Sequence[int], n_tokens: int, say: Say = say_nothing
) -> GreedyGeneration:
    """Decode greedily, the path that is timed; then replay for the logits, and for the layers.

    Each time a prompt ends with its answer's first token, as a server's does. A replay feeds the
    same tokens, one by one, behind the prompt, whose kernels leave keys and values, or recurrent
    states, which do not go back: so these are judged as well. The last one goes layer by layer;
    logits of the other, which goes as tokens do, must fit what it saw.
    """
    last = len(prompt) - 1
    # Later tokens of a prompt see earlier ones that another launch has computed.
    cut = last // 2 if len(prompt) in _CUT else 0

    def begin() -> None:
        executor.fill_cache(prompt, 0, cut)
        executor.prefill_and_submit_token(prompt, cut)

    def replayed() -> Iterator[int]:
        """Yield the number of each token when it is computed behind those that came before."""
        begin()
        yield 1
        for number, token in enumerate(tokens[:-1], 1):
            executor.submit_step(token, last + number)
            yield number + 1

    say(f"reading {len(prompt)} tokens")
    begin()
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        tokens.append(executor.wait_for_token())
        say(f"token {len(tokens)} of {n_tokens}")
        if len(tokens) < n_tokens:
            executor.submit_step()
    logits = []
    for number in replayed():
        logits.append(executor.wait_for_logits().astype(np.float64))
        say(f"logits {number} of {n_tokens}")
    if (layers := executor.watch_layer_inputs(last + n_tokens)) is not None:
        for number in replayed():
            executor.wait_for_token()
            say(f"layers of token {number} of {n_tokens}")
        executor.watch_layer_inputs(0)
    return GreedyGeneration(tokens, np.stack(logits), False, executor.name == "fused", layers)


def needed_context(prompts: Sequence[Sequence[int]], n_tokens: int) -> int:
    """Return the context that engine and reference run with: a rotation may depend on it."""
    return max(len(prompt) for prompt in prompts) + n_tokens + 1


def tinygrad_decode_function(
    model: Path,
    start: Callable[..., WorkerProcess],
    say: Say = say_nothing,
    general: bool = False,
    key_type: str = "f16",
) -> DecodeFunction:
    """Return an engine that loads `model` in a worker that `start` starts.

    `general` takes tinygrad.llm's own network, `key_type` is of the engine's keys and values. `say`
    hears how far it is. The engine raises BenchError, with the worker's last line, if that fails.
    """

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        load = LoadRequest(str(model), needed_context(prompts, n_tokens), 1, key_type, general)
        with start(say=say) as worker:
            try:
                return worker.runner.generate_greedily(load, prompts, n_tokens)
            except BackendError as error:
                raise BenchError(f"tinygrad: {error}") from error

    return engine
