"""The feed-forward part of a layer that is a mixture of experts, of tokens and of chunks."""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.experts import (
    ChosenExperts,
    ExpertGroups,
    Router,
    RouterOutput,
    choose_experts,
    combine,
    expert_hidden,
    expert_parts,
    group_by_expert,
    most_tiles,
    rows_hidden,
    rows_parts,
)
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import Memory
from orinllm.network.layer import Experts, Mix, Step


class _Scratch:
    """Buffers of one mixture over `tokens` tokens at most; `rows`: of halves, by expert."""

    def __init__(self, memory: Memory, experts: Experts, tokens: int, rows: bool) -> None:
        used = tokens * experts.used
        self.choice = RouterOutput(
            memory.scratch(used, dtypes.int32),
            memory.scratch(used),
            memory.scratch(tokens * experts.count),
            memory.zeros(tokens),
        )
        self.hidden = memory.scratch(
            used * experts.hidden, dtypes.uint16 if rows else dtypes.float32
        )
        self.parts = memory.scratch(used * memory.config.dim)
        self.groups = ExpertGroups(
            memory.scratch(used, dtypes.int32),
            memory.scratch(4 * (most_tiles(experts, tokens) + 1), dtypes.int32),
        )


class Mixtures:
    """The mixtures of a list of launches over `tokens` tokens at most.

    `rows`: over rows of halves. Layers of one shape share their scratch.
    """

    def __init__(self, memory: Memory, tokens: int, rows: bool) -> None:
        self._memory, self._tokens, self._rows = memory, tokens, rows
        self._scratch: dict[Experts, _Scratch] = {}

    def _chosen(self, layer: int, step: Step) -> tuple[Router, ChosenExperts, _Scratch]:
        """Return a layer's router and experts, and the scratch of its shape."""
        assert isinstance(step.operation, Mix)
        weights, experts = self._memory.weights, step.operation.experts
        prefix, norm = self._memory.config.prefix(layer), self._memory.norm(layer, step.norm)
        if experts not in self._scratch:
            self._scratch[experts] = _Scratch(self._memory, experts, self._tokens, self._rows)
        scratch = self._scratch[experts]
        chosen = ChosenExperts(
            weights.stack(f"{prefix}ffn_gate_exps") if experts.gated else None,
            weights.stack(f"{prefix}ffn_up_exps"),
            weights.stack(f"{prefix}ffn_down_exps"),
            step.operation.activation,
            norm,
            scratch.choice,
            experts,
            self._tokens,
            scratch.groups,
        )
        return weights.router(f"{prefix}ffn_gate_inp", norm, experts), chosen, scratch

    def of_tokens(
        self, layer: int, step: Step, x: Buffer, to: Buffer, state: Buffer
    ) -> Iterator[Launch]:
        """Yield to += the mixture of x, for a token of each sequence that is not idle.

        Without a sum in the step it is `to` = the mixture.
        """
        router, chosen, scratch = self._chosen(layer, step)
        yield choose_experts(router, x, scratch.choice, self._tokens, state)
        yield expert_hidden(chosen, scratch.hidden, x)
        yield expert_parts(chosen, scratch.parts, scratch.hidden)
        factor = step.add.scale if step.add else None
        yield combine(to, scratch.parts, chosen.experts.used, factor, self._tokens)

    def of_rows(
        self,
        layer: int,
        step: Step,
        rows: tuple[Buffer, Buffer, Buffer],
        count: int | Buffer,
        state: Buffer | None = None,
    ) -> Iterator[Launch]:
        """Yield to += the mixture of x for `count` rows, as `of_tokens`.

        `rows` are x, its norm in halves, and `to`. Those that `state` has as idle are left out.
        """
        (router, chosen, scratch), (x, normed, to) = self._chosen(layer, step), rows
        yield choose_experts(router, x, scratch.choice, count, state)
        yield group_by_expert(chosen.experts, scratch.groups, scratch.choice, count)
        yield rows_hidden(chosen, scratch.hidden, normed)
        yield rows_parts(chosen, scratch.parts, scratch.hidden)
        factor = step.add.scale if step.add else None
        yield combine(to, scratch.parts, chosen.experts.used, factor, count)
