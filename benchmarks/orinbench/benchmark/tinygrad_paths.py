"""Executors that are timed: the engine's, tinygrad.llm's own, and several sequences at once.

This module imports tinygrad; see `tinygrad_runner`.
"""

from collections.abc import Sequence
from typing import Any

from tinygrad import Device
from tinygrad.engine.realize import Ops

from orinbench.benchmark.transformer import TransformerExecutor
from orinllm.executor import SamplingExecutor
from orinllm.fused import FusedExecutor
from orinllm.launches.buffers import KEY_TYPES
from orinllm.memory import pages_of
from orinllm.network import Network, make_executor, plan_network
from orinllm.sampling import Sampling

TimedExecutor = SamplingExecutor | TransformerExecutor


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


# What a timed region holds, by the executor's name.
INCLUDED = {
    "fused": "the forward pass with its argmax over the logits, the copies of a prompt's token ids "
    "to the device, and of each token's id to the host, while the next one is computed",
    "general": "the forward pass to the logits, and their copy to the host",
    "jit": "copies of token ids to the device, the forward pass, and on the device temperature, "
    "Gumbel noise and argmax over the logits",
}


def chunk_of(executor: TimedExecutor) -> int | None:
    """Return how many tokens of a prompt go through at once; None: all."""
    if isinstance(executor, FusedExecutor | TransformerExecutor):
        return executor.chunk
    return None


def kernels_of_token(executor: TimedExecutor) -> tuple[int | None, int | None]:
    """Count as `kernels_of`; on a CPU a token is one program, elsewhere it is not known."""
    if isinstance(executor, FusedExecutor):
        return kernels_of(executor.decoder().next_graph.linear)
    if isinstance(executor, TransformerExecutor):
        return kernels_of(executor.captured)
    return (1, 1) if Device.DEFAULT == "CPU" else (None, None)


class Batch:
    """A token of each of several sequences at once, by the engine's fused kernels."""

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

    def kernels(self) -> tuple[int, int]:
        """Count as `kernels_of`, in a token's list."""
        return kernels_of(self._decoder.graph.linear)
