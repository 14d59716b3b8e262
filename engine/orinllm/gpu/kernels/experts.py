"""Mixtures of experts: cuda/moe.cu, and moe_prompt.cu for a chunk of a prompt and a batch.

One token of each of few sequences: router, expert_hidden, expert_down, combine_experts. A chunk, or
a batch of more: router, group_by_expert, grouped_hidden, grouped_down, combine_experts. A shared
expert is an ordinary feed-forward part beside them.
"""

from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.file.ggml import KernelGgmlType
from orinllm.gpu.device import gemv_blocks_per_sm, multiprocessor_count
from orinllm.gpu.kernels.buffers import ceil_div
from orinllm.gpu.kernels.gemv import gemv_constants, plan_gemv, shared_memory_bytes
from orinllm.gpu.kernels.rows import NormWeights, count_most_and_arguments, element_grid
from orinllm.gpu.kernels.tile import GemmTile
from orinllm.gpu.launch import (
    ROW_THREADS,
    Constants,
    Given,
    Launch,
    kernel_body,
    make_arguments,
    make_launch,
    make_rows_launch,
    out_argument,
    shared_memory_declaration,
)
from orinllm.network.layer import Activation, Experts

#: Experts that a token may have: a lane of the choosing warp has one of them.
MOST_USED = 32
# Warps of a router's block. Of more tokens than these a warp makes logits of several experts for
# several tokens, which share what it reads.
_ROUTER_WARPS, _ROUTED, _ROUTED_TOKENS = 4, 4, 4


@dataclass(frozen=True)
class Router:
    """The matrix that chooses experts: logits = W norm(x), plus a bias."""

    weight: Buffer  # (experts, cols), floats or packed
    type: KernelGgmlType | None  # None: floats
    norm: NormWeights
    experts: Experts
    bias: Buffer | None = None
    choice_bias: Buffer | None = None  # added to the probabilities for the choice alone
    scales: Buffer | None = None  # of each expert: a factor of its weight


@dataclass(frozen=True)
class RouterOutput:
    """Buffers of what a router leaves for a number of tokens."""

    ids: Buffer  # int32 (tokens, used), best first
    weights: Buffer  # floats (tokens, used)
    logits: Buffer  # floats (tokens, experts), scratch
    counters: Buffer  # int32 (tokens), zero between launches


@dataclass(frozen=True)
class ExpertMatrices:
    """Packed matrices of all experts: y = W[expert] x plus bias[expert], W[expert] (rows, cols).

    `stacked_rows` rows are between an expert's first row and the next one's: more than `rows` where
    a file stacks gate and up together.
    """

    buffer: Buffer
    type: KernelGgmlType
    rows: int
    cols: int
    stacked_rows: int
    bias: Buffer | None = None  # floats (experts, rows)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's rows."""
        return self.rows * self.cols // self.type.block_values * self.type.block_bytes


def router_launch(
    router: Router,
    x: Buffer,
    choice: RouterOutput,
    tokens: int | Buffer,
    state: Buffer | None = None,
) -> Launch:
    """Return the router: `choice` for each row of x (tokens, cols).

    Sequences that `state` (attention.cu) has as idle get no expert.
    """
    count, most, more = count_most_and_arguments(tokens)
    experts, cols = router.experts, router.norm.weight.size
    routed, together = (_ROUTED, _ROUTED_TOKENS) if most > _ROUTED_TOKENS else (1, 1)
    grid = ceil_div(experts.count, routed * _ROUTER_WARPS)
    type_name = "F32" if router.type is None else router.type.name
    positions = "0" if state is None else f"state + {most}"
    given: Given = {
        "int* ids": choice.ids,
        "float* weights": choice.weights,
        "float* logits": choice.logits,
        "const float* x": x,
        "const float* norm": router.norm.weight,
        "const u8* w": router.weight,
        "int* counters": choice.counters,
        "const float* bias": router.bias,
        "const float* choice": router.choice_bias,
        "const float* scales": router.scales,
        "const int* state": state,
    }
    call = kernel_body(
        f"route<P0>(Route{{ids, weights, logits, x, norm, w, bias, choice, scales, {positions}, "
        f"counters, {count}, {router.norm.eps!r}f, {experts.scale!r}f}}, &flag)",
        given,
    )
    return Launch(
        name=f"route_{type_name.lower()}_{experts.used}_of_{experts.count}x{cols}",
        file="moe.cu",
        constants=(
            Constants(
                type=type_name,
                cols=cols,
                experts=experts.count,
                used=experts.used,
                gating=experts.gating.name,
                normalized=experts.normalized,
                warps=_ROUTER_WARPS,
                routed=routed,
                tokens=together,
                grid=grid,
            ),
        ),
        arguments=make_arguments(given | more),
        body=f"  __shared__ int flag;\n{call}",
        grid=(grid, ceil_div(most, together), 1),
        block=_ROUTER_WARPS * 32,
        writes=("ids", "weights", "logits", "counters"),
        operations=2 * most * experts.count * cols,
        n_bytes=router.weight.nbytes,
    )


@dataclass(frozen=True)
class ExpertGroups:
    """Buffers of the pairs of token and choice, by expert."""

    order: Buffer  # int32 (tokens * used)
    tiles: Buffer  # int32 (most_expert_tiles() + 1, 4)


@dataclass(frozen=True)
class ExpertOperands:
    """The experts of at most `tokens` tokens, and which of them these have chosen.

    groups: of rows of halves, whose norm is another launch.
    """

    gate: ExpertMatrices | None
    up: ExpertMatrices
    down: ExpertMatrices
    activation: Activation
    norm: NormWeights
    choice: RouterOutput
    experts: Experts
    tokens: int
    groups: ExpertGroups | None = None


def _expert_product_launch(
    role: str, call: str, mode: str, chosen: ExpertOperands, stack: ExpertMatrices, given: Given
) -> Launch:
    """Return a product of chosen experts, spread over the machine."""
    gated, device = mode == "GATED", stack.buffer.device
    choices = chosen.tokens * chosen.experts.used
    total = stack.rows * choices * (2 if gated else 1)
    plan = plan_gemv(device, mode, stack.type, (total, stack.cols))
    items = ceil_div(stack.rows, 1 if gated else plan.rows_per_item)
    blocks = max(1, multiprocessor_count(device) * gemv_blocks_per_sm(device) // choices)
    plan = replace(plan, grid=min(ceil_div(items, plan.warps), blocks))
    constants = gemv_constants(stack.type, stack.cols, plan, mode, chosen.activation.name) | {
        "segments": 2 if gated else 1,
        "norm": mode != "STORE",
        "columns": 1,
        "first_row": 0,
        "out_stride": stack.rows,
        "softcap": 0.0,
        "used": chosen.experts.used,
        "rows": stack.rows,
        "stacked_rows": stack.stacked_rows,
    }
    shared = shared_memory_bytes(stack.type, stack.cols, plan, 1)
    return Launch(
        name=f"experts_{role}_{stack.type.name.lower()}_{stack.rows}x{stack.cols}_{choices}",
        file="moe.cu",
        constants=(Constants(constants),),
        arguments=make_arguments(given),
        body=shared_memory_declaration(shared) + kernel_body(call, given),
        grid=(plan.grid, choices, 1),
        block=plan.warps * 32,
        writes=("out",),
        operations=2 * choices * stack.rows * (2 if gated else 1) * stack.cols,
    )


def expert_hidden_launch(chosen: ExpertOperands, out: Buffer, x: Buffer) -> Launch:
    """Return gate and up of the chosen experts: out (sequences, used, hidden) floats.

    Of experts without a gate it is up alone.
    """
    gate, up = chosen.gate, chosen.up
    if gate is not None and gate.type != up.type:
        raise ValueError(f"gate is {gate.type.name} and up {up.type.name}: they share a launch")
    given: Given = {"float* out": out, "const float* x": x}
    given |= {"const float* norm": chosen.norm.weight, "const int* ids": chosen.choice.ids}
    if gate is None:
        role, mode, matrices = "up", "ACTIVATED", "{up, 0}, {bias, 0}"
        given |= {"const u8* up": up.buffer, "const float* bias": up.bias}
    else:
        role, mode, matrices = "gate_up", "GATED", "{gate, up}, {gate_bias, up_bias}"
        given |= {"const u8* gate": gate.buffer, "const u8* up": up.buffer}
        given |= {"const float* gate_bias": gate.bias, "const float* up_bias": up.bias}
    eps = f"{chosen.norm.eps!r}f"
    call = f"expert_gate_up<P0>(Chosen{{smem, out, x, norm, ids, 0, {matrices}, {eps}}})"
    return _expert_product_launch(role, call, mode, chosen, gate or up, given)


def expert_down_launch(chosen: ExpertOperands, out: Buffer, hidden: Buffer) -> Launch:
    """Return weighted results of the chosen experts: out (sequences, used, dim) floats."""
    down, choice = chosen.down, chosen.choice
    given: Given = {"float* out": out, "const float* hidden": hidden}
    given |= {"const int* ids": choice.ids, "const float* weights": choice.weights}
    given |= {"const u8* down": down.buffer, "const float* bias": down.bias}
    matrices = "{down, 0}, {bias, 0}"
    call = f"expert_down<P0>(Chosen{{smem, out, hidden, 0, ids, weights, {matrices}, 0.f}})"
    return _expert_product_launch("down", call, "STORE", chosen, down, given)


def combine_experts_launch(
    x: Buffer, part: Buffer, used: int, factor: float | None, tokens: int | Buffer
) -> Launch:
    """Return x (tokens, cols) += factor * the sum of part (tokens, used, cols).

    Without a factor x is the sum.
    """
    count, most, more = count_most_and_arguments(tokens)
    cols = x.size // most
    return make_rows_launch(
        "moe.cu combine",
        f"{used}x{cols}",
        Constants(cols=cols, used=used, threads=ROW_THREADS, adds=factor is not None),
        {"float* x": x, "const float* part": part} | more,
        (1.0 if factor is None else factor, count),
        element_grid(cols, most),
    )


# ---- rows of halves, of a chunk or of a batch: cuda/moe_prompt.cu

# Of a block: 64 pairs at most, as an expert of a chunk has few.
_TILE = GemmTile(2, 8, 4, 1, 3)
# Threads of the block that groups, and the experts that it can tell apart.
_GROUP_THREADS = 1024


def most_expert_tiles(experts: Experts, tokens: int) -> int:
    """Return the tiles of so many tokens at most: each expert may leave one that is not full."""
    pairs = tokens * experts.used
    return pairs // _TILE.tokens + min(experts.count, pairs)


def group_by_expert_launch(
    experts: Experts, groups: ExpertGroups, choice: RouterOutput, tokens: int | Buffer
) -> Launch:
    """Return the grouping of the choices of so many tokens, or of the chunk's."""
    count, _, more = count_most_and_arguments(tokens)
    if experts.count > _GROUP_THREADS:
        raise ValueError(f"{experts.count} experts, at most {_GROUP_THREADS} are supported")
    given: Given = {"int* order": groups.order, "int* tiles": groups.tiles}
    launch = make_launch(
        "moe_prompt.cu group",
        f"{experts.used}_of_{experts.count}",
        Constants(experts=experts.count, threads=_GROUP_THREADS, tokens=_TILE.tokens),
        given | {"const int* ids": choice.ids} | more,
        f"order, (int4*)tiles, ids, {count} * {experts.used}",
        (1, 1),
    )
    return replace(launch, block=_GROUP_THREADS, writes=("order", "tiles"))


def _tiled_experts_launch(
    name: str, chosen: ExpertOperands, stacks: tuple[ExpertMatrices, ...], out: Buffer, inp: Buffer
) -> Launch:
    """Return a product of all tiles: of gate and up, or of one alone."""
    gated, stack, used = len(stacks) == 2, stacks[0], chosen.experts.used
    if any(other.type != stack.type for other in stacks):
        names = " and ".join(other.type.name for other in stacks)
        raise ValueError(f"gate and up are {names}: they share a launch")
    assert chosen.groups is not None
    given: Given = out_argument(out) | {"const u16* in": inp}
    given |= {"const int* tiles": chosen.groups.tiles, "const int* order": chosen.groups.order}
    given |= {"const float* weights": chosen.choice.weights}
    for i, each in enumerate(stacks):
        given |= {f"const u8* w{i}": each.buffer, f"const float* b{i}": each.bias}
    second = ("w1", "b1") if gated else ("0", "0")
    matrices = "{{w0, {}}}, {{b0, {}}}".format(*second)
    constants = _TILE.constants(stack.type.name, stack.cols, "GATED" if gated else "STORE") | {
        "activation": chosen.activation.name,
        "used": used,
        "rows": stack.rows,
        "stacked_rows": stack.stacked_rows,
    }
    function, tiles = name.replace("experts", "expert"), "(const int4*)tiles"
    launch = make_launch(
        f"moe_prompt.cu {function}",
        f"{stack.type.name.lower()}_{stack.rows}x{stack.cols}",
        Constants(constants),
        given,
        f"Grouped{{out, in, {tiles}, order, weights, {matrices}}}",
        (
            ceil_div(stack.rows, _TILE.rows // 2 if gated else _TILE.rows),
            most_expert_tiles(chosen.experts, chosen.tokens),
        ),
    )
    return replace(
        launch,
        name=launch.name.replace("expert", "experts"),
        block=_TILE.threads,
        operations=2 * chosen.tokens * used * stack.rows * len(stacks) * stack.cols,
        n_bytes=stack.expert_bytes * chosen.experts.count * len(stacks),
        per_sm=_TILE.per_sm,
    )


def grouped_hidden_launch(chosen: ExpertOperands, out: Buffer, normed: Buffer) -> Launch:
    """Return gate and up of all pairs: out in halves (tokens * used, hidden), by expert."""
    if chosen.gate is None:
        return _tiled_experts_launch("experts_rows_up", chosen, (chosen.up,), out, normed)
    stacks = (chosen.gate, chosen.up)
    return _tiled_experts_launch("experts_rows_gate_up", chosen, stacks, out, normed)


def grouped_down_launch(chosen: ExpertOperands, out: Buffer, hidden: Buffer) -> Launch:
    """Return weighted results of all pairs: out (tokens, used, dim) floats."""
    return _tiled_experts_launch("experts_rows_down", chosen, (chosen.down,), out, hidden)
