"""Greedy decoding with logits by the engines that the correctness gate judges.

`tinygrad_greedy` runs in a process that imports tinygrad; `tinygrad_engine` starts such a process
(`python -m orinbench.check.greedy`) on a chosen device. `llama_cpp_engine` asks a `llama-server`.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orinbench.child import PIPE, Child
from orinbench.errors import BenchError

if TYPE_CHECKING:
    from orinllm.executor import Executor


@dataclass(frozen=True)
class Generation:
    """Tokens decoded greedily, and what the engine thought of each position's alternatives."""

    tokens: list[int]
    # (tokens, vocab_size). Logits, or with `normalized` their log-softmax; NaN where unknown.
    logits: NDArray[np.float64]
    normalized: bool = False
    fused: bool = False  # by the hand-written kernels of patched tinygrad


# Hears, in a few words, how far the work is.
Say = Callable[[str], None]


def quiet(text: str) -> None:
    """Hear nothing."""


def prefixed(say: Say, where: str) -> Say:
    """Return what says `where` in front of each text."""
    return lambda text: say(f"{where}: {text}")


# From prompts and a number of tokens to one generation for each prompt.
Engine = Callable[[Sequence[Sequence[int]], int], list[Generation]]


def tinygrad_greedy(
    executor: "Executor", prompt: Sequence[int], n_tokens: int, say: Say = quiet
) -> Generation:
    """Decode greedily, the path that is timed; then replay for the logits.

    The replay feeds the same tokens, one by one, over the key-value cache that prompt and decoding
    left, so what the prompt's kernels wrote there is judged as well.
    """
    last = len(prompt) - 1
    say(f"reading {len(prompt)} tokens")
    executor.fill(prompt, 0, last)
    executor.step(prompt[-1], last)
    tokens: list[int] = []
    while len(tokens) < n_tokens:
        tokens.append(executor.token())
        say(f"token {len(tokens)} of {n_tokens}")
        if len(tokens) < n_tokens:
            executor.step()
    logits = []
    for index, token in enumerate([prompt[-1], *tokens[:-1]]):
        executor.step(token, last + index)
        logits.append(executor.logits().astype(np.float64))
        say(f"logits {index + 1} of {n_tokens}")
    return Generation(tokens, np.stack(logits), fused=executor.name == "fused")


def context_of(prompts: Sequence[Sequence[int]], n_tokens: int) -> int:
    """Return the context that engine and reference run with: a rotation may depend on it."""
    return max(len(prompt) for prompt in prompts) + n_tokens + 1


def tinygrad_engine(
    model: Path,
    environment: Mapping[str, str],
    timeout: float,
    say: Say = quiet,
    general: bool = False,
) -> Engine:
    """Return an engine that loads `model` in a process with `environment`, where DEV is set.

    `general` takes tinygrad.llm's own network. `say` hears how far it is. The engine raises
    BenchError, with the process's last line, if that fails or takes longer than `timeout` seconds.
    """

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Generation]:
        with tempfile.TemporaryDirectory(prefix="orinbench-check-") as directory:
            out = Path(directory, "generations.npz")
            request = {
                "model": str(model),
                "prompts": [list(prompt) for prompt in prompts],
                "n_tokens": n_tokens,
                "general": general,
                "out": str(out),
            }
            _run_worker(request, environment, timeout, say)
            with np.load(out) as arrays:
                return [
                    Generation(
                        arrays[f"tokens{i}"].tolist(),
                        arrays[f"logits{i}"],
                        fused=bool(arrays[f"fused{i}"]),
                    )
                    for i in range(len(prompts))
                ]

    return engine


def _run_worker(request: object, environment: Mapping[str, str], timeout: float, say: Say) -> None:
    who = f"tinygrad on {environment.get('DEV', 'the default device')}"
    command = [sys.executable, "-m", "orinbench.check.greedy"]
    with Child(command, environment, out=PIPE, hears=True) as child:
        with contextlib.suppress(BrokenPipeError):
            child.tell(json.dumps(request).encode(), last=True)
        try:
            for line in child.lines(time.monotonic() + timeout):
                say(line)
        except TimeoutError:
            child.end(grace=0)
            raise BenchError(f"{who}: no answer to the check in {timeout:g} s") from None
        if status := child.wait():
            raise BenchError(f"{who}: ended with status {status}: {child.last_words()}")


def main() -> None:
    """Answer one request from standard input: generations go into the npz file that it names.

    Standard output says how far the work is, a line at a time. tinygrad prints there too, so file
    descriptor 1 is pointed at standard error before it is imported.
    """
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text: str) -> None:
        print(text, file=progress, flush=True)

    from orinbench.benchmark.envelope import limit_cuda
    from orinbench.benchmark.tinygrad_paths import JitExecutor, load_network

    limit_cuda()
    request = json.load(sys.stdin)
    say("loading the model")
    prompts, n_tokens = request["prompts"], request["n_tokens"]
    load = JitExecutor if request["general"] else load_network
    executor = load(request["model"], context_of(prompts, n_tokens))
    arrays = {}
    for index, prompt in enumerate(prompts):
        of = prefixed(say, f"prompt {index + 1} of {len(prompts)}")
        generation = tinygrad_greedy(executor, prompt, n_tokens, of)
        arrays[f"tokens{index}"] = np.array(generation.tokens)
        arrays[f"logits{index}"] = generation.logits
        arrays[f"fused{index}"] = np.array(generation.fused)
    np.savez(request["out"], allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
