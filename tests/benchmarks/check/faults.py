"""Faults between an engine and the reference, drawn at random, and how many the gate catches.

An engine that is right answers once: the fused kernels on the emulated GPU, or the CPU path. Then
the reference is made wrong in one place, so that the two differ by the fault, whichever has it;
faults of the head and of the choice are planted in the answer. A drawn fault has a kind, a layer, a
tensor, rows and a token.

`python -m tests.benchmarks.check.faults --device EMU MODEL.gguf` prints which faults pass, and with
`--right` what right engines reach, with `--sizes` how many faults of each size: docs/models.md.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.engine.conftest import load_emulated

from orinbench.check import (
    HALF_WEIGHTS,
    EngineToCheck,
    EngineVerdict,
    judge_engine,
    layers,
    reference,
)
from orinbench.check.greedy import GreedyGeneration, decode_greedily, needed_context
from orinbench.check.reference import Reference, log_softmax
from orinbench.check.reference_rope import Array, apply_rope
from orinbench.check.rounded_reference import RoundedReference
from orinbench.measure.backends.timed_models import RunnerExecutor, load_runner
from orinbench.model import ModelInfo, open_model
from orinllm.batching.fused_runner import FusedRunner

_PAGE = 32
_PERCENT = re.compile(r"([0-9.]+) %")


def answers(model: ModelInfo, device: str) -> Callable[..., list[GreedyGeneration]]:
    """Return an engine on EMU, the emulated GPU, or CPU, that answers each question once."""
    known: dict[str, list[GreedyGeneration]] = {}

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        if (key := str((prompts, n_tokens))) not in known:
            known[key] = _answer(model.path, device, prompts, n_tokens)
        return known[key]

    return engine


def _answer(
    path: Path, device: str, prompts: Sequence[Sequence[int]], n_tokens: int
) -> list[GreedyGeneration]:
    from tests.engine.gpu import cuda_emulation
    from tinygrad import Context

    context = -(-needed_context(prompts, n_tokens) // _PAGE) * _PAGE
    if device == "EMU":
        cuda_emulation.install()
    with Context(DEV=device):
        runner: Any = load_runner(str(path), context) if device == "CPU" else None
        one = RunnerExecutor(runner or FusedRunner(load_emulated(path, context), 1))
        return [decode_greedily(one, prompt, n_tokens) for prompt in prompts]


def factor_of(kind: str) -> float:
    """Return by what a fault of so many percent multiplies, 1 for others."""
    if (found := _PERCENT.search(kind)) is None:
        return 1.0
    return 1 + float(found[1]) / 100 * (-1 if "small" in kind else 1)


class Fault:
    """A drawn fault: hooks of the reference's stages, which `planted` puts in place."""

    def __init__(self, kind: str, model: ModelInfo, seed: int) -> None:
        self.kind, self.draw, self.model = kind, np.random.default_rng(seed), model
        self.factor = factor_of(kind)
        self.layer = int(self.draw.integers(model.n_layers))
        self.now = -1  # the layer that is computed
        prefix = f"blk.{self.layer}."
        wide = [n for n, t in model.tensors.items() if n.startswith(prefix) and len(t.shape) == 2]
        wide = [n for n in wide if min(model.tensors[n].shape) >= 64]
        self.tensor = str(self.draw.choice(wide)).removesuffix(".weight")
        rows, columns = model.tensors[f"{self.tensor}.weight"].shape
        self.row = int(self.draw.integers(rows // 16)) * 16
        self.column = int(self.draw.integers(columns // 32)) * 32
        self.token = int(self.draw.integers(2, 7))  # of all prompts
        self.head = int(self.draw.integers(model.n_kv_heads))

    def __str__(self) -> str:
        return f"{self.kind} ({self.tensor}, row {self.row}, token {self.token})"

    @property
    def is_last(self) -> bool:
        """Say whether the fault is in the last layer."""
        return self.layer == self.model.n_layers - 1

    @property
    def here(self) -> bool:
        """Say whether the fault's layer is computed."""
        return self.now == self.layer

    def linear(self, of: Reference, real: Any, x: Array, name: str, *expert: Any) -> Array:
        """Return a product."""
        if name != self.tensor:
            return np.asarray(real(of, x, name, *expert))
        kind, row, column = self.kind, self.row, self.column
        if kind == "a token's input is the one before":
            x = x.copy()
            x[self.token] = x[self.token - 1]
        if kind == "the last 32 columns left out":
            x = np.where(np.arange(x.shape[-1]) >= x.shape[-1] - 32, 0, x)
        if kind == "inputs of 5 bits":
            blocks = x.reshape(*x.shape[:-1], -1, 32)
            scale = np.abs(blocks).max(axis=-1, keepdims=True) / 15 + 1e-30
            x = (np.round(blocks / scale) * scale).reshape(x.shape)
        out = np.asarray(real(of, x, name, *expert)).copy()
        if kind == "8 blocks of 32 weights zero":
            rows = of._tensor_rows(f"{name}.weight", slice(row, row + 8))
            out[:, row : row + 8] -= x[:, column : column + 32] @ rows[:, column : column + 32].T
        if kind.startswith("16 rows"):
            out[:, row : row + 16] *= self.factor
        if kind == "64 rows missing":
            out[:, row : row + 64] = 0
        if kind == "a row missing":
            out[:, row] = 0
        if kind == "two rows exchanged":
            out[:, [row, row + 1]] = out[:, [row + 1, row]]
        if kind == "rows shifted by one":
            out = np.roll(out, 1, axis=-1)
        return out * self.factor if kind.startswith("a matrix") else out

    def norm(self, of: Reference, real: Any, x: Array, name: str) -> Array:
        """Return a norm."""
        out = np.asarray(real(of, x, name))
        own = name.startswith(f"blk.{self.layer}.") and name.endswith(("attn_norm.weight",))
        if own and self.kind == "a norm without its weights":
            out = out / of._vector(name)
        if own and self.kind == "a norm by the mean of all but 32":
            mean = np.mean(x[:, :-32] ** 2, axis=-1) / np.mean(x**2, axis=-1)
            out = out / np.sqrt(mean)[:, None]
        if name == "output_norm.weight" and self.kind == "the last norm without its weights":
            out = out / of._vector(name)
        return np.asarray(out)

    def kept(self, of: Reference, real: Any, x: Array) -> Array:
        """Return keys or values."""
        out = np.asarray(real(of, x)).copy()
        if self.here and self.kind == "a stale key and value":
            out[self.token] = 0
        if self.here and self.kind == "a key and value of another position":
            out[self.token] = out[self.token - 1]
        if self.here and self.kind == "keys and values of another head":
            out = np.roll(out, 1, axis=1)
        if self.here and self.kind == "keys and values of 5 bits":
            scale = np.abs(out).max(axis=-1, keepdims=True) / 15 + 1e-30
            out = np.round(out / scale) * scale
        return out

    def softmax(self, real: Any, scores: Array) -> Array:
        """Return the logarithm of a softmax: of attention's scores, (heads, queries, keys)."""
        if scores.ndim != 3 or not self.here:
            return np.asarray(real(scores))
        n, scores = scores.shape[1], scores.copy()
        distance = np.arange(n)[:, None] - np.arange(n)
        hidden = {
            "the newest key hidden": (distance == 0) & (np.arange(n)[:, None] > 0),
            "the oldest key hidden": (distance > 0) & (np.arange(n) == 0),
            "keys before the last 16 hidden": distance >= 16,
        }.get(self.kind)
        if hidden is not None:
            scores[..., :n][:, hidden] = -np.inf
        factor = self.factor if self.kind.startswith("scores") else 1.0
        out = np.asarray(real(np.where(np.isfinite(scores), scores * factor, scores)))
        if self.kind == "a head that sees nothing":
            out[self.head] = -1e9
        if self.kind == "a sum that lacks 2 keys":
            few = np.exp(out[..., 2:]).sum(axis=-1, keepdims=True)
            out = out - np.log(np.where(few > 0.05, few, 1))
        return out

    def rotated(self, real: Any, x: Array, at: Array, rotation: Any, *more: Any) -> Array:
        """Return turned heads."""
        if self.here and self.kind.startswith("rotation") and self.factor != 1:
            rotation = replace(rotation, frequencies=rotation.frequencies * self.factor)
        if self.here and self.kind == "rotation of another base":
            rotation = replace(rotation, frequencies=rotation.frequencies**0.75)
        if self.here and self.kind == "rotation backwards":
            rotation = replace(rotation, frequencies=-rotation.frequencies)
        if self.here and self.kind == "keys turned a position late":
            at = at + (x.shape[1] == self.model.n_kv_heads)
        return np.asarray(real(x, at, rotation, *more))

    def forward(self, of: Reference, real: Any, layer: int, x: Array) -> Array:
        """Return what a layer makes of x."""
        self.now = layer
        out = np.asarray(real(of, layer, x))
        return out + x if self.here and self.kind == "residual twice" else out

    def feed_forward(self, of: Reference, real: Any, prefix: str, x: Array, *more: Any) -> Array:
        """Return a feed-forward part."""
        out = np.asarray(real(of, prefix, x, *more))
        return out * (not (self.here and self.kind == "no feed forward"))

    def gated(self, of: Reference, real: Any, gate: Array, up: Array) -> Array:
        """Return the activation of gate times up."""
        if self.here and self.kind == "gate and up exchanged":
            gate, up = up, gate
        if self.here and self.kind == "relu for silu":
            return np.asarray(np.maximum(gate, 0) * up)
        return np.asarray(real(of, gate, up))

    def mixture(self, of: Reference, real: Any, layer: int, x: Array) -> Array:
        """Return a mixture."""
        if not self.here or not self.kind.startswith("experts"):
            return np.asarray(real(of, layer, x))
        if self.kind == "experts 5 % too much":
            return 1.05 * np.asarray(real(of, layer, x))
        forced = of._forced
        real(of, layer, x)
        right = of.routed[layer]
        chosen = right.chosen.copy()
        chosen[self.token] = (chosen[self.token] + 1) % right.scores.shape[-1]
        of._forced = {(layer, at): row.tolist() for at, row in enumerate(chosen)}
        out = np.asarray(real(of, layer, x))
        of._forced, of.routed[layer] = forced, right
        return out


# Kinds of faults inside of the network.
INSIDE = (
    "a token's input is the one before", "the last 32 columns left out", "inputs of 5 bits",
    "8 blocks of 32 weights zero", "16 rows 25 % off", "64 rows missing", "a row missing",
    "two rows exchanged", "rows shifted by one", "a matrix 5 % too large",
    "a norm without its weights", "a norm by the mean of all but 32",
    "the last norm without its weights", "a stale key and value",
    "a key and value of another position", "keys and values of another head",
    "keys and values of 5 bits", "the newest key hidden", "the oldest key hidden",
    "keys before the last 16 hidden", "scores 5 % too small", "scores 10 % too large",
    "a head that sees nothing", "a sum that lacks 2 keys", "rotation 3 % off",
    "rotation of another base", "rotation backwards", "keys turned a position late",
    "residual twice", "no feed forward", "gate and up exchanged", "relu for silu",
)  # fmt: skip
# Faults of a size, in percent.
SIZED = {
    "a matrix {} % too large": (0.5, 1, 2, 5),
    "16 rows {} % off": (5, 10, 25, 50),
    "scores {} % too large": (1, 2, 5, 10),
    "rotation {} % off": (0.3, 1, 3, 10),
}
OF_MIXTURES = ("experts 5 % too much", "experts: the next one for a token")


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
OUTSIDE = (*HEAD, *CHOICE)


def kinds_of(model: ModelInfo) -> tuple[str, ...]:
    """Return the kinds of faults that a model may have."""
    mixture = any("ffn_gate_inp" in name for name in model.tensors)
    without = {"no feed forward"} if mixture else set()
    return (*OUTSIDE, *(k for k in INSIDE if k not in without), *(OF_MIXTURES if mixture else ()))


def _answered(found: GreedyGeneration, kind: str, draw: Any) -> GreedyGeneration:
    """Return an answer with a fault of the head or of the choice."""
    rows = found.logits.copy()
    if kind in HEAD:
        rows = np.stack([HEAD[kind](row, draw) for row in rows])
        return replace(found, logits=rows, tokens=[int(row.argmax()) for row in rows])
    return replace(found, tokens=[CHOICE[kind](row, draw) for row in rows])


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Make the reference wrong in one place."""
    hooks = {
        "linear": fault.linear, "_norm": fault.norm, "_as_cached": fault.kept,
        "_run_layer": fault.forward, "_feed_forward": fault.feed_forward,
        "_gated_activation": fault.gated, "_expert_mixture": fault.mixture,
    }  # fmt: skip

    def method(hook: Any, real: Any) -> Any:
        return lambda self, *given: hook(self, real, *given)

    patches = [
        patch.object(Reference, name, method(hook, getattr(Reference, name)))
        for name, hook in hooks.items()
    ]
    kept = method(fault.kept, RoundedReference._as_cached)
    patches.append(patch.object(RoundedReference, "_as_cached", kept))
    patches.append(
        patch.object(reference, "apply_rope", lambda *of: fault.rotated(apply_rope, *of))
    )
    soft = lambda scores: fault.softmax(log_softmax, scores)  # noqa: E731
    patches.append(patch.object(reference, "log_softmax", soft))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def verdict_on(
    model: ModelInfo, engine: Any, kind: str = "", seed: int = 0, n_tokens: int = 12
) -> EngineVerdict:
    """Judge a right engine, or one with a fault."""
    if not kind:
        return judge_engine(model, EngineToCheck("engine", engine, HALF_WEIGHTS), n_tokens, seed)
    if kind in OUTSIDE:
        draw = np.random.default_rng(seed)

        def wrong(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
            return [_answered(found, kind, draw) for found in engine(prompts, n_tokens)]

        return judge_engine(model, EngineToCheck("engine", wrong, HALF_WEIGHTS), n_tokens)
    with planted(Fault(kind, model, seed)):
        return judge_engine(model, EngineToCheck("engine", engine, HALF_WEIGHTS), n_tokens)


def _right(model: ModelInfo, engine: Any, seeds: int) -> str:
    """Judge a right engine's answers to several prompts; return what they reach."""
    seen: list[layers.LayerErrors] = []
    real = layers.LayerJudge.layer_errors

    def errors(judge: layers.LayerJudge) -> list[layers.LayerErrors]:
        seen.extend(found := real(judge))
        return found

    with patch.object(layers.LayerJudge, "layer_errors", errors):
        found = [verdict_on(model, engine, seed=seed) for seed in range(seeds)]
    failed = [verdict.summary_line() for verdict in found if not verdict.passed]
    worst = [max(getattr(e, of) for e in seen) for of in ("width", "position", "column", "slope")]
    most = " ".join(f"{value:.2f}" for value in worst)
    return f"{len(failed)} of {len(found)} failed; layers at most {most} {failed or ''}"


def _shares(model: ModelInfo, engine: Any, kinds: Sequence[str], draws: int) -> Iterator[str]:
    """Yield of how many draws of each kind the gate catches: in the last layer, and in others.

    Of the last layer prompts leave nothing but keys and values: tokens alone show its faults.
    """
    for where in ("the last layer", "others"):
        drawn = (n for n in itertools.count() if Fault("", model, n).is_last == (where != "others"))
        seeds = [*itertools.islice(drawn, draws)]
        caught = [sum(not verdict_on(model, engine, k, n).passed for n in seeds) for k in kinds]
        yield f"{', '.join(map(str, caught))} of {draws} in {where}"


def main() -> None:
    """Print, for each model, how many of its faults are caught, and which are not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", choices=("EMU", "CPU"), default="CPU")
    parser.add_argument("--faults", type=int, default=1, metavar="N", help="of each kind")
    parser.add_argument("--sizes", type=int, metavar="N", default=0, help="of each size of a fault")
    parser.add_argument("--right", type=int, metavar="SEEDS", default=0)
    options = parser.parse_args()
    for path in options.models:
        model = open_model(path)
        engine = answers(model, options.device)
        if options.right:
            print(f"{path.stem}: {_right(model, engine, options.right)}", flush=True)
            continue
        for name, sizes in SIZED.items() if options.sizes else ():
            kinds = [name.format(size) for size in sizes]
            for share in _shares(model, engine, kinds, options.sizes):
                print(f"{path.stem}: {name.format(sizes)}: {share} caught", flush=True)
        if options.sizes:
            continue
        drawn = [(kind, seed) for seed in range(options.faults) for kind in kinds_of(model)]
        passed = [
            kind if kind in OUTSIDE else str(Fault(kind, model, seed))
            for kind, seed in drawn
            if verdict_on(model, engine, kind, seed).passed
        ]
        caught = len(drawn) - len(passed)
        print(f"{path.stem}: {caught} of {len(drawn)} caught; not {passed}", flush=True)


if __name__ == "__main__":
    main()
