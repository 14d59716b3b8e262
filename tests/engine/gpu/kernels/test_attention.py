"""Attention of tokens and of a prompt's chunk against float64, on the emulated GPU.

Heads of every size, grouped 1 to 8, windows at their borders, sinks; splits of the context that the
output projection combines while it reads them; and what is asked of the L2 ahead.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tests.engine.gpu import cuda_emulation
from tests.engine.gpu.kernels.emulated_buffers import Array, buffer, read
from tinygrad.device import Buffer

from orinllm.file.ggml import kernel_ggml_types
from orinllm.gpu.device import compile_cuda
from orinllm.gpu.kernels.attention import (
    AttentionInputs,
    chunk_attention_launch,
    chunk_rotate_store_launch,
    store_kv_launch,
    token_attention_launch,
)
from orinllm.gpu.kernels.buffers import (
    CHUNK,
    F16,
    FEW,
    PAGE,
    Q8_0,
    AttentionDims,
    KvCacheType,
    LayerKvCache,
    PackedMatrix,
    SplitAttention,
)
from orinllm.gpu.kernels.gemv import GemvProduct, gemv_launches
from orinllm.gpu.kernels.joined_launches import join_neighbouring_launches
from orinllm.gpu.launch import Launch, LaunchGraph, shared_memory_declaration
from orinllm.network.layer import Attention, Rope

pytestmark = pytest.mark.usefixtures("emulation")
EPS = 1e-6
# Tokens of a context, and of one whose splits are more than FEW: COMBINED of parts.cuh.
LONG, LONGER = 832, 2112
F16_WEIGHTS = next(t for t in kernel_ggml_types().values() if t.name == "F16")


@dataclass(frozen=True)
class Case:
    """A layer's attention, `kv` heads of keys for `group` query heads each."""

    dim: int
    kv: int
    group: int
    interleaved: bool = False
    normed: bool = False
    window: int = 0
    sinks: bool = False
    rotated: int = 0  # dimensions; 0: all
    kv_type: KvCacheType = F16
    valued: bool = False  # values are normed

    def attention(self) -> Attention:
        pairs = (self.rotated or self.dim) // 2
        rope = Rope(tuple(0.9**i for i in range(pairs)), self.interleaved)
        heads, scale = self.kv * self.group, self.dim**-0.5
        return Attention(
            *(heads, self.kv, self.dim, scale, rope, self.window, self.normed, self.sinks),
            v_norm=self.valued,
        )


CASES = [
    Case(32, 2, 1, interleaved=True, normed=True),
    Case(64, 2, 4, interleaved=True, valued=True),
    Case(64, 1, 7, window=24, sinks=True),
    Case(80, 2, 2, interleaved=True),
    Case(96, 1, 3, normed=True, rotated=48),
    Case(96, 1, 8, interleaved=True, normed=True),
    Case(128, 2, 4, normed=True, window=100),
    Case(128, 1, 5, interleaved=True),
    Case(128, 1, 6),
    Case(256, 1, 4, normed=True, window=64),
    Case(64, 2, 4, interleaved=True, kv_type=Q8_0),
    Case(64, 1, 8, window=24, sinks=True, kv_type=Q8_0),
    Case(32, 1, 2, rotated=16, kv_type=Q8_0),
    Case(128, 2, 3, normed=True, window=100, kv_type=Q8_0),
    Case(256, 1, 1, kv_type=Q8_0),
    Case(512, 1, 4, normed=True, valued=True),
    Case(512, 1, 2, kv_type=Q8_0),
]
by_case = pytest.mark.parametrize("case", CASES, ids=str)
# gpt-oss has layers with sinks and no window: many splits, of which one counts the sink.
SUNK = replace(CASES[1], sinks=True)


def unset(*shape: int, dtype: Any = np.float32) -> Buffer:
    return buffer(np.full(shape, np.nan, dtype))


def run(*launches: Launch) -> None:
    LaunchGraph("EMU", launches).start()


def pack(values: Array, kind: KvCacheType) -> list[Array]:
    """Return keys or values as they lie in memory: elements, and scales where there are any."""
    if not kind.group:
        return [values.astype(np.float16)]
    blocks = quantize(values.astype(np.float32).reshape(-1, kind.group), GGMLQuantizationType.Q8_0)
    scales, elements = blocks[:, :2].copy().view(np.float16), blocks[:, 2:].copy().view(np.int8)
    shape = (*values.shape[:-1], values.shape[-1] // kind.group)
    return [elements.reshape(values.shape), scales.reshape(shape)]


def unpack(packed: list[Array]) -> Array:
    """Return the values of what `pack` makes."""
    if len(packed) == 1:
        return packed[0].astype(np.float64)
    elements, scales = packed
    each = np.repeat(scales.astype(np.float64), elements.shape[-1] // scales.shape[-1], -1)
    return np.asarray(elements * each)


class Layer:
    """One layer's inputs, with keys and values of the positions before `start` in its pages."""

    def __init__(
        self, case: Case, rng: np.random.Generator, start: int, context: int, sequences: int = 1
    ) -> None:
        self.case, self.rng = case, rng
        self.heads = AttentionDims(case.attention(), context, sequences, case.kv_type)
        pages = context // PAGE
        self.table = rng.permutation(sequences * pages).astype(np.int32).reshape(sequences, pages)
        shape = (sequences * pages, 2, case.kv, PAGE, case.dim)
        packed = pack(rng.standard_normal(shape), case.kv_type)
        for b in range(sequences):  # what is not yet written must not be read
            for position in range(start, context):
                packed[-1][self.table[b, position // PAGE], :, :, position % PAGE] = np.nan
        self.pages = unpack(packed)
        angles = np.arange(context)[:, None] * np.array(self.rope.frequencies)
        self.freqs = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.norms = [rng.standard_normal(case.dim).astype(np.float32) for _ in range(2)]
        self.sinks = rng.standard_normal(case.kv * case.group).astype(np.float32)
        self.shapes = [array.shape for array in packed]
        buffers = [buffer(array) for array in packed]
        scales = buffers[1] if case.kv_type.group else None
        self.cache = LayerKvCache(self.heads, buffers[0], scales, buffer(self.table))

    @property
    def rope(self) -> Rope:
        rope = self.heads.attention.rope
        assert rope is not None
        return rope

    def inputs(self, qkv: Array) -> AttentionInputs:
        q_norm, k_norm = (buffer(n) if self.case.normed else None for n in self.norms)
        return AttentionInputs(
            self.cache,
            buffer(qkv),
            buffer(self.freqs),
            q_norm,
            k_norm,
            buffer(self.sinks) if self.case.sinks else None,
            EPS,
        )

    def qkv(self, tokens: int) -> Array:
        rows = self.case.kv * (self.case.group + 2)
        return self.rng.standard_normal((tokens, rows, self.case.dim)).astype(np.float32)

    def written(self) -> Array:
        """Keys and values by sequence: (sequences, 2, KV heads, context, dim)."""
        cache = self.cache
        packed = [read(cache.buffer, np.int8 if cache.scales else np.float16)]
        packed += [read(cache.scales, np.float16)] if cache.scales else []
        pages = unpack([a.reshape(shape) for a, shape in zip(packed, self.shapes, strict=True)])
        by_sequence = np.moveaxis(pages[self.table], 1, 3)
        shape = by_sequence.shape
        return by_sequence.reshape(*shape[:3], shape[3] * shape[4], shape[5])

    def before(self) -> Array:
        """The same, as it was."""
        by_sequence = np.moveaxis(self.pages[self.table], 1, 3)
        shape = by_sequence.shape
        return by_sequence.reshape(*shape[:3], shape[3] * shape[4], shape[5])

    def rotated(self, head: Array, position: int, norm: Array) -> Array:
        """A head in float64: normed, then turned; the halves of its pairs stand apart."""
        v, pairs = head.astype(np.float64), len(self.rope.frequencies)
        if self.case.normed:
            v = v / np.sqrt((v**2).mean() + EPS) * norm
        turned, rest = v[: 2 * pairs], v[2 * pairs :]
        if self.case.interleaved:
            turned = np.concatenate([turned[0::2], turned[1::2]])
        a, b = turned[:pairs], turned[pairs:]
        c, s = self.freqs[position, :pairs], self.freqs[position, pairs:]
        return np.concatenate([a * c - b * s, b * c + a * s, rest])

    def attended(self, qkv: Array, head: int, position: int, written: Array) -> Array:
        """One query head over `written` (2, KV heads, context, dim), in float64."""
        first = max(0, position + 1 - self.case.window) if self.case.window else 0
        k, v = written[:, head // self.case.group, first : position + 1].astype(np.float64)
        q = self.rotated(qkv[head], position, self.norms[0])
        scores = k @ q * self.heads.attention.scale
        top = scores.max()
        p = np.exp(scores - top)
        total = p.sum() + (np.exp(self.sinks[head] - top) if self.case.sinks else 0)
        return np.asarray(p @ v / total)

    def check_written(self, qkv: Array, position: int, sequence: int) -> None:
        """The token's key and value are there, and nothing else has changed."""
        new, heads = self.written()[sequence], self.case.kv * self.case.group
        for g in range(self.case.kv):
            k = self.rotated(qkv[heads + g], position, self.norms[1])
            value = qkv[heads + self.case.kv + g].astype(np.float64)
            if self.case.valued:
                value = value / np.sqrt((value**2).mean() + EPS)
            for got, want in ((new[0, g, position], k), (new[1, g, position], value)):
                off = np.abs(got - want)
                if group := self.case.kv_type.group:  # half a step, and a scale's rounding
                    top = np.abs(want).reshape(-1, group).max(1)
                    assert (off.reshape(-1, group).max(1) <= top * (0.5 / 127 + 5e-4)).all()
                else:
                    assert (off <= 1e-3 * np.abs(want) + 1e-5).all()


def parts_of(layer: Layer, splits: int) -> SplitAttention:
    rows = layer.heads.sequences * layer.heads.attention.heads * splits
    return SplitAttention(layer.heads, splits, unset(rows, layer.case.dim), unset(rows, 2))


def state_of(layer: Layer, positions: list[int]) -> Buffer:
    counters = 1 + layer.heads.sequences * layer.heads.blocks_per_sequence
    return buffer(np.array([0] * len(positions) + positions + [0] * counters, np.int32))


@pytest.mark.parametrize("position", [0, 62, 63, 64, 191, LONG - 13])
@by_case
def test_a_token(case: Case, position: int, rng: np.random.Generator) -> None:
    """In one split to floats, and in seven that the last block of a head combines to halves."""
    if case.window and position == 191:  # the window begins with the last token of a page
        position = PAGE + case.window - 2
    layer = Layer(case, rng, position, LONG)
    qkv, heads = layer.qkv(1), case.kv * case.group
    splits = 7 if position == LONG - 13 and not case.window else 1
    dtype = np.float16 if splits > 1 else np.float32
    out, state = unset(heads, case.dim, dtype=dtype), state_of(layer, [position])
    run(token_attention_launch(out, layer.inputs(qkv), parts_of(layer, splits), state))
    layer.check_written(qkv[0], position, 0)
    new, before = layer.written()[0], layer.before()[0]
    np.testing.assert_array_equal(new[:, :, :position], before[:, :, :position])
    assert np.isnan(new[:, :, position + 1 :]).all()
    got = read(out, dtype).reshape(heads, case.dim)
    for i in range(heads):
        want = layer.attended(qkv[0], i, position, new)
        np.testing.assert_allclose(got[i], want, rtol=4e-3, atol=4e-3)
    assert read(state, np.int32).tolist() == [
        0,
        position,
        *[0] * (1 + layer.heads.blocks_per_sequence),
    ]


def test_the_smallest_keys_and_values_keep_their_signs(rng: np.random.Generator) -> None:
    """A scale that is a half without all its bits may be a third too small: 127 is the most."""
    layer = Layer(CASES[10], rng, 3, PAGE)
    qkv, heads = layer.qkv(1) * np.float32(4e-6), layer.case.kv * layer.case.group
    out = unset(heads, layer.case.dim)
    run(token_attention_launch(out, layer.inputs(qkv), parts_of(layer, 1), state_of(layer, [3])))
    values = qkv[0, heads + layer.case.kv :].astype(np.float64)
    off = np.abs(layer.written()[0, 1, :, 3] - values)
    top = np.abs(values).reshape(-1, 32).max(1)
    assert (off.reshape(-1, 32).max(1) <= 0.5 * top).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[11]], ids=str)
def test_tokens_of_sequences_at_their_own_positions(case: Case, rng: np.random.Generator) -> None:
    positions = [0, 40, 63]
    qkv, heads = Layer(case, rng, 63, 128, 3).qkv(3), case.kv * case.group
    for stored in (False, True):
        layer, out = Layer(case, rng, 63, 128, 3), unset(3, heads, case.dim)
        inputs, state = layer.inputs(qkv), state_of(layer, positions)
        attention = token_attention_launch(out, inputs, parts_of(layer, 3), state, stored)
        if stored:  # by another launch, for tokens that see one another
            before = layer.written()
            run(attention)
            np.testing.assert_array_equal(layer.written(), before)
            run(store_kv_launch(inputs, 3, state))
        run(attention)
        got, new = read(out).reshape(3, heads, case.dim), layer.written()
        for b, position in enumerate(positions):
            layer.check_written(qkv[b], position, b)
            for i in range(heads):
                want = layer.attended(qkv[b], i, position, new[b])
                np.testing.assert_allclose(got[b, i], want, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("dim", "launches"), [(128, 1), (256, 2)])
def test_what_parts_of_a_launch_need(dim: int, launches: int, rng: np.random.Generator) -> None:
    """Shared memory of the largest, and no more registers than a part has.

    The output projection of Gemma 3 12B in halves, of four tokens, has as many warps.
    """
    layer = Layer(Case(dim, 1, 4), rng, 0, PAGE)
    inputs, state, out = layer.inputs(layer.qkv(1)), state_of(layer, [0]), unset(4, dim)
    attention = token_attention_launch(out, inputs, parts_of(layer, 1), state)
    larger = replace(attention, shared=attention.shared + 16)
    joined = join_neighbouring_launches([attention, larger], state, 0)
    assert len(joined) == launches
    assert shared_memory_declaration(larger.shared) in joined[-1].cuda_source


@pytest.mark.parametrize(
    ("case", "sequences", "position", "splits"),
    [
        # At 128 the last of three splits is the new token alone.
        *((SUNK, 1, *each) for each in ((30, 1), (100, 2), (128, 3), (819, 4), (2047, 32))),
        *((CASES[4], 3, *each) for each in ((30, 1), (255, 4))),
    ],
)
def test_few_splits_are_combined_by_their_reader(
    case: Case, sequences: int, position: int, splits: int, rng: np.random.Generator
) -> None:
    layer = Layer(case, rng, position, LONGER, sequences)
    qkv, cols, rows = layer.qkv(sequences), case.kv * case.group * case.dim, 5
    attended, state = unset(sequences, cols), state_of(layer, [position] * sequences)
    most = 32 if splits > FEW else 7
    parts = parts_of(layer, most)
    run(token_attention_launch(attended, layer.inputs(qkv), parts, state))
    left = 1 < splits <= FEW
    assert np.isnan(read(attended)).all() == left, "a few parts are left as they are"
    made = np.isfinite(read(parts.part).reshape(-1, most, case.dim)).all((0, 2))
    assert made.sum() == (splits if splits > 1 else 0)

    packed = rng.standard_normal((rows, cols)).astype(np.float16)
    before = rng.standard_normal((sequences, rows)).astype(np.float32)
    out, weight = (
        buffer(before),
        PackedMatrix(buffer(packed.view(np.uint8)), F16_WEIGHTS, rows, cols),
    )
    product = GemvProduct(
        *("out", "ADD", (weight,), out, attended, state), sequences=sequences, parts=parts
    )
    run(*gemv_launches("EMU", product))
    new, w = layer.written(), packed.astype(np.float64)
    for b in range(sequences):
        heads = range(case.kv * case.group)
        x = np.concatenate([layer.attended(qkv[b], i, position, new[b]) for i in heads])
        magnitude = np.abs(w) @ np.abs(x) + np.abs(before[b])
        got = read(out).reshape(sequences, rows)[b]
        assert (np.abs(got - w @ x - before[b]) <= 1e-3 * magnitude).all()


@pytest.mark.parametrize("position", [0, 40, 63, 64, 299])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_cache_is_asked_for_while_q_k_and_v_are_computed(
    case: Case, window: int, position: int, rng: np.random.Generator
) -> None:
    """The first tokens that attention will read, as many as a quarter of the L2 holds."""
    case, context, cols = replace(case, window=window), 320, 256
    layer = Layer(case, rng, context, context, 2)
    cache = layer.cache
    packed = rng.standard_normal((9, cols)).astype(np.float16)
    weight = PackedMatrix(buffer(packed.view(np.uint8)), F16_WEIGHTS, 9, cols)
    state = state_of(layer, [position, position])
    norm = buffer(np.ones(cols, np.float32))
    out, x = buffer(np.zeros((2, 9), np.float32)), buffer(np.ones((2, cols), np.float32))
    product = GemvProduct(
        *("qkv", "STORE", (weight,), out, x, state), norm=norm, sequences=2, ahead=cache
    )
    (launch,) = gemv_launches("EMU", product)
    run(launch)
    asked = cuda_emulation.prefetched(compile_cuda("EMU", launch.cuda_source))

    # orinllm asks for 64 KiB a multiprocessor, an Orin having 256 KiB of L2 for each.
    size = layer.heads.kv.size
    token = case.dim * size
    room = cuda_emulation.MULTIPROCESSORS * (64 << 10) // (2 * 2 * case.kv * token)
    # Of a window whole pages are read.
    older = max(0, position - window) // PAGE * PAGE if window else 0
    last = min(position, older + room)
    wanted = set()
    for b in range(2):
        for half in range(2):
            for g in range(case.kv):
                for at in range(older * token, last * token, 128):
                    page = int(layer.table[b, at // token // PAGE])
                    row = ((page * 2 + half) * case.kv + g) * PAGE * token
                    wanted.add(cache.buffer._buf + row + at % (PAGE * token))
    assert len(asked) == len(wanted)
    assert set(asked) == wanted


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 70), (31, 33), (131, 17)])
@by_case
def test_a_chunk(case: Case, start: int, tokens: int, rng: np.random.Generator) -> None:
    """At 131 a window of 100 begins inside of a tile of keys that are none of the future."""
    layer, heads = Layer(case, rng, start, 192), case.kv * case.group
    qkv = layer.qkv(tokens)
    chunk = buffer(np.array([start, tokens, *[0] * CHUNK], np.int32))
    q = unset(tokens, heads, case.dim, dtype=np.float16)
    out = buffer(np.full((tokens + 1, heads, case.dim), 7, np.float16))
    inputs = layer.inputs(qkv)
    run(chunk_rotate_store_launch(q, inputs, chunk), chunk_attention_launch(out, q, inputs, chunk))
    got, new = read(out, np.float16).reshape(tokens + 1, heads, case.dim), layer.written()[0]
    assert (got[tokens] == 7).all()
    np.testing.assert_array_equal(new[:, :, :start], layer.before()[0][:, :, :start])
    assert np.isnan(new[:, :, start + tokens :]).all()
    for t in {0, tokens // 2, tokens - 1}:
        layer.check_written(qkv[t], start + t, 0)
        for i in range(heads):
            want = layer.attended(qkv[t], i, start + t, new)
            np.testing.assert_allclose(got[t, i], want, rtol=0.02, atol=0.01)


def test_the_end_of_the_largest_pool(rng: np.random.Generator) -> None:
    """Pages of which the last element is the last that 32 bits address: nothing wraps."""
    case, position, tokens = Case(64, 2, 2), 70, 3
    layer = Layer(case, rng, position, 128)
    page = 2 * case.kv * PAGE * case.dim
    above = (1 << 32) // page - 2  # of the two pages that are there
    layer.cache = replace(layer.cache, table=buffer((layer.table + above).astype(np.int32)))
    qkv, heads = layer.qkv(tokens), case.kv * case.group
    cache = layer.cache.buffer
    start = cache._buf
    cache._bufs["EMU"] = start - 2 * above * page
    try:
        out, state = unset(heads, case.dim), state_of(layer, [position])
        run(token_attention_launch(out, layer.inputs(qkv[:1]), parts_of(layer, 2), state))
        chunk = buffer(np.array([position, tokens, *[0] * CHUNK], np.int32))
        q, rows = (unset(tokens, heads, case.dim, dtype=np.float16) for _ in range(2))
        inputs = layer.inputs(qkv)
        run(
            chunk_rotate_store_launch(q, inputs, chunk),
            chunk_attention_launch(rows, q, inputs, chunk),
        )
    finally:
        cache._bufs["EMU"] = start
    new, got = layer.written()[0], read(rows, np.float16).reshape(tokens, heads, case.dim)
    for t in range(tokens):
        layer.check_written(qkv[t], position + t, 0)
        for i in range(heads):
            want = layer.attended(qkv[t], i, position + t, new)
            np.testing.assert_allclose(got[t, i], want, rtol=0.02, atol=0.01)


def test_a_context_of_131072_tokens(rng: np.random.Generator) -> None:
    """Its last token, in 33 splits; a table may name a page more than once."""
    case, context = Case(64, 1, 2, kv_type=Q8_0), 131072
    position, pages = context - 1, context // PAGE
    layer = Layer(case, rng, 5 * PAGE, 5 * PAGE)
    layer.heads = replace(layer.heads, context=context)
    table = layer.table[:, np.arange(pages) % 4]
    table[0, -1] = layer.table[0, 4]  # the last token's key is written to a page of its own
    layer.table = table
    layer.cache = replace(layer.cache, heads=layer.heads, table=buffer(table))
    angles = position * np.array(layer.rope.frequencies)
    layer.freqs = np.zeros((context, case.dim), np.float32)
    layer.freqs[position] = np.concatenate([np.cos(angles), np.sin(angles)])
    qkv, heads = layer.qkv(1), case.group
    out = unset(heads, case.dim, dtype=np.float16)
    run(
        token_attention_launch(
            out, layer.inputs(qkv), parts_of(layer, 33), state_of(layer, [position])
        )
    )
    written = layer.written()[0]
    got = read(out, np.float16).reshape(heads, case.dim)
    for i in range(heads):
        want = layer.attended(qkv[0], i, position, written)
        np.testing.assert_allclose(got[i], want, rtol=4e-3, atol=4e-3)
