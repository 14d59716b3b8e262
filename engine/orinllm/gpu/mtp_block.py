"""A block that proposes tokens, on the fused kernels: a model of one layer, over the same pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orinllm.choose.sampling import Choose
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.device import free_memory_bytes
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.kernels.buffers import PAGE, KvCacheType
from orinllm.gpu.memory import ModelMemory, make_memory
from orinllm.gpu.path_plan import make_path_plan
from orinllm.gpu.weights import Weights
from orinllm.network.config import Config

if TYPE_CHECKING:
    from orinllm.loader import Network


class FusedMtpBlock:
    """The block of a model, with keys and values of its own in each of the model's pages.

    Raises BadInput where the kernels do not take it, or the memory is too small for these, and what
    the model remembers of each token. No step of the model may be under way.
    """

    def __init__(self, model: FusedExecutor, network: Network, gguf: GGUF, config: Config) -> None:
        memory = model.memory
        _require_runnable_block(memory, gguf, config, network)
        weights = Weights(gguf, config, memory.device, memory.weights)
        with weights.upload_meanwhile():
            sizes = memory.device, memory.context, memory.pages, memory.kv
            own = make_memory(config, weights, *sizes)
        self._executor = FusedExecutor(replace(own, left=model.keep_hidden_states()))

    def cache_slot_of_pages(self, pages: Sequence[int]) -> int:
        """Return which of the texts that it has keys and values of may be one in these pages."""
        return 0

    def propose_tokens(
        self, text: Sequence[int], start: int, pages: Sequence[int], most: int, choose: Choose
    ) -> list[int]:
        """Return up to `most` tokens behind a text, all but whose last token the model has.

        The block has its keys and values up to position `start`, at least one less than it could,
        and gets the others.
        """
        executor, end, found = self._executor, len(text) - 1, list[int]()
        executor.set_pages(pages)
        executor.start_prefill_and_first_token(text[1:], start)
        while most and (token := choose(executor.wait_for_logits(), len(text) + len(found))) >= 0:
            found.append(token)
            if len(found) == most:
                break
            executor.start_step(token, end + len(found) - 1)
        return found


def mtp_weight_bytes(gguf: GGUF, config: Config, model: Network) -> int:
    """Return the bytes that a block's weights take beside its model's."""
    shares = gguf is model.gguf
    return sum(
        tensor.n_bytes
        for name, tensor in gguf.tensors.items()
        if not config.is_in_other_block(name)
        if not shares or model.config.is_in_other_block(name)
    )


def mtp_bytes_per_token(config: Config, kv: KvCacheType) -> int:
    """Return the bytes of a token's keys and values, and of what its model remembers of it."""
    return kv.bytes_for_elements(config.kv_elements_per_token) + 4 * config.dim


def _require_runnable_block(
    memory: ModelMemory, gguf: GGUF, config: Config, model: Network
) -> None:
    for what, why in make_path_plan(gguf, config, memory.device, memory.kv).obstacles.items():
        raise BadInput(f"{gguf.path}: the fused kernels do not run its block: {what}: {why}")
    free, held = free_memory_bytes(memory.device), mtp_weight_bytes(gguf, config, model)
    kept = mtp_bytes_per_token(config, memory.kv) * memory.pages * PAGE
    if free is not None and held + kept > free:
        raise BadInput(
            f"{gguf.path}: a block of {held / 1e9:.1f} GB, and {kept / 1e9:.1f} GB for its "
            f"{memory.pages * PAGE} tokens of context, do not fit the {free / 1e9:.1f} GB that "
            f"{memory.device} has free (-c, --context)"
        )
