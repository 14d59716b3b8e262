"""Executors as they are timed: `EnginePath` is of one sequence, `DecoderPath` of several.

Nothing is synchronized here.

This module imports tinygrad; see `tinygrad_runner`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tinygrad import Device
from tinygrad.engine.realize import Ops

from orinbench.benchmark.transformer import TransformerExecutor
from orinllm.executor import Executor, SamplingExecutor
from orinllm.fused import FusedExecutor
from orinllm.launches.buffers import KEY_TYPES
from orinllm.memory import pages_of
from orinllm.network import Network, make_executor, plan_network
from orinllm.sampling import Sampling


class TimedExecutor(Executor, Protocol):
    """What the engine's executors and TransformerExecutor have beyond an Executor."""

    def sample(self, how: Sampling, text: Sequence[int]) -> None:
        """Draw tokens like this from now on."""
        ...

    def begin(self, tokens: Sequence[int], start: int) -> None:
        """Start tokens[start:], and the token that follows."""
        ...

    def follow(self, most: int) -> Iterator[int]:
        """Yield the token that was started and those behind it, `most` at most."""
        ...


def load_network(
    model: str, max_context: int, sequences: int = 1, key_type: str = "f16"
) -> SamplingExecutor:
    """Return the engine's executor of a GGUF file on tinygrad's default device."""
    trained = Network.read(model).config.trained_context
    network = Network.read(model, min(max_context, trained), KEY_TYPES[key_type])
    plan = plan_network(network, str(Device.DEFAULT))
    return make_executor(network, plan, pages=sequences * pages_of(network.context))


def kernels_of(linear: Any) -> tuple[int, int]:
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


class EnginePath:
    """The engine's fused kernels on CUDA and NV, else its general path; or a Transformer."""

    def __init__(self, executor: TimedExecutor) -> None:
        self._executor, self.name = executor, executor.name
        self.follows = isinstance(executor, FusedExecutor)
        self.chunk: int | None = None
        if isinstance(executor, FusedExecutor | TransformerExecutor):
            self.chunk = executor.chunk
        self.included = _INCLUDED[executor.name]
        self._drawn_here = False  # by the host, behind each step

    def sample(self, how: Sampling | None) -> None:
        """Draw every token like this from now on; None: leave the most likely one."""
        self._executor.sample(how or Sampling(temperature=0), ())
        self._drawn_here = how is not None and not isinstance(self._executor, FusedExecutor)

    def prompt(self, ids: Sequence[int], start: int = 0) -> None:
        """Compute keys and values of ids[start:], and the logits of the last one."""
        self._executor.begin(ids, start)

    def decode(self, token: int, position: int) -> None:
        """Copy a token and its position to the device; run a token's kernels."""
        self._executor.step(token, position)
        if self._drawn_here:
            self._executor.token()

    def answer(self, token: int, position: int, most: int) -> None:
        """Compute a token, and those behind it: each is on the host while the next is computed."""
        self._executor.step(token, position)
        for _ in self._executor.follow(most):
            pass

    def last_token(self) -> int:
        """Read the most likely token."""
        return self._executor.token()

    def logits(self) -> npt.NDArray[np.float32]:
        """Read the logits that the last step left: (vocabulary)."""
        return self._executor.logits()

    def counts(self) -> tuple[int | None, int | None]:
        """Count in the token's list; on a CPU it is one program, elsewhere it is not known."""
        if isinstance(self._executor, FusedExecutor):
            return kernels_of(self._executor.decoder().next_graph.linear)
        if isinstance(self._executor, TransformerExecutor):
            return kernels_of(self._executor.captured)
        return (1, 1) if Device.DEFAULT == "CPU" else (None, None)


_BATCH_INCLUDED = (
    "the forward pass with its argmax over the logits, and the host's copy of token ids and "
    "positions to the device"
)
_INCLUDED = {  # by the executor's name
    "fused": "the forward pass with its argmax over the logits, the copies of a prompt's token ids "
    "to the device, and of each token's id to the host, while the next one is computed",
    "general": "the forward pass to the logits, and their copy to the host",
    "jit": "copies of token ids to the device, the forward pass, and on the device temperature, "
    "Gumbel noise and argmax over the logits",
}


class DecoderPath:
    """A token of each of several sequences by the engine's fused kernels."""

    name = "fused"
    included = _BATCH_INCLUDED

    def __init__(self, executor: FusedExecutor, sequences: int) -> None:
        self._executor, self._decoder = executor, executor.decoder(sequences)
        pages = pages_of(executor.context)
        self._pages = [range(i * pages, (i + 1) * pages) for i in range(sequences)]
        self._decoder.place(self._pages)

    def sample(self, how: Sampling | None) -> None:
        """Draw every slot's tokens like this from now on; None: take the most likely ones."""
        for slot in range(self._decoder.sequences):
            self._decoder.sample(slot, how)

    def fill(self, rows: Sequence[Sequence[int]]) -> None:
        """Start keys and values of each sequence's row of ids."""
        for row, pages in zip(rows, self._pages, strict=True):
            self._executor.place(pages)
            self._executor.fill(row, 0, len(row))
        self._executor.place(self._pages[0])

    def decode(self, tokens: Sequence[int], position: int) -> None:
        """Compute keys, values and logits of a token of each sequence."""
        self._decoder.step(tokens, [position] * len(tokens))

    def logits(self) -> npt.NDArray[np.float32]:
        """Read the logits of the last call: (sequences, vocabulary)."""
        return self._decoder.logits()

    def counts(self) -> tuple[int, int]:
        """Count in the token's list."""
        return kernels_of(self._decoder.graph.linear)
