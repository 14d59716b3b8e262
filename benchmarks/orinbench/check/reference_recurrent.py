"""Layers with a state, of the float64 reference: token after token, written from the definitions.

Gated delta nets: arXiv 2412.06464; Mamba-2: arXiv 2405.21060. Names of tensors, and the order of
their rows, are those of llama.cpp's converters.
"""

from typing import Protocol

import numpy as np

from orinbench.check.reference_rope import Array


class Weights(Protocol):
    """A model's weights."""

    def linear(self, x: Array, name: str) -> Array:
        """Return x (tokens, columns) times a matrix."""
        ...

    def small_tensor(self, name: str) -> Array | None:
        """Return a small tensor in its shape; None: the file has none."""
        ...

    def metadata_number(self, key: str, default: float = 0.0) -> float:
        """Return a number of the file's metadata."""
        ...


def recurrent_layer_output(weights: Weights, prefix: str, x: Array) -> Array | None:
    """Return what a layer with a state makes of its normed input; None for other layers."""
    if weights.small_tensor(f"{prefix}shortconv.conv.weight") is not None:
        b, c, inner = np.split(weights.linear(x, f"{prefix}shortconv.in_proj"), 3, axis=-1)
        mixed = c * _causal_convolution(weights, f"{prefix}shortconv.conv", b * inner)
        return weights.linear(mixed, f"{prefix}shortconv.out_proj")
    if weights.small_tensor(f"{prefix}ssm_conv1d.weight") is None:
        return None
    mixer = _mamba2 if weights.small_tensor(f"{prefix}ssm_d") is not None else _delta_net
    return weights.linear(mixer(weights, prefix, x), f"{prefix}ssm_out")


def _required_tensor(weights: Weights, name: str) -> Array:
    found = weights.small_tensor(name)
    assert found is not None
    return found


def _causal_convolution(weights: Weights, name: str, x: Array) -> Array:
    """Return each channel's sum over its last inputs, oldest tap first."""
    taps = _required_tensor(weights, f"{name}.weight")
    padded = np.concatenate((np.zeros((taps.shape[1] - 1, x.shape[1])), x))
    out = sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(taps.shape[1]))
    bias = weights.small_tensor(f"{name}.bias")
    convolved: Array = np.asarray(out) if bias is None else np.asarray(out + bias)
    return convolved


def _silu(x: Array) -> Array:
    activated: Array = x / (1 + np.exp(-x))
    return activated


def _delta_net(weights: Weights, prefix: str, x: Array) -> Array:
    size, heads = (
        int(weights.metadata_number(f"ssm.{n}")) for n in ("state_size", "time_step_rank")
    )
    keys, eps = int(weights.metadata_number("ssm.group_count")), weights.metadata_number(_EPS)
    inner = _silu(
        _causal_convolution(weights, f"{prefix}ssm_conv1d", weights.linear(x, f"{prefix}attn_qkv"))
    )
    q, k, v = (
        part.reshape(len(x), -1, size)
        for part in np.split(inner, [keys * size, 2 * keys * size], axis=-1)
    )
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + eps) for part in (q, k))
    q, k = (np.tile(part, (1, heads // keys, 1)) for part in (q, k))
    step = weights.linear(x, f"{prefix}ssm_alpha") + _required_tensor(
        weights, f"{prefix}ssm_dt.bias"
    )
    decay = np.exp(_required_tensor(weights, f"{prefix}ssm_a") * np.logaddexp(0, step))
    written = 1 / (1 + np.exp(-weights.linear(x, f"{prefix}ssm_beta")))
    state, out = np.zeros((heads, size, size)), np.empty_like(v)
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        known = np.einsum("hij,hi->hj", state, k[t])
        change = written[t][:, None] * (v[t] - known)
        state = state + np.einsum("hi,hj->hij", k[t], change)
        out[t] = np.einsum("hij,hi->hj", state, q[t]) / np.sqrt(size)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + eps)
    out = out * _required_tensor(weights, f"{prefix}ssm_norm.weight")
    z = weights.linear(x, f"{prefix}attn_gate").reshape(out.shape)
    return np.asarray(out * _silu(z)).reshape(len(x), -1)


def _mamba2(weights: Weights, prefix: str, x: Array) -> Array:
    heads, inner = (
        int(weights.metadata_number(f"ssm.{n}")) for n in ("time_step_rank", "inner_size")
    )
    groups, size = (int(weights.metadata_number(f"ssm.{n}")) for n in ("group_count", "state_size"))
    z, inputs, step = np.split(
        weights.linear(x, f"{prefix}ssm_in"), [inner, 2 * inner + 2 * groups * size], axis=-1
    )
    inputs = _silu(_causal_convolution(weights, f"{prefix}ssm_conv1d", inputs))
    u, b, c = np.split(inputs, [inner, inner + groups * size], axis=-1)
    u = u.reshape(len(x), heads, -1)
    b, c = (np.repeat(part.reshape(len(x), groups, size), heads // groups, 1) for part in (b, c))
    step = np.logaddexp(0, step + _required_tensor(weights, f"{prefix}ssm_dt.bias"))
    decay = np.exp(step * _required_tensor(weights, f"{prefix}ssm_a").reshape(-1))
    skip = _required_tensor(weights, f"{prefix}ssm_d").reshape(-1, 1)
    state, out = np.zeros((heads, u.shape[2], size)), np.empty_like(u)
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        state = state + np.einsum("hi,hn->hin", step[t][:, None] * u[t], b[t])
        out[t] = np.einsum("hin,hn->hi", state, c[t]) + skip * u[t]
    mixed = (out.reshape(len(x), -1) * _silu(z)).reshape(len(x), groups, -1)
    mixed = mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + weights.metadata_number(_EPS))
    normed: Array = mixed * _required_tensor(weights, f"{prefix}ssm_norm.weight")
    return normed.reshape(len(x), -1)


_EPS = "attention.layer_norm_rms_epsilon"
