"""The launches of one token of each of N sequences: embed; four or more a layer; head."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import make_host_tokens, multiprocessor_count
from orinllm.gpu.kernels.attention import (
    most_splits,
    store_kv_launch,
    token_attention_launch,
    warps_beside_gemvs,
)
from orinllm.gpu.kernels.buffers import PAGE, PackedMatrix, SplitAttention
from orinllm.gpu.kernels.gemv import ArgmaxTailScratch, GemvProduct, gemv_launches
from orinllm.gpu.kernels.joined_launches import join_neighbouring_launches
from orinllm.gpu.kernels.rows import embed_tokens_launch
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.gpu.steps.lowering import AttentionScratch, Lowering, ProductEpilogue, logits_matrix
from orinllm.network.layer import Attend, Recurrence, Step, state_inputs

if TYPE_CHECKING:
    from orinllm.gpu.kernels.recurrent import StatePlaces


class TokenLowering(Lowering):
    """Scratch of N sequences, and the launches over it, in order.

    `together`: the N tokens are neighbours in one sequence, computed as if one after another. Their
    recurrent states stay as they were before `passed`, a first position and a number of tokens;
    `keep`, behind `launches`, takes them behind as many as `passed` says then.
    `state` holds N tokens, N positions, and counters (cuda/attention.cu); `table` the pages of each
    sequence; `logits` is (N, vocabulary), `residual` (N, width), at the end the last norm's input.
    Behind the launches of numbers `ends` it is what each layer is given, and what the last leaves.
    `ending`, the last launches, begin with `residual` before the last layer; `mail` takes the
    tokens, except where they are `together`. Norms are parts of the products behind them.
    """

    def __init__(self, memory: ModelMemory, sequences: int, together: bool = False) -> None:
        super().__init__(memory, sequences, dtypes.float32)
        self.sequences, self._together = sequences, together
        config, n = memory.config, sequences
        heads = {layer: memory.attention_dims(layer, n) for layer in config.attention_by_layer}
        split = {layer: memory.attention_dims(layer, 1) for layer in heads} if together else heads
        self._warps = {layer: warps_beside_gemvs(memory.device, h) for layer, h in split.items()}
        self._splits = {
            layer: most_splits(memory.device, h, self._warps[layer]) for layer, h in split.items()
        }
        self._parts = AttentionScratch(memory, heads, self._splits)
        self._left: dict[str, SplitAttention] = {}  # in parts, of the layer that is lowered
        goes_back = together and memory.states is not None
        self.passed = memory.zeroed_ints(2 + n) if goes_back else None
        self.keep: list[Launch] = []
        self._head = logits_matrix(memory)
        self.logits = memory.allocate(n * self._head.rows)
        # Each block of the head leaves its best; there are at most two on a multiprocessor.
        blocks = 2 * multiprocessor_count(memory.device)
        counters = max(h.blocks_per_sequence for h in heads.values())
        self.state = memory.zeroed_ints(2 * n + 1 + n * counters)
        self.mail = None if together else make_host_tokens(memory.device, n)
        self.table = memory.zeroed_ints(n * memory.context // PAGE)
        self.at, self.cache_view = self.state, (n, self.table)
        layers = range(len(config.layers))
        apart = [(*itertools.chain(*self.lower_layer_split_at_last_store(i)),) for i in layers]
        signals = memory.zeroed_ints(sum(map(len, apart)))
        self._tail = ArgmaxTailScratch(
            memory.allocate_scratch(n * blocks),
            memory.allocate_scratch(n * blocks, dtypes.int32),
            None if self.mail is None else self.mail.buffer,
            signals,
        )
        embeddings = memory.weights.matrix("token_embd")
        at = itertools.accumulate(map(len, apart), initial=0)
        *before, last = [
            join_neighbouring_launches(layer, signals, first)
            for layer, first in zip(apart, at, strict=False)
        ]
        first = (
            *self.lower_input(
                lambda x: embed_tokens_launch(embeddings, x, self.state, n, config.embedding_scale)
            ),
        )
        sizes = map(len, (*before, last))
        self.ends = (*itertools.accumulate(sizes, initial=len(first) - 1),)
        self.ending = (*last, *self.lower_kept_hidden_states(), *self._lower_output_head())
        self.launches = (*first, *itertools.chain(*before), *self.ending)

    def lower_layer_split_at_last_store(self, layer: int) -> tuple[list[Launch], list[Launch]]:
        """See `Lowering`; what states are made of outlasts the other layers, for `keep`."""
        if self.passed is None:
            return super().lower_layer_split_at_last_store(layer)
        operations = self.memory.config.layers[layer].operations
        kept = [op for op in operations if isinstance(op, Recurrence)]
        given = {name for op in kept for name in state_inputs(op)} - {op.out for op in kept}
        shared, widths = (
            {name: self._values[name] for name in given},
            self.memory.config.value_widths,
        )
        for name in given:
            self._values[name] = self.memory.allocate_scratch(self.sequences * widths[name])
        launches = super().lower_layer_split_at_last_store(layer)
        self._values |= shared
        return launches

    def state_places(self, layer: int, operation: Recurrence) -> StatePlaces:
        """See `Lowering`."""
        places = super().state_places(layer, operation)
        if self.passed is None:
            return places
        passed = replace(places, state=self.passed, count=self.passed)
        launches = self._recurrence_lowering.lower_operation(layer, operation, passed)
        self.keep += [launch for launch in launches if "states" in launch.writes]
        return replace(passed, keeps=False)

    def _lower_output_head(self) -> Iterator[Launch]:
        memory, config, n = self.memory, self.memory.config, self.sequences
        head = GemvProduct(
            "head",
            "ARGMAX",
            (self._head,),
            self.logits,
            self.residual,
            self.state,
            norm=memory.weights.vector(f"{memory.config.final_norm}.weight"),
            eps=config.norm_eps,
            factor=config.logit_scale,
            softcap=config.logit_softcap,
            sequences=n,
            tail=self._tail,
        )
        yield from gemv_launches(memory.device, head)

    def lower_product(self, layer: int, step: Step, wanted: ProductEpilogue) -> Iterator[Launch]:
        """Yield GEMVs, which norm what they read, and combine attention's parts."""
        product = GemvProduct(
            step.operation.out,
            wanted.mode,
            self.step_matrices(layer, step),
            wanted.out,
            self._values[step.source],
            self.state,
            biases=self.step_biases(layer, step),
            norm=self.memory.norm_weights(layer, step.norm).weight if step.norm else None,
            eps=self.memory.config.norm_eps,
            factor=wanted.factor,
            activation=wanted.activation,
            sequences=self.sequences,
            parts=self._left.get(step.source),
            ahead=self.layer_cache(layer) if self._is_read_by_attention(layer, step) else None,
        )
        yield from gemv_launches(self.memory.device, product)

    def lower_plain_product(
        self, matrix: PackedMatrix, out: Buffer, source: Buffer | None = None
    ) -> Iterator[Launch]:
        """See `Lowering`."""
        n, buffers = self.sequences, (out, self.residual if source is None else source, self.state)
        product = GemvProduct("layers", "STORE", (matrix,), *buffers, sequences=n)
        yield from gemv_launches(self.memory.device, product)

    def _is_read_by_attention(self, layer: int, step: Step) -> bool:
        steps = self.memory.config.layers[layer].steps
        return any(s.source == step.out_name and isinstance(s.operation, Attend) for s in steps)

    def lower_before_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield what neighbours in one sequence need; attention of others stores their own."""
        if self._together and self.memory.config.attention_by_layer[layer].reads is None:
            inputs = self.attention_inputs(layer, step)
            yield store_kv_launch(inputs, self._splits[layer], self.state)

    def lower_attention(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield attention of each sequence at its own position, whose parts its reader combines."""
        inputs = self.attention_inputs(layer, step)
        parts = self._parts.split_attention_of_layer(
            inputs.cache.heads, self._splits[layer], self._warps[layer]
        )
        if parts.most_splits_combined_by_reader > 1:
            self._left[step.out_name] = parts
        else:
            self._left.pop(step.out_name, None)
        out = self._values[step.out_name]
        yield token_attention_launch(out, inputs, parts, self.state, stored=self._together)

    def lower_experts(self, layer: int, step: Step) -> Iterator[Launch]:
        """Yield the mixture of each token of a sequence that is not idle."""
        return self.mixture_lowering.lower_per_token(
            layer, step, self.residual, self._values[step.out_name], self.state
        )


def write_ints(buffer: Buffer, values: list[int]) -> None:
    """Copy ints to the start of a buffer."""
    view = buffer.view(len(values), dtypes.int32, 0).ensure_allocated()
    view.copyin(memoryview(bytearray(struct.pack(f"<{len(values)}i", *values))))
