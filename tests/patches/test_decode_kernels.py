"""0013, 0020, 0022-0025: the kernels of a token against float64 on `gguf`'s dequantization.

They run as CUDA C on the CPU (`cuda_emulation`), so no GPU is needed; the same source is what a
GPU compiles.
"""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.patches import cuda_emulation
from tests.patches.decode_numerics import (
    BF16,
    F16,
    HEADS,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    TYPES,
    adversarial_weights,
    attend,
    buffer,
    close,
    dequantized,
    nv,
    quantized,
    random_weights,
    read,
    rotated,
    run,
    weight,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


@pytest.mark.parametrize("mode", ["STORE", "ADD", "SWIGLU"])
@pytest.mark.parametrize(("cols", "rows"), [(256, 37), (1536, 19), (8192, 6)])
@pytest.mark.parametrize("typ", TYPES)
def test_gemv(typ: int, cols: int, rows: int, mode: str, rng: np.random.Generator) -> None:
    counts = {"STORE": [rows, 2, 5], "ADD": [rows], "SWIGLU": [rows, rows]}[mode]
    packed = [random_weights(rng, typ, n, cols) for n in counts]
    x, norm = (rng.standard_normal(cols).astype(np.float32) * s for s in (3, 1))
    bias = rng.standard_normal(counts[-1]).astype(np.float32)
    before = rng.standard_normal(sum(counts)).astype(np.float32)
    out, normed = buffer(before), mode != "ADD"
    biases = [None] * (len(counts) - 1) + [buffer(bias) if mode == "STORE" else None]
    run(
        *nv.gemv(
            *("EMU", "test", mode, [weight(typ, w, cols) for w in packed]),
            *(buffer(norm) if normed else None, biases, 1e-5, out, buffer(x)),
        )
    )
    seen = quantized(typ, x * norm if normed else x)
    if normed:
        seen = seen / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-5)
    sums = [dequantized(typ, w) @ seen for w in packed]
    sizes = np.concatenate([np.abs(dequantized(typ, w)) @ np.abs(seen) for w in packed])
    got = read(out).astype(np.float64)
    if mode == "SWIGLU":
        gate, up = sums
        with np.errstate(over="ignore"):
            want = gate / (1 + np.exp(-gate)) * up
        magnitude = (1 + np.abs(gate)) * sizes[rows:] + sizes[:rows] * (1 + np.abs(up))
        close(got[:rows], want, magnitude, 2e-6)
    else:
        want = np.concatenate(sums)
        want[-counts[-1] :] += bias if mode == "STORE" else before
        close(got, want, sizes + 1, 2e-6)


@pytest.mark.parametrize(
    ("mode", "batch", "cols"), [("STORE", 2, 1536), ("ADD", 3, 256), ("SWIGLU", 4, 1024)]
)
@pytest.mark.parametrize("typ", TYPES)
def test_gemv_of_a_batch(
    typ: int, batch: int, cols: int, mode: str, rng: np.random.Generator
) -> None:
    counts = {"STORE": [13, 2, 5], "ADD": [13], "SWIGLU": [13, 13]}[mode]
    packed = [random_weights(rng, typ, n, cols) for n in counts]
    x = rng.standard_normal((batch, cols)).astype(np.float32)
    norm = rng.standard_normal(cols).astype(np.float32)
    bias = rng.standard_normal(counts[-1]).astype(np.float32)
    rows, normed = counts[0] if mode == "SWIGLU" else sum(counts), mode != "ADD"
    before = rng.standard_normal((batch, rows)).astype(np.float32)
    out = buffer(before)
    biases = [None] * (len(counts) - 1) + [buffer(bias) if mode == "STORE" else None]
    ws = [weight(typ, w, cols) for w in packed]
    given = (buffer(norm) if normed else None, biases, 1e-5, out, buffer(x))
    run(*nv.gemv("EMU", "test", mode, ws, *given, batch=batch))
    got = read(out).reshape(batch, rows).astype(np.float64)
    for i in range(batch):
        seen = quantized(typ, x[i] * norm if normed else x[i])
        if normed:
            seen = seen / np.sqrt((x[i].astype(np.float64) ** 2).mean() + 1e-5)
        sums = [dequantized(typ, w) @ seen for w in packed]
        sizes = [np.abs(dequantized(typ, w)) @ np.abs(seen) for w in packed]
        if mode == "SWIGLU":
            gate, up = sums
            with np.errstate(over="ignore"):
                want = gate / (1 + np.exp(-gate)) * up
            size = (1 + np.abs(gate)) * sizes[1] + sizes[0] * (1 + np.abs(up))
        else:
            want, size = np.concatenate(sums), np.concatenate(sizes) + 1
            want[-counts[-1] :] += bias if mode == "STORE" else before[i]
        close(got[i], want, size, 2e-6)


def test_head_of_a_batch_in_two_launches(rng: np.random.Generator) -> None:
    """As where shared memory does not hold all activations: the last launch moves the position."""
    cols, rows, batch = 256, 37, 3
    packed = random_weights(rng, Q6_K, rows, cols)
    x = rng.standard_normal((batch, cols)).astype(np.float32)
    logits = buffer(np.zeros((batch, rows), np.float32))
    state = buffer(np.array([7, 8, 9, 41, 0, 0, 0, 0], np.int32))
    tail = [buffer(np.zeros(64, np.float32)), buffer(np.zeros(64, np.int32)), state]
    norm, w, xs = buffer(np.ones(cols, np.float32)), weight(Q6_K, packed, cols), buffer(x)
    for at, n in ((0, 2), (2, 1)):
        out = logits.view(n * rows, logits.dtype, at * rows * 4).ensure_allocated()
        inp = xs.view(n * cols, xs.dtype, at * cols * 4).ensure_allocated()
        head = ("EMU", "head", "ARGMAX", [w], norm, [None], 1e-5, out, inp, tail, batch, (at, n))
        run(*nv.gemv(*head))
    best = read(logits).reshape(batch, rows).argmax(1).tolist()
    assert best == [int(np.argmax(dequantized(Q6_K, packed) @ row)) for row in x]
    assert read(state, np.int32).tolist() == [*best, 42, 0, 0, 0, 0]


@pytest.mark.parametrize("typ", TYPES)
def test_gemv_of_adversarial_blocks(typ: int, rng: np.random.Generator) -> None:
    cols, rows = 1024, 9
    packed = adversarial_weights(typ, rows, cols)
    x = np.where(np.arange(cols) % 96 < 32, 0, rng.standard_normal(cols) * 1e4).astype(np.float32)
    x[40] = 3e4  # an outlier that takes the scale of its group
    out = buffer(np.zeros(rows, np.float32))
    w = weight(typ, packed, cols)
    run(*nv.gemv("EMU", "test", "ADD", [w], None, [None], 1e-5, out, buffer(x)))
    weights, seen = dequantized(typ, packed), quantized(typ, x)
    close(read(out), weights @ seen, np.abs(weights) @ np.abs(seen), 2e-6)


@pytest.mark.parametrize("typ", [Q8_0, Q4_K, Q5_K, Q6_K])
def test_the_error_of_quantized_activations_is_llama_cpps(
    typ: int, rng: np.random.Generator
) -> None:
    """llama.cpp's q8_1: int8 per 32 with a half-precision scale. Ours differs by a float scale."""
    cols, rows = 2048, 64
    packed, x = random_weights(rng, typ, rows, cols), rng.standard_normal(cols).astype(np.float32)
    out = buffer(np.zeros(rows, np.float32))
    w = weight(typ, packed, cols)
    run(*nv.gemv("EMU", "test", "ADD", [w], None, [None], 1e-5, out, buffer(x)))
    weights = dequantized(typ, packed)
    groups = x.reshape(-1, 32)
    d = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float32)
    theirs = (np.rint(groups / d) * d.astype(np.float16).astype(np.float64)).reshape(-1)
    exact = weights @ x.astype(np.float64)
    ours, llama = np.linalg.norm(read(out) - exact), np.linalg.norm(weights @ theirs - exact)
    assert ours <= 1.02 * llama


def test_gemv_of_mixed_types(rng: np.random.Generator) -> None:
    cols, types = 512, [Q4_K, Q4_K, Q6_K]
    packed = [random_weights(rng, t, n, cols) for t, n in zip(types, (24, 8, 10), strict=True)]
    x = rng.standard_normal(cols).astype(np.float32)
    out = buffer(np.zeros(42, np.float32))
    ws = [weight(t, w, cols) for t, w in zip(types, packed, strict=True)]
    ones = buffer(np.ones(cols, np.float32))
    run(*nv.gemv("EMU", "test", "STORE", ws, ones, [None] * 3, 1e-6, out, buffer(x)))
    seen = quantized(Q4_K, x) / np.sqrt((x.astype(np.float64) ** 2).mean() + 1e-6)
    full = np.concatenate([dequantized(t, w) for t, w in zip(types, packed, strict=True)])
    close(read(out), full @ seen, np.abs(full) @ np.abs(seen), 2e-6)


def test_matrices_of_a_projection_in_two_launches(rng: np.random.Generator) -> None:
    """As where F16 stands beside quantized matrices: each has its rows of every sequence."""
    cols, batch, types, counts = 256, 2, [F16, Q6_K], [9, 6]
    packed = [random_weights(rng, t, n, cols) for t, n in zip(types, counts, strict=True)]
    x = rng.standard_normal((batch, cols)).astype(np.float32)
    out, first = buffer(np.zeros((batch, 15), np.float32)), 0
    for typ, w in zip(types, packed, strict=True):
        ws = [weight(typ, w, cols)]
        given = ("EMU", "test", "STORE", ws, None, [None], 1e-5, out, buffer(x), None)
        run(*nv.gemv(*given, batch, (0, batch), (first, 15)))
        first += len(w)
    got = read(out).reshape(batch, 15)
    for i in range(batch):
        full = [dequantized(t, w) for t, w in zip(types, packed, strict=True)]
        want = [m @ quantized(t, x[i]) for t, m in zip(types, full, strict=True)]
        close(got[i], np.concatenate(want), np.abs(np.concatenate(full)) @ np.abs(x[i]), 2e-6)


def test_matrices_of_unlike_plans_fit_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 4096 rows alone take 16 warps a block, 8192 together 8 of two rows each."""
    monkeypatch.setattr(nv, "multiprocessors", lambda device: 132)
    none = SimpleNamespace(nbytes=0)
    ws = [nv.Weight(none, typ, 4096, 4096) for typ in (Q6_K, Q8_0, Q8_0)]
    kernel, _ = nv.gemv("CUDA", "qkv", "STORE", ws, none, [None] * 3, 1e-5, none, none)
    found = re.search(r"smem\[(\d+)\]", kernel.code)
    assert found is not None
    assert int(found[1]) <= 48 << 10  # what a block may have without being told


@pytest.mark.parametrize("rows", [1, 517])
def test_head_takes_the_first_of_the_largest_logits(rows: int, rng: np.random.Generator) -> None:
    cols = 256
    packed = random_weights(rng, Q6_K, rows, cols)
    x = rng.standard_normal(cols).astype(np.float32)
    if rows > 500:
        best = int(np.argmax(dequantized(Q6_K, packed) @ x))
        packed[400], packed[3] = packed[best], packed[best]
    logits, state = buffer(np.zeros(rows, np.float32)), buffer(np.array([7, 41, 0, 0], np.int32))
    part = [buffer(np.zeros(64, np.float32)), buffer(np.zeros(64, np.int32))]
    norm = buffer(np.ones(cols, np.float32))
    args = [[weight(Q6_K, packed, cols)], norm, [None], 1e-5, logits, buffer(x), [*part, state]]
    for step in (1, 2):  # the counter of blocks is ready for the next token
        run(*nv.gemv("EMU", "head", "ARGMAX", *args))
        assert read(state, np.int32).tolist() == [int(np.argmax(read(logits))), 41 + step, 0, 0]
    assert rows == 1 or read(state, np.int32)[0] in (3, best)


@pytest.mark.parametrize("typ", TYPES)
def test_embedding(typ: int, rng: np.random.Generator) -> None:
    cols, rows = 512, 6
    packed = random_weights(rng, typ, rows, cols)
    x, state = buffer(np.zeros(cols, np.float32)), buffer(np.array([4, 0, 0, 0], np.int32))
    run(*nv.embed(weight(typ, packed, cols), x, state))
    np.testing.assert_allclose(read(x), dequantized(typ, packed)[4], rtol=1e-6, atol=1e-9)


def test_weights_of_bf16(rng: np.random.Generator) -> None:
    test_gemv(BF16, 1536, 19, "STORE", rng)
    test_gemv_of_a_batch(BF16, 4, 1024, "SWIGLU", rng)
    test_embedding(BF16, rng)


@pytest.mark.parametrize("pos", [0, 1, 62, 63, 64, 127, 191, 200, 299])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attention_of_a_token(shape: Any, pos: int, rng: np.random.Generator) -> None:
    dim, kv, group, half, interleaved, normed = shape
    context, splits = 300, 3
    cache = rng.standard_normal((2, kv, context, dim)).astype(np.float16 if half else np.float32)
    cache[:, :, pos:] = np.nan  # what is not yet written must not be read
    qkv = rng.standard_normal((kv * (group + 2), dim)).astype(np.float32)
    freqs = rng.uniform(-1, 1, (context, dim)).astype(np.float32)
    norms = [rng.standard_normal(dim).astype(np.float32) for _ in range(2 if normed else 0)]
    h = nv.Heads(dim, kv, group, context, interleaved, normed, "u16" if half else "float")
    heads = kv * group
    out, cached = buffer(np.full(heads * dim, np.nan, np.float32)), buffer(cache)
    part = buffer(np.full(heads * splits * dim, np.nan, np.float32))
    part_ml = buffer(np.full(heads * splits * 2, np.nan, np.float32))
    state = buffer(np.array([0, pos, 0] + [0] * h.blocks, np.int32))
    args = [out, cached, buffer(qkv), buffer(freqs), [buffer(n) for n in norms]]
    run(*nv.attention(h, splits, 1e-6, *args, part, part_ml, state))

    qn, kn = norms if normed else (None, None)
    new = read(cached, cache.dtype).reshape(cache.shape)
    tolerance = 1e-3 if half else 2e-6
    for g in range(kv):
        k = rotated(qkv[heads + g], freqs[pos], interleaved, kn)
        np.testing.assert_allclose(new[0, g, pos], k, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(new[1, g, pos], qkv[heads + kv + g], rtol=tolerance)
    np.testing.assert_array_equal(new[:, :, :pos], cache[:, :, :pos])
    assert np.isnan(new[:, :, pos + 1 :]).all()
    got = read(out).reshape(heads, dim)
    for i in range(heads):
        q = rotated(qkv[i], freqs[pos], interleaved, qn)
        k, v = new[0, i // group, : pos + 1], new[1, i // group, : pos + 1]
        np.testing.assert_allclose(got[i], attend(q, k, v), rtol=1e-4, atol=1e-5)
    assert read(state, np.int32).tolist() == [0, pos, 0] + [0] * h.blocks


@pytest.mark.parametrize("pos", [0, 70, 200])
@pytest.mark.parametrize("shape", [HEADS[1], HEADS[5], HEADS[6]], ids=str)
def test_attention_of_a_batch(shape: Any, pos: int, rng: np.random.Generator) -> None:
    dim, kv, group, half, interleaved, normed = shape
    context, splits, batch, heads = 256, 3, 3, kv * group
    dtype = np.float16 if half else np.float32
    cache = rng.standard_normal((2, batch, kv, context, dim)).astype(dtype)
    cache[:, :, :, pos:] = np.nan
    qkv = rng.standard_normal((batch, kv * (group + 2), dim)).astype(np.float32)
    freqs = rng.uniform(-1, 1, (context, dim)).astype(np.float32)
    norms = [rng.standard_normal(dim).astype(np.float32) for _ in range(2 if normed else 0)]
    kind = "u16" if half else "float"
    h = nv.Heads(dim, kv, group, context, interleaved, normed, kind, batch)
    out, cached = buffer(np.full(batch * heads * dim, np.nan, np.float32)), buffer(cache)
    part = buffer(np.full(batch * heads * splits * dim, np.nan, np.float32))
    part_ml = buffer(np.full(batch * heads * splits * 2, np.nan, np.float32))
    state = buffer(np.array([0] * batch + [pos, 0] + [0] * h.blocks * batch, np.int32))
    args = [out, cached, buffer(qkv), buffer(freqs), [buffer(n) for n in norms]]
    run(*nv.attention(h, splits, 1e-6, *args, part, part_ml, state))
    qn, kn = norms if normed else (None, None)
    new = read(cached, dtype).reshape(cache.shape)
    np.testing.assert_array_equal(new[:, :, :, :pos], cache[:, :, :, :pos])
    assert np.isnan(new[:, :, :, pos + 1 :]).all()
    got = read(out).reshape(batch, heads, dim)
    for b in range(batch):
        for g in range(kv):
            k = rotated(qkv[b, heads + g], freqs[pos], interleaved, kn)
            np.testing.assert_allclose(new[0, b, g, pos], k, rtol=1e-3, atol=1e-3)
        for i in range(heads):
            q = rotated(qkv[b, i], freqs[pos], interleaved, qn)
            k, v = (new[j, b, i // group, : pos + 1] for j in range(2))
            np.testing.assert_allclose(got[b, i], attend(q, k, v), rtol=1e-4, atol=1e-5)
    assert not read(state, np.int32)[batch + 1 :].any()


# An AGX Orin has 4 splits at most at 1B and 8B, however long the context is.
@pytest.mark.parametrize(
    ("pos", "most", "splits"),
    [(40, 6, 1), (100, 6, 2), (255, 6, 4), (700, 6, 4), (800, 6, 6), (800, 4, 4), (300, 2, 2)],
)
@pytest.mark.parametrize(("batch", "columns"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("shape", [HEADS[1], HEADS[5]], ids=str)
def test_few_splits_are_combined_by_their_reader(
    shape: Any,
    batch: int,
    columns: int,
    pos: int,
    most: int,
    splits: int,
    rng: np.random.Generator,
) -> None:
    dim, kv, group, half, interleaved, normed = shape
    context, heads = 900, kv * group
    cols, rows, dtype = heads * dim, 5, np.float16 if half else np.float32
    cached = buffer(rng.standard_normal((2, batch, kv, context, dim)).astype(dtype))
    qkv = rng.standard_normal((batch, kv * (group + 2), dim)).astype(np.float32)
    freqs = rng.uniform(-1, 1, (context, dim)).astype(np.float32)
    norms = [rng.standard_normal(dim).astype(np.float32) for _ in range(2 if normed else 0)]
    kind = "u16" if half else "float"
    h = nv.Heads(dim, kv, group, context, interleaved, normed, kind, batch)
    attended = buffer(np.full(batch * cols, np.nan, np.float32))
    part = buffer(np.full(batch * heads * most * dim, np.nan, np.float32))
    part_ml = buffer(np.full(batch * heads * most * 2, np.nan, np.float32))
    state = buffer(np.array([0] * batch + [pos, 0] + [0] * h.blocks * batch, np.int32))
    args = [attended, cached, buffer(qkv), buffer(freqs), [buffer(n) for n in norms]]
    run(*nv.attention(h, most, 1e-6, *args, part, part_ml, state, nv.FEW))
    left = 1 < splits <= nv.FEW
    assert np.isnan(read(attended)).all() == left, "a few parts are left as they are"
    assert np.isfinite(read(part).reshape(-1, most, dim)[:, :splits]).all() == (splits > 1)

    packed = random_weights(rng, F16, rows, cols)
    before = rng.standard_normal((batch, rows)).astype(np.float32)
    out = buffer(before)
    for at in range(0, batch, columns):

        def these(b: Any, at: int = at) -> Any:
            n = b.size // batch
            return b.view(columns * n, b.dtype, at * n * 4).ensure_allocated()

        run(
            *nv.gemv(
                *("EMU", "out", "ADD", [weight(F16, packed, cols)], None, [None], 1e-5),
                *(these(out), these(attended), None, batch, (at, columns)),
                parts=nv.Parts(h, most, part, part_ml, state),
            )
        )
    new = read(cached, dtype).reshape(2, batch, kv, context, dim)
    w = dequantized(F16, packed)
    for b in range(batch):
        x = []
        for i in range(heads):
            q = rotated(qkv[b, i], freqs[pos], interleaved, norms[0] if normed else None)
            x.append(attend(q, *(new[j, b, i // group, : pos + 1] for j in range(2))))
        seen = quantized(F16, np.concatenate(x))
        magnitude = np.abs(w) @ np.abs(seen) + np.abs(before[b])
        close(read(out).reshape(batch, rows)[b], w @ seen + before[b], magnitude, 1e-3)


@pytest.mark.parametrize("pos", [0, 40, 299])
@pytest.mark.parametrize(("dim", "kind"), [(64, "u16"), (80, "float")])
def test_the_cache_is_asked_for_while_q_k_and_v_are_computed(
    dim: int, kind: str, pos: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv, batch, context, cols, size = 2, 2, 300, 256, {"u16": 2, "float": 4}[kind]
    most = 50  # tokens of a head: the rest of a long context is not asked for
    monkeypatch.setattr(nv, "bytes_ahead", lambda _: 2 * batch * kv * dim * size * most)
    h = nv.Heads(dim, kv, 2, context, True, False, kind, batch)
    cache = buffer(np.zeros(2 * batch * kv * context * dim * size, np.uint8))
    state = buffer(np.array([0] * batch + [pos, 0], np.int32))
    ws = [weight(F16, random_weights(rng, F16, 9, cols), cols) for _ in "qkv"]
    x, out = (buffer(np.zeros(batch * n, np.float32)) for n in (cols, 27))
    kernel, args = nv.gemv(
        *("EMU", "qkv", "STORE", ws, buffer(np.ones(cols, np.float32)), [None] * 3, 1e-5, out, x),
        batch=batch,
        ahead=(h, cache, state),
    )
    run(kernel, args)
    asked = cuda_emulation.prefetched(nv.compile_cuda("EMU", kernel.source))
    head, used = context * dim * size, min(pos, most) * dim * size
    starts = (cache._buf + i * head for i in range(2 * batch * kv))
    assert sorted(asked) == [a for start in starts for a in range(start, start + used, 128)]
