"""Mixtures of experts against float64: router, products, sums.

They run on the emulated GPU, or on the tinygrad device that ORINLLM_TEST_DEVICE names, for instance
under compute-sanitizer with CUDA.
"""

import os
from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tests.engine.gpu.kernels.emulated_buffers import Array, buffer, read
from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.file.ggml import KernelGgmlType, kernel_ggml_types
from orinllm.gpu.kernels.buffers import CHUNK
from orinllm.gpu.kernels.experts import (
    ExpertGroups,
    ExpertMatrices,
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
from orinllm.gpu.kernels.rows import NormWeights
from orinllm.gpu.launch import LaunchGraph
from orinllm.network.layer import Activation, Experts, Gating

pytestmark = pytest.mark.usefixtures("emulation")
EPS = 1e-5
DEVICE = os.environ.get("ORINLLM_TEST_DEVICE", "EMU")
BY_NAME = {t.name: t for t in kernel_ggml_types().values()}


def floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def choice_of(tokens: int, experts: Experts) -> RouterOutput:
    made = tokens * experts.used
    return RouterOutput(
        buffer(np.full(made, -1, np.int32)),
        buffer(np.full(made, np.nan, np.float32)),
        buffer(np.full(tokens * experts.count, np.nan, np.float32)),
        buffer(np.zeros(tokens, np.int32)),
    )


def normed(x: Array, norm: Array) -> Array:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm)


def chosen(logits: Array, experts: Experts, choice: Array | None = None) -> tuple[Array, Array]:
    """Ids and weights of each token's experts in float64, best first."""
    e = np.exp(logits - logits.max(-1, keepdims=True))
    p = {
        Gating.SOFTMAX: e / e.sum(-1, keepdims=True),
        Gating.SIGMOID: 1 / (1 + np.exp(-logits)),
        Gating.SOFTMAX_OF_CHOSEN: logits,
    }[experts.gating]
    score = p if choice is None else p + choice
    ids = np.argsort(-score, axis=-1, kind="stable")[..., : experts.used]
    weights = np.take_along_axis(p, ids, -1)
    if experts.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = np.exp(weights - weights.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    if experts.normalized:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 6.103515625e-5)
    return ids, weights * experts.scale


MIXTURES = [
    Experts(128, 8, 48, Gating.SOFTMAX, normalized=True),
    Experts(8, 2, 48, Gating.SOFTMAX, normalized=True, scale=1.5),
    Experts(64, 6, 48, Gating.SOFTMAX, normalized=False),
    Experts(32, 4, 48, Gating.SOFTMAX_OF_CHOSEN, normalized=False),
    Experts(37, 5, 48, Gating.SIGMOID, normalized=True, scale=2.5),
    Experts(3, 3, 48, Gating.SIGMOID, normalized=False),
]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("experts", MIXTURES, ids=lambda e: f"{e.gating.value}-{e.used}of{e.count}")
def test_router(experts: Experts, biased: bool, tokens: int, rng: np.random.Generator) -> None:
    dim = 136
    x, norm = floats(rng, tokens, dim) * 3, floats(rng, dim)
    w, bias, extra = floats(rng, experts.count, dim), floats(rng, experts.count), None
    logits = normed(x, norm) @ w.T.astype(np.float64)
    router = Router(buffer(w), None, NormWeights(buffer(norm), EPS), experts)
    if biased:
        extra = floats(rng, experts.count) / 4
        logits = logits + bias
        router = Router(router.weight, None, router.norm, experts, buffer(bias), buffer(extra))
    choice = choice_of(tokens, experts)
    launch = LaunchGraph(DEVICE, [router_launch(router, buffer(x), choice, tokens)])
    for _ in range(2):  # counters are left as they were
        launch.start()
    ids, weights = chosen(logits, experts, extra)
    assert (read(choice.ids, np.int32).reshape(ids.shape) == ids).all()
    np.testing.assert_allclose(read(choice.weights).reshape(ids.shape), weights, rtol=1e-4)


@pytest.mark.parametrize(
    ("count", "packed", "value", "ids", "weight"),
    [(40, True, 1.0, [0, 1, 2, 3], 0.25), (8, False, np.nan, [0, 1], np.nan)],
)
def test_router_of_equals_and_of_no_numbers(
    count: int, packed: bool, value: float, ids: list[int], weight: float
) -> None:
    """It takes the lower of equals, of packed rows too; of no numbers experts that exist."""
    experts, dim = Experts(count, len(ids), 48, Gating.SOFTMAX, normalized=True), 64
    rows = np.ones((count, dim), np.float32)
    kind = BY_NAME["Q8_0"] if packed else None
    w = buffer(quants.quantize(rows, GGMLQuantizationType.Q8_0) if packed else rows)
    router = Router(w, kind, NormWeights(buffer(np.ones(dim, np.float32)), EPS), experts)
    choice, x = choice_of(1, experts), np.full((1, dim), value, np.float32)
    LaunchGraph(DEVICE, [router_launch(router, buffer(x), choice, 1)]).start()
    assert read(choice.ids, np.int32).tolist() == ids
    np.testing.assert_allclose(read(choice.weights), weight, rtol=1e-6)


@dataclass
class Mixture:
    """Random experts and their values in float64."""

    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    activation: Activation
    values: list[Array]  # gate, up, down: (experts, rows, cols)
    biases: list[Array]  # (experts, rows)

    def chosen(
        self,
        experts: Experts,
        norm: Array,
        choice: RouterOutput,
        tokens: int,
        groups: ExpertGroups | None = None,
    ) -> ExpertOperands:
        """The experts of so many tokens."""
        return ExpertOperands(
            *(
                self.gate,
                self.up,
                self.down,
                self.activation,
                NormWeights(buffer(norm), EPS),
                choice,
            ),
            *(experts, tokens, groups),
        )

    def expert(self, e: int, x: Array, quantized: bool) -> Array:
        """The result of an expert for x; `quantized`: of int8 activations, as the GEMV has them."""
        gate, up = (self.values[i][e] @ x + self.biases[i][e] for i in range(2))
        hidden = activated(gate, up, self.activation)
        seen = int8(hidden) if quantized else hidden
        return np.asarray(self.values[2][e] @ seen + self.biases[2][e])


def activated(gate: Array, up: Array, activation: Activation) -> Array:
    if activation is Activation.SILU:
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
    assert activation is Activation.GPT_OSS
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return np.asarray(gate / (1 + np.exp(-1.702 * gate)) * (up + 1))


def packed(rng: np.random.Generator, type_: KernelGgmlType, rows: int, cols: int) -> Array:
    """Packed rows of about normal values over sqrt(cols)."""
    if type_.name == "MXFP4":
        blocks = rng.integers(0, 256, (rows * cols // 32, 17), dtype=np.uint8)
        blocks[:, 0] = rng.integers(121, 124, len(blocks))
        return blocks.reshape(rows, -1)
    if type_.name == "Q6_K":
        blocks = rng.integers(0, 256, (rows * cols // 256, 210), dtype=np.uint8)
        d = np.full((len(blocks), 1), 5e-5, np.float16)
        blocks[:, 208:210] = d.view(np.uint8)
        return blocks.reshape(rows, -1)
    made: Array = quants.quantize(
        floats(rng, rows, cols) / np.sqrt(cols), GGMLQuantizationType(type_.id)
    )
    return made


@dataclass(frozen=True)
class Shape:
    types: tuple[str, str]  # of gate and up, of down
    dim: int
    biased: bool
    fused: bool  # gate and up in one tensor
    activation: Activation = Activation.SILU


def make_mixture(rng: np.random.Generator, experts: Experts, shape: Shape) -> Mixture:
    n, hidden, dim = experts.count, experts.hidden, shape.dim
    up_type, down_type = (BY_NAME[name] for name in shape.types)

    def stack(type_: KernelGgmlType, rows: int, cols: int) -> tuple[Array, Array, Array]:
        w = packed(rng, type_, n * rows, cols)
        values = quants.dequantize(w, GGMLQuantizationType(type_.id)).astype(np.float64)
        bias = floats(rng, n, rows) * shape.biased
        return w.reshape(n, rows, -1), values.reshape(n, rows, cols), bias

    def in_file(w: Array) -> Buffer:
        """Place a tensor at its type's least alignment."""
        pad = 32
        whole = buffer(np.concatenate([np.full(pad, 0xEE, np.uint8), w.reshape(-1)]))
        return whole.view(w.size, dtypes.uint8, pad).ensure_allocated()

    both = [stack(up_type, hidden, dim) for _ in range(2)]
    down_w, down_values, down_bias = stack(down_type, dim, hidden)
    biases = [both[0][2], both[1][2], down_bias]
    held = [buffer(b) if shape.biased else None for b in biases]
    if shape.fused:
        joined = in_file(np.concatenate([both[0][0], both[1][0]], axis=1))
        at = both[0][0][0].size
        up_view = joined.view(joined.size - at, dtypes.uint8, at).ensure_allocated()
        gate = ExpertMatrices(joined, up_type, hidden, dim, 2 * hidden, held[0])
        up = ExpertMatrices(up_view, up_type, hidden, dim, 2 * hidden, held[1])
    else:
        gate, up = (
            ExpertMatrices(in_file(w), up_type, hidden, dim, hidden, b)
            for (w, _, _), b in zip(both, held[:2], strict=True)
        )
    down = ExpertMatrices(in_file(down_w), down_type, dim, hidden, dim, held[2])
    values = [both[0][1], both[1][1], down_values]
    return Mixture(gate, up, down, shape.activation, values, biases)


def int8(x: Array) -> Array:
    """Activations as the GEMV has them, of weights that meet int8."""
    groups = x.reshape(-1, 32).astype(np.float32)
    top = np.abs(groups).max(1, keepdims=True)
    safe = np.where(top > 1e-30, top, 1)
    units = np.rint(groups * (np.float32(127) / safe)).astype(np.float64)
    return np.asarray((units * (top / np.float32(127)).astype(np.float64)).reshape(x.shape))


CASES = [
    (Experts(128, 8, 96, Gating.SOFTMAX, True), Shape(("Q8_0", "Q5_0"), 64, False, False)),
    (Experts(8, 2, 256, Gating.SOFTMAX, True), Shape(("Q6_K", "Q6_K"), 256, False, False)),
    (Experts(4, 4, 64, Gating.SIGMOID, True, 2.5), Shape(("Q4_0", "Q8_0"), 96, False, True)),
    (
        Experts(32, 4, 160, Gating.SOFTMAX_OF_CHOSEN, False),
        Shape(("MXFP4", "MXFP4"), 96, True, False, Activation.GPT_OSS),
    ),
    (
        Experts(3, 1, 1056, Gating.SOFTMAX_OF_CHOSEN, False),
        Shape(("MXFP4", "Q8_0"), 1088, True, True, Activation.GPT_OSS),
    ),
]
# Columns of whole units of 64, as the tensor cores take them; one and a half steps of 128.
CHUNK_CASES = [
    (Experts(12, 4, 64, Gating.SOFTMAX, True), Shape(("Q8_0", "Q5_0"), 192, False, False)),
    (Experts(8, 2, 256, Gating.SOFTMAX, True), Shape(("Q6_K", "Q6_K"), 256, False, False)),
    (
        Experts(32, 4, 192, Gating.SOFTMAX_OF_CHOSEN, False),
        Shape(("MXFP4", "MXFP4"), 64, True, True, Activation.GPT_OSS),
    ),
]


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(("experts", "shape"), CASES)
def test_token(experts: Experts, shape: Shape, sequences: int, rng: np.random.Generator) -> None:
    """One token of each sequence; of three sequences, all go to the same experts but one."""
    mixture = make_mixture(rng, experts, shape)
    x = floats(rng, sequences, shape.dim)
    norm = floats(rng, shape.dim)
    ids = np.stack([rng.permutation(experts.count)[: experts.used]] * sequences).astype(np.int32)
    ids[-1] = rng.permutation(experts.count)[: experts.used]
    weights = rng.random(ids.shape).astype(np.float32)
    choice = RouterOutput(buffer(ids), buffer(weights), buffer(weights), buffer(ids))
    hidden, part = (
        buffer(np.full((*ids.shape, width), np.nan, np.float32))
        for width in (experts.hidden, shape.dim)
    )
    token = mixture.chosen(experts, norm, choice, sequences)
    out = buffer(x)
    launches = [
        expert_hidden_launch(token, hidden, out),
        expert_down_launch(token, part, hidden),
        combine_experts_launch(out, part, experts.used, 0.5, sequences),
    ]
    LaunchGraph(DEVICE, launches).start()
    got = read(out).reshape(x.shape)
    for i in range(sequences):
        scale = 1 / np.sqrt((x[i].astype(np.float64) ** 2).mean() + EPS)
        seen = int8(x[i] * norm) * scale  # the norm's scale is applied to the sums
        for given, quantized, tolerance in ((seen, True, 4e-3), (normed(x[i], norm), False, 2e-2)):
            parts = [
                weight * mixture.expert(e, given, quantized)
                for e, weight in zip(ids[i], weights[i], strict=True)
            ]
            added = 0.5 * np.sum(parts, axis=0)
            assert np.linalg.norm(got[i] - x[i] - added) <= tolerance * np.linalg.norm(added)


def groups_of(experts: Experts) -> ExpertGroups:
    """Buffers that hold no valid pair or tile yet."""
    tiles = np.full((most_expert_tiles(experts, CHUNK) + 1, 4), -1, np.int32)
    return ExpertGroups(buffer(np.full(CHUNK * experts.used, -1, np.int32)), buffer(tiles))


def chunk_of(tokens: int) -> Buffer:
    """A chunk of `tokens` tokens behind none, with room for CHUNK."""
    return buffer(np.array([0, tokens, *[0] * CHUNK], np.int32))


def padded(values: Array) -> Array:
    """Values of the tokens of a chunk, and of those behind them what no kernel may read."""
    rest = np.full((CHUNK - len(values), *values.shape[1:]), -1, values.dtype)
    return np.concatenate([values, rest])


@pytest.mark.parametrize("tokens", [1, 37, 512])
@pytest.mark.parametrize(("count", "used"), [(128, 8), (8, 2), (3, 1), (1000, 4)])
def test_groups(count: int, used: int, tokens: int, rng: np.random.Generator) -> None:
    experts = Experts(count, used, 32, Gating.SOFTMAX, True)
    ids = np.stack([rng.permutation(count)[:used] for _ in range(tokens)]).astype(np.int32)
    ids[:, 0] = np.where((ids == 2).any(axis=1), ids[:, 0], 2)  # one has all tokens
    choice = RouterOutput(*[buffer(padded(ids))] * 4)
    groups = groups_of(experts)
    LaunchGraph(DEVICE, [group_by_expert_launch(experts, groups, choice, chunk_of(tokens))]).start()
    want = np.argsort(ids.reshape(-1), kind="stable")
    assert (read(groups.order, np.int32)[: want.size] == want).all()
    tiles = read(groups.tiles, np.int32).reshape(-1, 4)
    expected = []
    for e, n in enumerate(np.bincount(ids.reshape(-1), minlength=count)):
        at = int((ids < e).sum())
        expected += [[e, at + i, min(64, int(n) - i), 0] for i in range(0, int(n), 64)]
    assert tiles[0, 0] == len(expected)
    assert tiles[1 : len(expected) + 1].tolist() == expected


@pytest.mark.parametrize("tokens", [5, 83])
@pytest.mark.parametrize(("experts", "shape"), CHUNK_CASES)
def test_chunk(experts: Experts, shape: Shape, tokens: int, rng: np.random.Generator) -> None:
    """All tokens choose expert 1; experts beyond those that the chunk needs have none."""
    mixture = make_mixture(rng, experts, shape)
    x = floats(rng, tokens, shape.dim)
    norm = floats(rng, shape.dim)
    ids = np.stack([rng.permutation(experts.count - 1)[: experts.used] for _ in x]) + 1
    ids[:, 0] = np.where((ids == 1).any(axis=1), ids[:, 0], 1)
    weights = rng.random(ids.shape).astype(np.float32)
    scratch = buffer(np.zeros(1, np.int32))
    choice = RouterOutput(
        buffer(padded(ids.astype(np.int32))), buffer(padded(weights)), scratch, scratch
    )
    halves = normed(x, norm).astype(np.float16)
    hidden = buffer(np.full((CHUNK * experts.used, experts.hidden), np.nan, np.float16))
    part = buffer(np.full((CHUNK * experts.used, shape.dim), np.nan, np.float32))
    out, held, counted = buffer(padded(x)), groups_of(experts), chunk_of(tokens)
    chunk = mixture.chosen(experts, norm, choice, CHUNK, held)
    launches = [
        group_by_expert_launch(experts, held, choice, counted),
        grouped_hidden_launch(chunk, hidden, buffer(padded(halves))),
        grouped_down_launch(chunk, part, hidden),
        combine_experts_launch(out, part, experts.used, 0.5, counted),
    ]
    LaunchGraph(DEVICE, launches).start()
    got = read(out).reshape(CHUNK, shape.dim)
    assert (got[tokens:] == -1).all()
    for i in range(tokens):
        parts = [
            weight * mixture.expert(e, halves[i].astype(np.float64), False)
            for e, weight in zip(ids[i], weights[i], strict=True)
        ]
        added = 0.5 * np.sum(parts, axis=0)
        assert np.linalg.norm(got[i] - x[i] - added) <= 2e-3 * np.linalg.norm(added)


def test_router_of_a_chunk(rng: np.random.Generator) -> None:
    experts, dim, tokens = MIXTURES[4], 136, 11
    x, norm, w = floats(rng, tokens, dim), floats(rng, dim), floats(rng, experts.count, dim)
    router = Router(buffer(w), None, NormWeights(buffer(norm), EPS), experts)
    choice = choice_of(CHUNK, experts)
    launch = router_launch(router, buffer(padded(x)), choice, chunk_of(tokens))
    for _ in range(2):
        LaunchGraph(DEVICE, [launch]).start()
    ids, weights = chosen(normed(x, norm) @ w.T.astype(np.float64), experts)
    got = read(choice.ids, np.int32).reshape(CHUNK, experts.used)
    assert (got[:tokens] == ids).all()
    assert (got[tokens:] == -1).all()
    found = read(choice.weights).reshape(CHUNK, experts.used)[:tokens]
    np.testing.assert_allclose(found, weights, rtol=1e-4)


@pytest.mark.parametrize("tokens", [3, 6])
def test_idle_sequences_have_no_experts(tokens: int, rng: np.random.Generator) -> None:
    """They are in no group, and nothing of an expert is read or written for them."""
    experts, dim = Experts(8, 2, 256, Gating.SOFTMAX, normalized=True), 256
    x, norm, w = floats(rng, tokens, dim), floats(rng, dim), floats(rng, experts.count, dim)
    router = Router(buffer(w), None, NormWeights(buffer(norm), EPS), experts)
    positions = np.array([[4, -1, 0], [-1, 9, -1]], np.int32).reshape(-1)[:tokens]
    state = buffer(np.concatenate([np.zeros(tokens, np.int32), positions]))
    choice, groups = choice_of(tokens, experts), groups_of(experts)
    launches = [
        router_launch(router, buffer(x), choice, tokens, state),
        group_by_expert_launch(experts, groups, choice, tokens),
    ]
    mixture = make_mixture(rng, experts, Shape(("Q8_0", "Q8_0"), dim, False, False))
    few = mixture.chosen(experts, norm, choice, tokens)
    hidden = buffer(np.full((tokens, experts.used, experts.hidden), np.nan, np.float32))
    LaunchGraph(DEVICE, [*launches, expert_hidden_launch(few, hidden, buffer(x))]).start()
    ids, _ = chosen(normed(x, norm) @ w.T.astype(np.float64), experts)
    idle = positions < 0
    ids[idle] = -1
    assert (read(choice.ids, np.int32).reshape(ids.shape) == ids).all()
    pairs = [p for p in np.argsort(ids.reshape(-1), kind="stable") if ids.reshape(-1)[p] >= 0]
    assert read(groups.order, np.int32)[: len(pairs)].tolist() == pairs
    tiles = read(groups.tiles, np.int32).reshape(-1, 4)
    assert tiles[1 : tiles[0, 0] + 1, 2].sum() == len(pairs)
    made = np.isfinite(read(hidden).reshape(tokens, -1))
    assert made[~idle].all() and not made[idle].any()
