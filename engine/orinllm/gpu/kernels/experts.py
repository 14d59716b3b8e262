"""Mixtures of experts: cuda/moe.cu, and moe_prompt.cu for a chunk of a prompt and a batch.

One token of each of few sequences: choose_experts, expert_hidden, expert_parts, combine. A chunk,
or a batch of more: choose_experts, group_by_expert, rows_hidden, rows_parts, combine. A shared
expert is an ordinary feed-forward part beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.file.ggml import KernelType
from orinllm.gpu.device import blocks_per_sm, multiprocessors
from orinllm.gpu.kernels.buffers import ceil_div
from orinllm.gpu.kernels.gemv import GemvConstants, plan_gemv, shared_memory
from orinllm.gpu.kernels.rows import Norm, count_of
from orinllm.gpu.kernels.tile import Tile, TileConstants
from orinllm.gpu.launch import ROW_THREADS, Constants, Launch, arguments_of, launch_of_rows, name_of
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
    type: KernelType | None  # None: floats
    norm: Norm
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
    type: KernelType
    rows: int
    cols: int
    stacked_rows: int
    bias: Buffer | None = None  # floats (experts, rows)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's rows."""
        return self.rows * self.cols // self.type.block_values * self.type.block_bytes


@dataclass(frozen=True)
class RouteConstants(Constants):
    """P of route()."""

    type: str
    cols: int
    experts: int
    used: int
    gating: str
    normalized: bool
    warps: int
    routed: int
    tokens: int
    grid: int


@dataclass(frozen=True)
class ExpertConstants(GemvConstants):
    """P of expert_gate_up() and expert_down()."""

    used: int
    rows: int
    stacked_rows: int


@dataclass(frozen=True)
class CombineConstants(Constants):
    """P of combine()."""

    cols: int
    used: int
    threads: int
    adds: bool


def choose_experts(
    router: Router,
    x: Buffer,
    choice: RouterOutput,
    tokens: int | Buffer,
    state: Buffer | None = None,
) -> Launch:
    """Return the router: `choice` for each row of x (tokens, cols).

    Sequences that `state` (attention.cu) has as idle get no expert.
    """
    count, most, more = count_of(tokens)
    experts, cols = router.experts, router.norm.weight.size
    routed, together = (_ROUTED, _ROUTED_TOKENS) if most > _ROUTED_TOKENS else (1, 1)
    grid = ceil_div(experts.count, routed * _ROUTER_WARPS)
    type_name = "F32" if router.type is None else router.type.name
    vectors = {"bias": router.bias, "choice": router.choice_bias, "scales": router.scales}
    vector_names = ", ".join(name_of(*vector) for vector in vectors.items())
    positions = "0" if state is None else f"state + {most}"
    given: dict[str, Buffer | None] = {"int* ids": choice.ids, "float* weights": choice.weights}
    given |= {"float* logits": choice.logits, "const float* x": x}
    given |= {"const float* norm": router.norm.weight, "const u8* w": router.weight}
    given |= {"int* counters": choice.counters}
    given |= {f"const float* {name}": vector for name, vector in vectors.items()}
    given |= {"const int* state": state}
    return Launch(
        name=f"route_{type_name.lower()}_{experts.used}_of_{experts.count}x{cols}",
        file="moe.cu",
        constants=(
            RouteConstants(
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
        arguments=arguments_of(given | more),
        body=(
            "  __shared__ int flag;\n"
            f"  route<P0>(Route{{ids, weights, logits, x, norm, w, {vector_names}, {positions}, "
            f"counters, {count}, {router.norm.eps!r}f, {experts.scale!r}f}}, &flag);"
        ),
        grid=(grid, ceil_div(most, together), 1),
        block=_ROUTER_WARPS * 32,
        writes=("ids", "weights", "logits", "counters"),
        operations=2 * most * experts.count * cols,
        n_bytes=router.weight.nbytes,
    )


@dataclass(frozen=True)
class _Spread:
    """A product of chosen experts over the machine."""

    constants: ExpertConstants
    shared: int
    grid: tuple[int, int, int]


def _spread(
    device: str, stack: ExpertMatrices, mode: str, activation: str, choices: int
) -> _Spread:
    gated = mode == "GATED"
    total = stack.rows * choices * (2 if gated else 1)
    plan = plan_gemv(device, mode, stack.type, (total, stack.cols))
    items = ceil_div(stack.rows, 1 if gated else plan.rows_per_item)
    blocks = max(1, multiprocessors(device) * blocks_per_sm(device) // choices)
    grid = min(ceil_div(items, plan.warps), blocks)
    return _Spread(
        constants=ExpertConstants(
            type=stack.type.name,
            cols=stack.cols,
            rows_per_item=plan.rows_per_item,
            depth=plan.depth,
            mode=mode,
            activation=activation,
            segments=2 if gated else 1,
            warps=plan.warps,
            grid=grid,
            norm=mode != "STORE",
            columns=1,
            first_row=0,
            out_stride=stack.rows,
            softcap=0.0,
            used=0,
            rows=stack.rows,
            stacked_rows=stack.stacked_rows,
        ),
        shared=shared_memory(stack.type, stack.cols, plan, 1),
        grid=(grid, choices, 1),
    )


@dataclass(frozen=True)
class TokenExperts:
    """The experts of one token of each of N sequences."""

    gate: ExpertMatrices | None
    up: ExpertMatrices
    down: ExpertMatrices
    activation: Activation
    norm: Norm
    choice: RouterOutput
    used: int
    sequences: int


def _launch(
    name: str, body: str, spread: _Spread, used: int, given: Mapping[str, Buffer | None]
) -> Launch:
    constants = replace(spread.constants, used=used)
    return Launch(
        name=name,
        file="moe.cu",
        constants=(constants,),
        arguments=arguments_of(given),
        body=f"  __shared__ u8 __align__(16) smem[{spread.shared}];\n{body}",
        grid=spread.grid,
        block=constants.warps * 32,
        writes=("out",),
        operations=2 * spread.grid[1] * constants.rows * constants.segments * constants.cols,
    )


def expert_hidden(device: str, experts: TokenExperts, out: Buffer, x: Buffer) -> Launch:
    """Return gate and up of the chosen experts: out (sequences, used, hidden) floats.

    Of experts without a gate it is up alone.
    """
    gate, up, choices = experts.gate, experts.up, experts.sequences * experts.used
    if gate is not None and gate.type != up.type:
        raise ValueError(f"gate is {gate.type.name} and up {up.type.name}: they share a launch")
    mode, role = ("ACTIVATED", "up") if gate is None else ("GATED", "gate_up")
    spread = _spread(device, gate or up, mode, experts.activation.name, choices)
    given: dict[str, Buffer | None] = {"float* out": out, "const float* x": x}
    given |= {"const float* norm": experts.norm.weight, "const int* ids": experts.choice.ids}
    if gate is None:
        matrices, biases = "up, 0", f"{name_of('bias', up.bias)}, 0"
        given |= {"const u8* up": up.buffer, "const float* bias": up.bias}
    else:
        matrices = "gate, up"
        biases = f"{name_of('gate_bias', gate.bias)}, {name_of('up_bias', up.bias)}"
        given |= {"const u8* gate": gate.buffer, "const u8* up": up.buffer}
        given |= {"const float* gate_bias": gate.bias, "const float* up_bias": up.bias}
    return _launch(
        f"experts_{role}_{up.type.name.lower()}_{up.rows}x{up.cols}_{choices}",
        f"  expert_gate_up<P0>(Chosen{{smem, out, x, norm, ids, 0, {{{matrices}}}, {{{biases}}}, "
        f"{experts.norm.eps!r}f}});",
        spread,
        experts.used,
        given,
    )


def expert_parts(device: str, experts: TokenExperts, out: Buffer, hidden: Buffer) -> Launch:
    """Return weighted results of the chosen experts: out (sequences, used, dim) floats."""
    down, choices, choice = experts.down, experts.sequences * experts.used, experts.choice
    given: dict[str, Buffer | None] = {"float* out": out, "const float* hidden": hidden}
    given |= {"const int* ids": choice.ids, "const float* weights": choice.weights}
    given |= {"const u8* down": down.buffer, "const float* bias": down.bias}
    return _launch(
        f"experts_down_{down.type.name.lower()}_{down.rows}x{down.cols}_{choices}",
        f"  expert_down<P0>(Chosen{{smem, out, hidden, 0, ids, weights, {{down, 0}}, "
        f"{{{name_of('bias', down.bias)}, 0}}, 0.f}});",
        _spread(device, down, "STORE", experts.activation.name, choices),
        experts.used,
        given,
    )


def combine(
    x: Buffer, part: Buffer, used: int, factor: float | None, tokens: int | Buffer
) -> Launch:
    """Return x (tokens, cols) += factor * the sum of part (tokens, used, cols).

    Without a factor x is the sum.
    """
    count, most, more = count_of(tokens)
    cols = x.size // most
    return launch_of_rows(
        "moe.cu",
        f"combine_{used}x{cols}",
        CombineConstants(cols, used, ROW_THREADS, factor is not None),
        {"float* x": x, "const float* part": part, **more},
        f"combine<P0>(x, part, {1.0 if factor is None else factor!r}f, {count})",
        (ceil_div(cols, ROW_THREADS), most),
    )


# ---- rows of halves, of a chunk or of a batch: cuda/moe_prompt.cu

# Of a block: 64 pairs at most, as an expert of a chunk has few.
_TILE = Tile(2, 8, 4, 1, 3)
# Threads of the block that groups, and the experts that it can tell apart.
_GROUP_THREADS = 1024


@dataclass(frozen=True)
class GroupConstants(Constants):
    """P of group()."""

    experts: int
    threads: int
    tokens: int


@dataclass(frozen=True)
class ExpertTileConstants(TileConstants):
    """P of expert_rows_gate_up() and expert_rows_down()."""

    activation: str
    used: int
    rows: int
    stacked_rows: int


@dataclass(frozen=True)
class ExpertGroups:
    """Buffers of the pairs of token and choice, by expert."""

    order: Buffer  # int32 (tokens * used)
    tiles: Buffer  # int32 (most_tiles() + 1, 4)


@dataclass(frozen=True)
class RowExperts:
    """The experts of at most `tokens` rows of halves."""

    gate: ExpertMatrices | None
    up: ExpertMatrices
    down: ExpertMatrices
    activation: Activation
    choice: RouterOutput
    groups: ExpertGroups
    experts: Experts
    tokens: int


def most_tiles(experts: Experts, tokens: int) -> int:
    """Return the tiles of so many tokens at most: each expert may leave one that is not full."""
    pairs = tokens * experts.used
    return pairs // _TILE.tokens + min(experts.count, pairs)


def group_by_expert(
    experts: Experts, groups: ExpertGroups, choice: RouterOutput, tokens: int | Buffer
) -> Launch:
    """Return the grouping of the choices of so many tokens, or of the chunk's."""
    count, _, more = count_of(tokens)
    if experts.count > _GROUP_THREADS:
        raise ValueError(f"{experts.count} experts, at most {_GROUP_THREADS} are supported")
    return Launch(
        name=f"group_{experts.used}_of_{experts.count}",
        file="moe_prompt.cu",
        constants=(GroupConstants(experts.count, _GROUP_THREADS, _TILE.tokens),),
        arguments=arguments_of(
            {"int* order": groups.order, "int* tiles": groups.tiles, "const int* ids": choice.ids}
            | more
        ),
        body=f"  group<P0>(order, (int4*)tiles, ids, {count} * {experts.used});",
        grid=(1, 1, 1),
        block=_GROUP_THREADS,
        writes=("order", "tiles"),
    )


def _tiles(
    name: str,
    chosen: RowExperts,
    stacks: tuple[ExpertMatrices, ...],
    out: dict[str, Buffer],
    inp: Buffer,
) -> Launch:
    """Return a product of all tiles: of gate and up, or of one alone."""
    gated, stack, used = len(stacks) == 2, stacks[0], chosen.experts.used
    if any(other.type != stack.type for other in stacks):
        names = " and ".join(other.type.name for other in stacks)
        raise ValueError(f"gate and up are {names}: they share a launch")
    given: dict[str, Buffer | None] = {**out, "const u16* in": inp}
    given |= {"const int* tiles": chosen.groups.tiles, "const int* order": chosen.groups.order}
    given |= {"const float* weights": chosen.choice.weights}
    for i, each in enumerate(stacks):
        given |= {f"const u8* w{i}": each.buffer, f"const float* b{i}": each.bias}
    ws = [f"w{i}" for i in range(len(stacks))]
    biases = [name_of(f"b{i}", each.bias) for i, each in enumerate(stacks)]
    matrices, vectors = (", ".join([*both, "0"][:2]) for both in (ws, biases))
    function = name.replace("experts", "expert")
    return Launch(
        name=f"{name}_{stack.type.name.lower()}_{stack.rows}x{stack.cols}",
        file="moe_prompt.cu",
        constants=(
            ExpertTileConstants(
                *(stack.type.name, stack.cols, "GATED" if gated else "STORE", *_TILE.constants),
                *(chosen.activation.name, used, stack.rows, stack.stacked_rows),
            ),
        ),
        arguments=arguments_of(given),
        body=(
            f"  {function}<P0>(Grouped{{out, in, (const int4*)tiles, order, weights, "
            f"{{{matrices}}}, {{{vectors}}}}});"
        ),
        grid=(
            ceil_div(stack.rows, _TILE.rows // 2 if gated else _TILE.rows),
            most_tiles(chosen.experts, chosen.tokens),
            1,
        ),
        block=_TILE.threads,
        writes=("out",),
        operations=2 * chosen.tokens * used * stack.rows * len(stacks) * stack.cols,
        n_bytes=stack.expert_bytes * chosen.experts.count * len(stacks),
        per_sm=_TILE.per_sm,
    )


def rows_hidden(chosen: RowExperts, out: Buffer, normed: Buffer) -> Launch:
    """Return gate and up of all pairs: out in halves (tokens * used, hidden), by expert."""
    if chosen.gate is None:
        return _tiles("experts_rows_up", chosen, (chosen.up,), {"u16* out": out}, normed)
    stacks = (chosen.gate, chosen.up)
    return _tiles("experts_rows_gate_up", chosen, stacks, {"u16* out": out}, normed)


def rows_parts(chosen: RowExperts, out: Buffer, hidden: Buffer) -> Launch:
    """Return weighted results of all pairs: out (tokens, used, dim) floats."""
    return _tiles("experts_rows_down", chosen, (chosen.down,), {"float* out": out}, hidden)
