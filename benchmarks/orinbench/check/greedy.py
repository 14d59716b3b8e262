"""Greedy decoding with logits by the engines that the correctness gate judges.

`tinygrad_greedy` runs in a worker, which `tinygrad_engine` starts and asks. `llama_cpp_engine` asks
a `llama-server`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orinbench.errors import BenchError
from orinbench.measure.backends.backend import BackendDiedError, Load
from orinbench.measure.backends.process import WorkerProcess
from orinllm.progress import Say, quiet

if TYPE_CHECKING:
    from orinbench.measure.backends.timed_models import Executor


@dataclass(frozen=True)
class Generation:
    """Tokens decoded greedily, and what the engine thought of each position's alternatives."""

    tokens: list[int]
    # (tokens, vocab_size). Logits, or with `normalized` their log-softmax; NaN where unknown.
    logits: NDArray[np.float64]
    normalized: bool = False
    fused: bool = False  # by the hand-written kernels of patched tinygrad
    # What each layer was given, and what the last one left, of prompt and tokens: (layers + 1,
    # positions, width), NaN where it was not computed. None: the engine does not say.
    layers: NDArray[np.float32] | None = None


def prefixed(say: Say, where: str) -> Say:
    """Return what says `where` in front of each text."""
    return lambda text: say(f"{where}: {text}")


# From prompts and a number of tokens to one generation for each prompt.
Engine = Callable[[Sequence[Sequence[int]], int], list[Generation]]


# Tokens of prompts that are long enough for several chunks anyway.
_UNCUT = 512


def tinygrad_greedy(
    executor: "Executor", prompt: Sequence[int], n_tokens: int, say: Say = quiet
) -> Generation:
    """Decode greedily, the path that is timed; then replay for the logits, and for the layers.

    A replay feeds the same tokens, one by one, behind the prompt, whose kernels leave keys and
    values, or recurrent states, which do not go back: so these are judged as well. The last one
    goes layer by layer; logits of the other, which goes as tokens do, must fit what it saw.
    """
    last = len(prompt) - 1
    # Short prompts are cut, so that later tokens of a prompt see earlier ones in all of them.
    cuts = [0, last // 2, last] if len(prompt) < _UNCUT else [0, last]

    def read() -> None:
        for start, end in itertools.pairwise(cuts):
            executor.fill(prompt, start, end)

    say(f"reading {len(prompt)} tokens")
    read()
    executor.step(prompt[-1], last)
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        tokens.append(executor.token())
        say(f"token {len(tokens)} of {n_tokens}")
        if len(tokens) < n_tokens:
            executor.step()
    inputs = [prompt[-1], *tokens[:-1]]
    logits = []
    read()
    for index, token in enumerate(inputs):
        executor.step(token, last + index)
        logits.append(executor.logits().astype(np.float64))
        say(f"logits {index + 1} of {n_tokens}")
    if (layers := executor.watch(last + n_tokens)) is not None:
        read()
        for index, token in enumerate(inputs):
            executor.step(token, last + index)
            executor.token()
            say(f"layers of token {index + 1} of {n_tokens}")
        executor.watch(0)
    return Generation(tokens, np.stack(logits), False, executor.name == "fused", layers)


def context_of(prompts: Sequence[Sequence[int]], n_tokens: int) -> int:
    """Return the context that engine and reference run with: a rotation may depend on it."""
    return max(len(prompt) for prompt in prompts) + n_tokens + 1


def tinygrad_engine(
    model: Path,
    start: Callable[..., WorkerProcess],
    say: Say = quiet,
    general: bool = False,
    key_type: str = "f16",
) -> Engine:
    """Return an engine that loads `model` in a worker that `start` starts.

    `general` takes tinygrad.llm's own network, `key_type` is of the engine's keys and values. `say`
    hears how far it is. The engine raises BenchError, with the worker's last line, if that fails.
    """

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Generation]:
        load = Load(str(model), context_of(prompts, n_tokens), 1, key_type, general)
        with start(say=say) as worker:
            try:
                return worker.runner.generate(load, prompts, n_tokens)
            except BackendDiedError as error:
                raise BenchError(f"tinygrad: {error}") from error

    return engine
