"""The feed-forward part of a layer that is a mixture of experts, of tokens and of chunks."""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.config import Experts
from orinllm.launch import Launch
from orinllm.launches.experts import (
    Choice,
    Groups,
    RowExperts,
    TokenExperts,
    choose_experts,
    combine,
    expert_hidden,
    expert_parts,
    group_by_expert,
    most_tiles,
    rows_hidden,
    rows_parts,
)
from orinllm.launches.rows import Norm
from orinllm.memory import Memory


class _Scratch:
    """Buffers of one mixture over `tokens` tokens at most; `rows`: of halves, by expert."""

    def __init__(self, memory: Memory, experts: Experts, tokens: int, rows: bool) -> None:
        used = tokens * experts.used
        self.choice = Choice(
            memory.empty(used, dtypes.int32),
            memory.empty(used),
            memory.empty(tokens * experts.count),
            memory.zeros(tokens),
        )
        self.hidden = memory.empty(used * experts.hidden, dtypes.uint16 if rows else dtypes.float32)
        self.parts = memory.empty(used * memory.config.dim)
        self.groups = Groups(
            memory.empty(used, dtypes.int32),
            memory.empty(4 * (most_tiles(experts, tokens) + 1), dtypes.int32),
        )


class Mixtures:
    """The mixtures of a list of launches over `tokens` tokens at most.

    `rows`: over rows of halves. Layers of one shape share their scratch.
    """

    def __init__(self, memory: Memory, tokens: int, rows: bool) -> None:
        self._memory, self._tokens, self._rows = memory, tokens, rows
        self._scratch: dict[Experts, _Scratch] = {}

    def _of(self, layer: int) -> tuple[Experts, _Scratch]:
        experts = self._memory.config.layers[layer].feed_forward.experts
        assert experts is not None
        if experts not in self._scratch:
            self._scratch[experts] = _Scratch(self._memory, experts, self._tokens, self._rows)
        return experts, self._scratch[experts]

    def _norm(self, layer: int) -> Norm:
        config = self._memory.config
        vector = self._memory.weights.vector(f"blk.{layer}.{config.ffn_norm}.weight")
        return Norm(vector, config.norm_eps)

    def of_tokens(self, layer: int, x: Buffer, state: Buffer) -> Iterator[Launch]:
        """Yield x += the mixture of x, for a token of each sequence that is not idle."""
        memory, weights, prefix = self._memory, self._memory.weights, f"blk.{layer}."
        experts, scratch = self._of(layer)
        norm = self._norm(layer)
        router = weights.router(f"{prefix}ffn_gate_inp", norm, experts)
        yield choose_experts(router, x, scratch.choice, self._tokens, state)
        chosen = TokenExperts(
            weights.stack(f"{prefix}ffn_gate_exps"),
            weights.stack(f"{prefix}ffn_up_exps"),
            weights.stack(f"{prefix}ffn_down_exps"),
            memory.config.layers[layer].feed_forward.activation,
            norm,
            scratch.choice,
            experts.used,
            self._tokens,
        )
        yield expert_hidden(memory.device, chosen, scratch.hidden, x)
        yield expert_parts(memory.device, chosen, scratch.parts, scratch.hidden)
        factor = memory.config.residual_scale
        yield combine(x, scratch.parts, experts.used, factor, self._tokens)

    def of_rows(
        self,
        layer: int,
        x: Buffer,
        normed: Buffer,
        count: int | Buffer,
        state: Buffer | None = None,
    ) -> Iterator[Launch]:
        """Yield x += the mixture of x, whose norm is in `normed`, halves, for `count` rows.

        Rows that `state` has as idle are left out.
        """
        memory, weights, prefix = self._memory, self._memory.weights, f"blk.{layer}."
        experts, scratch = self._of(layer)
        router = weights.router(f"{prefix}ffn_gate_inp", self._norm(layer), experts)
        yield choose_experts(router, x, scratch.choice, count, state)
        yield group_by_expert(experts, scratch.groups, scratch.choice, count)
        chosen = RowExperts(
            weights.stack(f"{prefix}ffn_gate_exps"),
            weights.stack(f"{prefix}ffn_up_exps"),
            weights.stack(f"{prefix}ffn_down_exps"),
            memory.config.layers[layer].feed_forward.activation,
            scratch.choice,
            scratch.groups,
            experts,
            self._tokens,
        )
        yield rows_hidden(chosen, scratch.hidden, normed)
        yield rows_parts(chosen, scratch.parts, scratch.hidden)
        yield combine(x, scratch.parts, experts.used, memory.config.residual_scale, count)
