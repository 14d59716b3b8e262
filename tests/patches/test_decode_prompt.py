"""0014, 0023: the kernels of a chunk of a prompt, one by one, against float64."""

from typing import Any

import numpy as np
import pytest
from tests.patches.decode_numerics import (
    BF16,
    HEADS,
    Q4_K,
    Q5_K,
    Q6_K,
    TYPES,
    attend,
    buffer,
    close,
    dequantized,
    nv,
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
@pytest.mark.parametrize(("cols", "rows", "tokens"), [(128, 24, 1), (1024, 136, 65)])
@pytest.mark.parametrize("typ", TYPES)
def test_gemm(
    typ: int, cols: int, rows: int, tokens: int, mode: str, rng: np.random.Generator
) -> None:
    cols = max(cols, 256) if typ in (Q4_K, Q5_K, Q6_K) else cols
    packed = [random_weights(rng, typ, rows, cols) for _ in range(2 if mode == "SWIGLU" else 1)]
    x = rng.standard_normal((tokens, cols)) * (0.02 if mode == "SWIGLU" else 1)
    x = x.astype(np.float16)
    inputs = np.concatenate([x, np.full((3, cols), np.nan, np.float16)])  # past the chunk: unread
    bias = rng.standard_normal(rows).astype(np.float32)
    before = rng.standard_normal((tokens + 3, rows)).astype(np.float32)
    chunk = buffer(np.array([0, tokens, 0], np.int32))
    out = buffer(before.astype(np.float16) if mode == "SWIGLU" else before)
    ws = [weight(typ, w, cols) for w in packed]
    biases = [buffer(bias) if mode == "STORE" else None, None]
    for kernel, args in nv.gemm("test", mode, ws, biases, out, buffer(inputs), chunk, 16.0):
        run(kernel, args)
    sums = [x.astype(np.float64) @ dequantized(typ, w).T for w in packed]
    sizes = [np.abs(x.astype(np.float64)) @ np.abs(dequantized(typ, w)).T for w in packed]
    got = read(out, np.float16 if mode == "SWIGLU" else np.float32).reshape(-1, rows)
    np.testing.assert_array_equal(got[tokens:], before[tokens:].astype(got.dtype))
    if mode == "SWIGLU":
        gate, up = sums
        with np.errstate(over="ignore"):
            want = gate / (1 + np.exp(-gate)) * up / 16
        magnitude = ((1 + np.abs(gate)) * sizes[1] + sizes[0] * (1 + np.abs(up))) / 16
        close(got[:tokens].astype(np.float64), want, magnitude, 1e-3)
    elif mode == "ADD":
        close(got[:tokens], before[:tokens] + 16 * sums[0], 16 * sizes[0] + 1, 6e-4)
    else:
        close(got[:tokens], sums[0] + bias, sizes[0] + 1, 6e-4)


def test_gemm_of_bf16(rng: np.random.Generator) -> None:
    test_gemm(BF16, 1024, 136, 65, "ADD", rng)
    test_gemm(BF16, 128, 24, 5, "SWIGLU", rng)


@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 70), (31, 33), (100, 17)])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_attention_of_a_chunk(
    shape: Any, start: int, tokens: int, rng: np.random.Generator
) -> None:
    dim, kv, group, half, interleaved, normed = shape
    context, heads = 160, kv * group
    cache = rng.standard_normal((2, kv, context, dim)).astype(np.float16 if half else np.float32)
    cache[:, :, start:] = np.nan
    qkv = rng.standard_normal((tokens, kv * (group + 2), dim)).astype(np.float32)
    freqs = rng.uniform(-1, 1, (context, dim)).astype(np.float32)
    norms = [rng.standard_normal(dim).astype(np.float32) for _ in range(2 if normed else 0)]
    h = nv.Heads(dim, kv, group, context, interleaved, normed, "u16" if half else "float")
    chunk = buffer(np.array([start, tokens, 0], np.int32))
    q = buffer(np.full(tokens * heads * dim, np.nan, np.float16))
    out, cached = buffer(np.full((tokens + 1) * heads * dim, 7, np.float16)), buffer(cache)
    args = [q, cached, buffer(qkv), buffer(freqs), [buffer(n) for n in norms], chunk]
    run(*nv.rope_rows(h, 1e-6, *args))
    run(*nv.attention_rows(h, out, cached, q, chunk))

    qn, kn = norms if normed else (None, None)
    new = read(cached, cache.dtype).reshape(cache.shape)
    got = read(out, np.float16).reshape(tokens + 1, heads, dim)
    assert (got[tokens] == 7).all()
    for t in range(tokens):
        for g in range(kv):
            k = rotated(qkv[t, heads + g], freqs[start + t], interleaved, kn)
            np.testing.assert_allclose(new[0, g, start + t], k, rtol=1e-3, atol=2e-3)
    for t in {0, tokens // 2, tokens - 1}:
        for i in range(heads):
            rotation = rotated(qkv[t, i], freqs[start + t], interleaved, qn)
            k, v = (new[j, i // group, : start + t + 1] for j in range(2))
            np.testing.assert_allclose(got[t, i], attend(rotation, k, v), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("cols", [256, 1536])
def test_norm_of_a_chunk(cols: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, cols)).astype(np.float32) * 40
    norm = rng.standard_normal(cols).astype(np.float32)
    out, chunk = buffer(np.zeros((5, cols), np.float16)), buffer(np.array([0, 4, 0], np.int32))
    run(*nv.norm_rows(cols, 1e-5, out, buffer(x), buffer(norm), chunk))
    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-5) * norm
    got = read(out, np.float16).reshape(5, cols)
    np.testing.assert_allclose(got[:4], want[:4], rtol=1e-3, atol=1e-6)
    assert (got[4] == 0).all()


def test_embedding_of_a_chunk(rng: np.random.Generator) -> None:
    packed = random_weights(rng, Q6_K, 9, 512)
    chunk, x = (
        buffer(np.array([0, 3, 8, 0, 5, 1], np.int32)),
        buffer(np.zeros((4, 512), np.float32)),
    )
    run(*nv.embed_rows(weight(Q6_K, packed, 512), x, chunk))
    want = np.concatenate([dequantized(Q6_K, packed)[[8, 0, 5]], np.zeros((1, 512))])
    np.testing.assert_allclose(read(x).reshape(4, 512), want, rtol=1e-6, atol=1e-9)
