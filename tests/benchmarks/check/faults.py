"""Forty-five faults of an engine, planted in one that rounds as the fused kernels do.

The engine is the float64 reference with 8-bit activations whose scales are half floats (as the
kernels keep them, and as the gate's yardstick does not), and with keys and values in half
precision. A fault is a function of one stage. `python -m tests.benchmarks.check.faults` prints the
tables of docs/models.md.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from orinbench.check import EIGHT_BIT_ACTIVATIONS, Candidate, Verdict, run_check
from orinbench.check.arithmetic import RoundedReference
from orinbench.check.greedy import Generation
from orinbench.check.reference import log_softmax
from orinbench.check.reference_rope import Array, rotate
from orinbench.model import ModelInfo, open_model


def half(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


def rounded(x: Array, levels: int = 127) -> Array:
    """8-bit activations by 32, as ggml's Q8_1: the scale is a half float."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = half(np.abs(blocks).max(axis=-1, keepdims=True) / levels)
    return (np.round(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


class Kernels(RoundedReference):
    """The engine, with one fault at most; a file's weights are unpacked once."""

    _of_file: ClassVar[dict[Path, dict[Any, Array]]] = {}

    def __init__(self, model: ModelInfo, fault: str = "") -> None:
        super().__init__(model, replace(EIGHT_BIT_ACTIVATIONS, rounding=self._rounded), 64)
        self.fault, self.prompt = fault, 0
        self._unpacked = self._of_file.setdefault(model.path, self._unpacked)
        if fault == "rotation of another base":
            self._rotations = [
                r and replace(r, frequencies=r.frequencies**0.75) for r in self._rotations
            ]
        if fault == "rotation of half the dimensions":
            for r in self._rotations:
                if r is not None:
                    r.frequencies[len(r.frequencies) // 2 :] = 0
        if fault == "rotation backwards":
            self._rotations = [
                r and replace(r, frequencies=-r.frequencies) for r in self._rotations
            ]

    def _rounded(self, x: Array) -> Array:
        return rounded(x, 7 if self.fault == "activations of 4 bits" else 127)

    def _layer(self, layer: int, x: Array) -> Array:
        out = super()._layer(layer, x)
        if self.fault == "residual twice in a layer" and layer == 1:
            out = out + x
        return out

    def _feed_forward(self, prefix: str, x: Array, of: str = "") -> Array:
        if self.fault == "a layer without its feed forward" and prefix == "blk.1.":
            return np.zeros_like(x)
        return super()._feed_forward(prefix, x, of)

    def _gated(self, gate: Array, up: Array) -> Array:
        if self.fault == "gate and up exchanged":
            gate, up = up, gate
        if self.fault == "relu for silu":
            return np.asarray(np.maximum(gate, 0) * up)
        return super()._gated(gate, up)

    def _score_scale(self) -> float:
        return super()._score_scale() * (1.1 if self.fault == "scores 10 % too large" else 1)

    def _norm(self, x: Array, name: str) -> Array:
        out = super()._norm(x, name)
        last = name == "output_norm.weight"
        if self.fault == "last norm without its weights" and last:
            return out / self._vector(name)
        if self.fault == "a layer's norm without its weights" and name == "blk.1.ffn_norm.weight":
            return out / self._vector(name)
        if self.fault == "norm by the mean of all but 32" and name == "blk.0.attn_norm.weight":
            mean = np.mean(x[:, :-32] ** 2, axis=-1) / np.mean(x**2, axis=-1)
            return np.asarray(out / np.sqrt(mean)[:, None])
        return out

    def _linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        fault = self.fault
        if fault == "products without their last 32 columns":
            x = x.copy()
            x[:, -32:] = 0
        if fault == "a block of 32 with the wrong sign" and name == "blk.0.ffn_down":
            x = x.copy()
            x[:, 64:96] *= -1
        out = super()._linear(x, name, expert)
        if fault == "a tile of 64 rows missing" and name == "blk.0.ffn_up":
            out[:, 64:128] = 0
        if fault == "a row of a projection missing" and name == "blk.0.attn_v":
            out[:, 3] = 0
        if fault == "two rows of a projection exchanged" and name == "blk.1.attn_output":
            out[:, [5, 6]] = out[:, [6, 5]]
        if fault == "rows of a projection shifted by one" and name == "blk.1.attn_k":
            out = np.roll(out, 1, axis=-1)
        if fault == "a projection's scale 5 % off" and name == "blk.0.attn_output":
            out = out * 1.05
        return out

    def _attention(self, layer: int, x: Array) -> Array:
        model, prefix, fault = self.model, f"blk.{layer}.", self.fault
        if model.architecture not in ("llama", "qwen2", "qwen3"):  # windows, sinks and the like
            return super()._attention(layer, x)
        first = layer == 0
        positions = np.arange(len(x), dtype=np.float64)
        q, k, v = self._qkv(prefix, x)
        if f"{prefix}attn_q_norm.weight" in model.tensors:
            q = self._norm(q, f"{prefix}attn_q_norm.weight")
            k = self._norm(k, f"{prefix}attn_k_norm.weight")
        if (rotation := self._rotations[layer]) is not None:
            neighbours = model.architecture == "llama"
            if fault == "neighbours rotated as halves":
                neighbours = not neighbours
            at, later = positions, positions >= self.prompt
            if fault == "decoding a position late":
                at = positions + later
            if fault == "a second chunk that starts anew":
                at = np.where((positions >= 32) & ~later, positions - 32, positions)
            if fault == "keys rotated a position late":
                k = rotate(k, at + 1, rotation, neighbours)
            else:
                k = rotate(k, at, rotation, neighbours)
            q = rotate(q, at, rotation, neighbours)
        k, v = half(k), half(v)
        if fault == "keys of 4 bits":
            k = rounded(k, 7)
        if first and fault == "a stale key":
            k[5] = 0
        if first and fault == "a value of another position":
            v[4] = v[3]
        group = model.n_heads // model.n_kv_heads
        if fault == "keys of the wrong head":
            k, v = np.tile(k, (1, group, 1)), np.tile(v, (1, group, 1))
        else:
            k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self._score_scale()
        distance = positions[:, None] - positions
        hidden = distance < 0
        if fault == "the newest key hidden":
            hidden |= (distance == 0) & (positions[:, None] > 0)
        if fault == "the next token visible":
            hidden = distance < -1
        if fault == "the oldest key hidden":
            hidden |= (positions[None, :] == 0) & (positions[:, None] > 0)
        if fault == "keys before the last 32 hidden":
            hidden |= distance >= 32
        scores[:, hidden] = -np.inf
        weights = np.exp(log_softmax(scores))
        if fault == "a softmax that lacks 8 keys":
            few = np.where(np.arange(scores.shape[-1]) < 8, 0, weights).sum(axis=-1, keepdims=True)
            weights = weights / np.where(few > 0.05, few, 1)
        if first and fault == "a head that sees nothing":
            weights[1] = 0
        mixed = np.einsum("hqk,khd->qhd", weights, v)
        return self._linear(mixed.reshape(len(x), -1), f"{prefix}attn_output")


# Faults of the stages above.
INSIDE = (
    "activations of 4 bits", "residual twice in a layer", "a layer without its feed forward",
    "gate and up exchanged", "relu for silu", "scores 10 % too large",
    "last norm without its weights", "a layer's norm without its weights",
    "norm by the mean of all but 32", "products without their last 32 columns",
    "a block of 32 with the wrong sign", "a tile of 64 rows missing",
    "a row of a projection missing", "two rows of a projection exchanged",
    "rows of a projection shifted by one", "a projection's scale 5 % off",
    "neighbours rotated as halves", "decoding a position late",
    "a second chunk that starts anew", "keys rotated a position late", "keys of 4 bits",
    "a stale key", "a value of another position", "keys of the wrong head",
    "the newest key hidden", "the next token visible", "the oldest key hidden",
    "keys before the last 32 hidden", "a softmax that lacks 8 keys", "a head that sees nothing",
    "rotation of another base", "rotation of half the dimensions", "rotation backwards",
)  # fmt: skip


def _swapped(row: Array, draw: Any) -> Array:
    best = np.argsort(-row)[:2]
    row[best] = row[best[::-1]]
    return row


def _shuffled(row: Array, draw: Any) -> Array:
    best = np.argsort(-row)[:10]
    row[best] = row[draw.permutation(best)]
    return row


def _noisy(row: Array, draw: Any) -> Array:
    some = draw.random(row.shape) < 0.01
    return np.asarray(row + some * 3 * row.std() * draw.standard_normal(row.shape))


def _set(rows: Any, value: Callable[[Array], Any]) -> Callable[[Array, Any], Array]:
    def change(row: Array, draw: Any) -> Array:
        row[rows] = value(row)
        return row

    return change


# Faults of the head: what they make of a row of logits.
HEAD: dict[str, Callable[[Array, Any], Array]] = {
    "a row of the head that always wins": _set(17, lambda row: row.max() + row.std()),
    "noise of 3 spreads on 1 % of the logits": _noisy,
    "first and second choice exchanged": _swapped,
    "ten best shuffled": _shuffled,
    "last 64 rows of the head missing": _set(slice(-64, None), lambda row: 0.0),
    "a row of the head missing": _set(100, lambda row: 0.0),
    "two rows of the head exchanged": _set([7, 8], lambda row: row[[8, 7]]),
    "logits 5 % too large": lambda row, draw: 1.05 * row,
    "logits capped at 3 spreads": lambda row, draw: 3 * row.std() * np.tanh(row / (3 * row.std())),
}
# Faults of the choice: the token of right logits, in their order.
CHOICE: dict[str, Callable[[Array, Any], int]] = {
    "the second choice taken": lambda row, draw: int(np.argsort(-row)[1]),
    "a choice among the first three quarters": lambda row, draw: int(
        row[: len(row) * 3 // 4].argmax()
    ),
    "a choice drawn at temperature 0.7": lambda row, draw: int(
        (row / (0.7 * row.std()) + draw.gumbel(size=row.shape)).argmax()
    ),
}
FAULTS = (*HEAD, *CHOICE, *INSIDE)


def kernels(model: ModelInfo, fault: str = "", seed: int = 0) -> Any:
    """Return an engine with a fault; with none, it is right."""

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Generation]:
        draw, network = np.random.default_rng(seed), Kernels(model, fault)
        found = []
        for prompt in prompts:
            network.prompt = len(prompt)
            tokens: list[int] = []
            rows = []
            for _ in range(n_tokens):
                row = network.logits([*prompt, *tokens])[0]
                row = HEAD[fault](row, draw) if fault in HEAD else row
                chosen = CHOICE[fault](row, draw) if fault in CHOICE else int(row.argmax())
                tokens.append(chosen)
                rows.append(row)
            found.append(Generation(tokens, np.stack(rows), fused=True))
        return found

    return engine


def verdict_on(model: ModelInfo, fault: str = "", seed: int = 0) -> Verdict:
    """Judge the engine with a fault."""
    candidate = Candidate("kernels", kernels(model, fault, seed), EIGHT_BIT_ACTIVATIONS)
    return run_check(model, candidate, seed=seed)


def main() -> None:
    """Print, for each model, the faults that pass; or with --right how many right engines fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--right", type=int, metavar="SEEDS", default=0)
    options = parser.parse_args()
    for path in options.models:
        model = open_model(path)
        if options.right:
            found = [verdict_on(model, seed=seed) for seed in range(options.right)]
            failed = [verdict for verdict in found if not verdict.passed]
            worst = [
                max(getattr(verdict, name) or 0 for verdict in found)
                for name in ("position_error", "element_error", "row_error", "slope_error")
            ]
            print(path.stem, len(failed), "of", len(found), [f"{value:.1f}" for value in worst])
        else:
            passed = [fault for fault in FAULTS if verdict_on(model, fault).passed]
            print(f"{path.stem}: {len(FAULTS) - len(passed)} of {len(FAULTS)} caught, not {passed}")


if __name__ == "__main__":
    main()
