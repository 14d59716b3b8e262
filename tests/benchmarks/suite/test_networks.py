"""The networks' shapes against what is published of them, and the references against loops."""

import itertools

import numpy as np
import pytest

from orinbench.suite.conv import walk
from orinbench.suite.gpt2_model import SHAPES, Gpt2Shape, NumpyGpt2, random_weights
from orinbench.suite.networks import NETWORKS, NumpyOps, Shapes


@pytest.mark.parametrize(
    ("name", "n_params", "giga_macs"),
    [
        # torchvision 0.20's models page: parameters, and operations it calls GFLOPS
        ("resnet50", 25_557_032, 4.09),
        ("mobilenet_v2", 3_504_872, 0.30),
        ("efficientnet_b0", 5_288_548, 0.39),
    ],
)
def test_a_network_has_the_published_size(name: str, n_params: int, giga_macs: float) -> None:
    shapes = walk(name, 224)
    assert shapes.n_params == n_params
    assert shapes.macs / 1e9 == pytest.approx(giga_macs, abs=0.012)


def test_gpt2_has_the_published_size() -> None:
    assert SHAPES["124m"].n_params == 124_439_808
    assert SHAPES["124m"].token_params == 124_439_808 - 1023 * 768


@pytest.mark.parametrize(("groups", "stride", "size"), [(1, 1, 3), (1, 2, 1), (4, 2, 3), (4, 1, 5)])
def test_the_reference_convolves_as_the_sum_says(groups: int, stride: int, size: int) -> None:
    draw = np.random.default_rng(size)
    out = 4 if groups > 1 else 3
    x = draw.standard_normal((2, 4, 6, 7))
    weights = {
        "0.weight": draw.standard_normal((out, 4 // groups, size, size)),
        "0.scale": draw.standard_normal(out),
        "0.shift": draw.standard_normal(out),
    }
    got = NumpyOps(weights).conv(x, out, size, stride, groups, "relu")
    around = size // 2
    want = np.zeros((2, out, -(-6 // stride), -(-7 // stride)))
    assert got.shape == want.shape
    for image, channel, row, column in itertools.product(*map(range, want.shape)):
        total = 0.0
        for inside, i, j in itertools.product(range(4 // groups), range(size), range(size)):
            y, z = row * stride + i - around, column * stride + j - around
            if 0 <= y < 6 and 0 <= z < 7:
                source = channel if groups > 1 else inside
                total += x[image, source, y, z] * weights["0.weight"][channel, inside, i, j]
        total = total * weights["0.scale"][channel] + weights["0.shift"][channel]
        want[image, channel, row, column] = max(total, 0)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_walking_and_computing_agree_on_shapes() -> None:
    for name, network in NETWORKS.items():
        shapes = Shapes()
        assert network(shapes, (3, 3, 64, 64)) == (3, 1000), name
        assert all(key.split(".")[0].isdecimal() for key in shapes.shapes)


def test_gpt2s_reference_sees_no_later_token_and_every_earlier_one() -> None:
    shape = Gpt2Shape(2, 32, 4, 50, 16)
    model = NumpyGpt2(shape, random_weights(shape, 3))
    logits = model.logits([3, 1, 4, 1, 5])
    assert logits.shape == (5, 50)
    changed = model.logits([3, 1, 9, 1, 5])
    np.testing.assert_allclose(changed[:2], logits[:2])
    assert all(np.abs(changed[at] - logits[at]).max() > 1e-3 for at in (2, 3, 4))
    swapped = model.logits([1, 3, 4, 1, 5])
    assert np.abs(swapped[4] - logits[4]).max() > 1e-4, "positions do not count"


def test_gpt2s_attention_is_the_softmax_of_scaled_products() -> None:
    shape = Gpt2Shape(1, 8, 2, 10, 8)
    weights = random_weights(shape, 1)
    for name in ("0.mlp.w", "0.mlp.b", "0.mlp_proj.w", "0.mlp_proj.b"):
        weights[name] = np.zeros_like(weights[name])
    model = NumpyGpt2(shape, weights)
    x = np.random.default_rng(0).standard_normal((3, 8))
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    normed = normed * weights["0.ln1.w"] + weights["0.ln1.b"]
    qkv = normed @ weights["0.attn.w"].astype(float) + weights["0.attn.b"]
    mixed = np.zeros((3, 8))
    for head, token in itertools.product(range(2), range(3)):
        part = slice(4 * head, 4 * head + 4)
        q, k, v = (qkv[:, 8 * index : 8 * index + 8][:, part] for index in range(3))
        scores = np.exp([q[token] @ k[other] / 2.0 for other in range(token + 1)])
        mixed[token, part] = (scores / scores.sum()) @ v[: token + 1]
    want = x + mixed @ weights["0.attn_proj.w"].astype(float) + weights["0.attn_proj.b"]
    np.testing.assert_allclose(model.block(0, x), want, rtol=1e-10)
