"""GPT-2 (Radford et al. 2019) with random weights: on tinygrad's device, and in float64 numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Tensor, dtypes

Array = npt.NDArray[np.float64]
_EPSILON = 1e-5  # of the layer norms: layer_norm_epsilon of OpenAI's hparams


@dataclass(frozen=True)
class Gpt2Shape:
    """Dimensions; the token embedding is the head too."""

    n_layers: int
    n_embd: int
    n_heads: int
    vocab_size: int
    context: int

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape; matrices are (in, out), as OpenAI's files have them."""
        n = self.n_embd
        shapes: dict[str, tuple[int, ...]] = {"wte": (self.vocab_size, n), "wpe": (self.context, n)}
        for layer in range(self.n_layers):
            for name, inside, out in (
                ("attn", n, 3 * n),
                ("attn_proj", n, n),
                ("mlp", n, 4 * n),
                ("mlp_proj", 4 * n, n),
            ):
                shapes[f"{layer}.{name}.w"] = (inside, out)
                shapes[f"{layer}.{name}.b"] = (out,)
        for norm in ("ln", *(f"{i}.{ln}" for i in range(self.n_layers) for ln in ("ln1", "ln2"))):
            shapes[f"{norm}.w"] = shapes[f"{norm}.b"] = (n,)
        return shapes

    @property
    def weights_read_per_token(self) -> int:
        """Weights that one token reads: all but the embeddings' other rows; the head is read."""
        n_params = sum(int(np.prod(shape)) for shape in self.weight_shapes().values())
        return n_params - (self.context - 1) * self.n_embd


SHAPES = {"124m": Gpt2Shape(12, 768, 12, 50257, 1024), "tiny": Gpt2Shape(2, 64, 4, 256, 64)}


def random_weights(shape: Gpt2Shape, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return weights with GPT-2's spread of 0.02, norms near one, and biases that are not zero.

    Narrow shapes get a wider spread, so that attention is as peaked as in the real one.
    """
    draw = np.random.default_rng(seed)
    spread = np.float32(0.02 * np.sqrt(768 / shape.n_embd))
    made = {}
    for name, dims in shape.weight_shapes().items():
        is_norm = "ln" in name and name.endswith(".w")
        made[name] = is_norm + draw.standard_normal(dims, np.float32) * spread
    return made


def device_tensor(values: npt.NDArray[np.float32], dtype: str) -> Any:
    """Return a realized tensor of `values`, rounded to tinygrad's `dtype` on the device."""
    wanted, made = getattr(dtypes, dtype), Tensor(values)
    return (made if wanted == dtypes.float32 else made.cast(wanted)).contiguous().realize()


class _Gpt2:
    """Weights by name, of numpy or of tinygrad."""

    def __init__(self, shape: Gpt2Shape, weights: Mapping[str, Any]) -> None:
        self.shape, self._weights = shape, weights

    def _linear(self, name: str, x: Any) -> Any:
        return x @ self._weights[f"{name}.w"] + self._weights[f"{name}.b"]


class NumpyGpt2(_Gpt2):
    """The reference: the whole sequence at once, in float64."""

    def __init__(self, shape: Gpt2Shape, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        super().__init__(shape, {name: w.astype(np.float64) for name, w in weights.items()})

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return the logits after each of `tokens`: (tokens, vocab_size)."""
        x = self._weights["wte"][list(tokens)] + self._weights["wpe"][: len(tokens)]
        for layer in range(self.shape.n_layers):
            x = self.block_output(layer, x)
        logits: Array = self._norm("ln", x) @ self._weights["wte"].T
        return logits

    def block_output(self, layer: int, x: npt.NDArray[Any]) -> Array:
        """Return what a layer makes of x (tokens, n_embd)."""
        heads = self.shape.n_heads
        attn = self._linear(f"{layer}.attn", self._norm(f"{layer}.ln1", x))
        q, k, v = (
            part.reshape(len(x), heads, -1).transpose(1, 0, 2)
            for part in np.split(attn, 3, axis=-1)
        )
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + self._linear(f"{layer}.attn_proj", mixed.transpose(1, 0, 2).reshape(x.shape))
        hidden = self._linear(f"{layer}.mlp", self._norm(f"{layer}.ln2", x))
        inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)  # GELU by tanh
        out: Array = x + self._linear(f"{layer}.mlp_proj", hidden * (1 + np.tanh(inner)) / 2)
        return out

    def _norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + _EPSILON)
        normed: Array = centred / spread * self._weights[f"{name}.w"] + self._weights[f"{name}.b"]
        return normed


class TinygradGpt2(_Gpt2):
    """One token at a time over a cache of keys and values, on tinygrad's default device."""

    def __init__(self, shape: Gpt2Shape, weights: Mapping[str, Any], dtype: str) -> None:
        super().__init__(
            shape, {name: device_tensor(values, dtype) for name, values in weights.items()}
        )
        head = shape.n_embd // shape.n_heads
        self._caches = [
            Tensor.zeros(2, shape.n_heads, shape.context, head, dtype=dtype).contiguous().realize()
            for _ in range(shape.n_layers)
        ]

    def logits(self, token: Any, position: Any) -> Any:
        """Return (1, vocab_size) after `token` (1, 1) at `position`, an int or a bound variable."""
        wte, wpe = self._weights["wte"], self._weights["wpe"]
        x = wte[token].reshape(1, -1) + wpe.shrink(((position, position + 1), None)).reshape(1, -1)
        for layer in range(self.shape.n_layers):
            x = self.block_output(layer, x, position)
        return self._norm("ln", x) @ wte.T

    def block_output(self, layer: int, x: Any, position: Any) -> Any:
        """Return what a layer makes of x (1, n_embd) at `position`."""
        shape = self.shape
        attn = self._linear(f"{layer}.attn", self._norm(f"{layer}.ln1", x))
        q, k, v = (part.reshape(shape.n_heads, 1, -1) for part in attn.chunk(3, dim=-1))
        # A store that the reads wait for: realizing it here would compute all layers below twice.
        empty = self._caches[layer]
        place = empty.shrink((None, None, (position, position + 1), None))
        cache = Tensor(empty.uop.after(place.uop.store(k.stack(v).cast(empty.dtype).uop)))
        keys, values = (cache[index].shrink((None, (0, position + 1), None)) for index in (0, 1))
        scores = (q.float() @ keys.float().transpose(1, 2)) / (shape.n_embd / shape.n_heads) ** 0.5
        mixed = (scores.softmax(-1) @ values.float()).cast(x.dtype).reshape(1, -1)
        x = x + self._linear(f"{layer}.attn_proj", mixed)
        hidden = self._linear(f"{layer}.mlp", self._norm(f"{layer}.ln2", x)).gelu()
        return x + self._linear(f"{layer}.mlp_proj", hidden)

    def _norm(self, name: str, x: Any) -> Any:
        normed = x.float().layernorm(eps=_EPSILON).cast(x.dtype)
        return normed * self._weights[f"{name}.w"] + self._weights[f"{name}.b"]
