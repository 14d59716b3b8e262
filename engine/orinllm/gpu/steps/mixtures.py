"""The feed-forward part of a layer that is a mixture of experts, of tokens and of chunks."""

from collections.abc import Iterator

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.kernels.experts import (
    ExpertGroups,
    ExpertOperands,
    Router,
    RouterOutput,
    combine_experts_launch,
    expert_down_launch,
    expert_hidden_launch,
    group_by_expert_launch,
    grouped_down_launch,
    grouped_hidden_launch,
    most_expert_tiles,
    router_launch,
)
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory
from orinllm.network.layer import Experts, MixExperts, Step


class _MixtureScratch:
    """Buffers of one mixture over `tokens` tokens at most; `rows`: of halves, by expert."""

    def __init__(self, memory: ModelMemory, experts: Experts, tokens: int, rows: bool) -> None:
        used = tokens * experts.used
        self.choice = RouterOutput(
            memory.allocate_scratch(used, dtypes.int32),
            memory.allocate_scratch(used),
            memory.allocate_scratch(tokens * experts.count),
            memory.zeroed_ints(tokens),
        )
        self.hidden = memory.allocate_scratch(
            used * experts.hidden, dtypes.uint16 if rows else dtypes.float32
        )
        self.parts = memory.allocate_scratch(used * memory.config.dim)
        self.groups = ExpertGroups(
            memory.allocate_scratch(used, dtypes.int32),
            memory.allocate_scratch(4 * (most_expert_tiles(experts, tokens) + 1), dtypes.int32),
        )


class MixtureLowering:
    """The mixtures of a list of launches over `tokens` tokens at most.

    `rows`: over rows of halves. Layers of one shape share their scratch.
    """

    def __init__(self, memory: ModelMemory, tokens: int, rows: bool) -> None:
        self._memory, self._tokens, self._rows = memory, tokens, rows
        self._scratch: dict[Experts, _MixtureScratch] = {}

    def _router_experts_scratch(
        self, layer: int, step: Step
    ) -> tuple[Router, ExpertOperands, _MixtureScratch]:
        """Return a layer's router and experts, and the scratch of its shape."""
        assert isinstance(step.operation, MixExperts)
        weights, experts = self._memory.weights, step.operation.experts
        prefix, norm = (
            self._memory.config.tensor_prefix(layer),
            self._memory.norm_weights(layer, step.norm),
        )
        if experts not in self._scratch:
            self._scratch[experts] = _MixtureScratch(
                self._memory, experts, self._tokens, self._rows
            )
        scratch = self._scratch[experts]
        chosen = ExpertOperands(
            weights.expert_matrices(f"{prefix}ffn_gate_exps") if experts.gated else None,
            weights.expert_matrices(f"{prefix}ffn_up_exps"),
            weights.expert_matrices(f"{prefix}ffn_down_exps"),
            step.operation.activation,
            norm,
            scratch.choice,
            experts,
            self._tokens,
            scratch.groups,
        )
        return weights.router(f"{prefix}ffn_gate_inp", norm, experts), chosen, scratch

    def lower_per_token(
        self, layer: int, step: Step, x: Buffer, to: Buffer, state: Buffer
    ) -> Iterator[Launch]:
        """Yield to += the mixture of x, for a token of each sequence that is not idle.

        Without a sum in the step it is `to` = the mixture.
        """
        router, chosen, scratch = self._router_experts_scratch(layer, step)
        yield router_launch(router, x, scratch.choice, self._tokens, state)
        yield expert_hidden_launch(chosen, scratch.hidden, x)
        yield expert_down_launch(chosen, scratch.parts, scratch.hidden)
        factor = step.add.scale if step.add else None
        yield combine_experts_launch(to, scratch.parts, chosen.experts.used, factor, self._tokens)

    def lower_grouped_by_expert(
        self,
        layer: int,
        step: Step,
        rows: tuple[Buffer, Buffer, Buffer],
        count: int | Buffer,
        state: Buffer | None = None,
    ) -> Iterator[Launch]:
        """Yield to += the mixture of x for `count` rows, as `lower_per_token`.

        `rows` are x, its norm in halves, and `to`. Those that `state` has as idle are left out.
        """
        (router, chosen, scratch), (x, normed, to) = self._router_experts_scratch(layer, step), rows
        yield router_launch(router, x, scratch.choice, count, state)
        yield group_by_expert_launch(chosen.experts, scratch.groups, scratch.choice, count)
        yield grouped_hidden_launch(chosen, scratch.hidden, normed)
        yield grouped_down_launch(chosen, scratch.parts, scratch.hidden)
        factor = step.add.scale if step.add else None
        yield combine_experts_launch(to, scratch.parts, chosen.experts.used, factor, count)
