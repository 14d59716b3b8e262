"""Numbers that are none: where in a model they begin, for a gate that refuses to time them."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from orinbench.check.greedy import GreedyGeneration
from orinbench.check.reference import Reference, unsupported_feature
from orinbench.check.reference_rope import Array
from orinbench.errors import BenchError
from orinbench.model import ModelInfo
from orinllm.errors import BadInput
from orinllm.file.gguf import TensorInfo
from orinllm.network.arch import config_of

_CHUNK_WEIGHTS = 4 << 20
# The largest number that half precision holds; engines compute in it.
HALF_MAX = 65504.0
_LAYER = re.compile(r"blk\.(\d+)\.")


def generation_fault(model: ModelInfo, generations: Sequence[GreedyGeneration]) -> str | None:
    """Say what of an engine's answer is no number or no token, and where in the model it began.

    None if all are. Log-probabilities that an engine left out (NaN) are no fault.
    """
    for generation in generations:
        logits = generation.logits
        # A log-probability may be the logarithm of no chance, -inf, or NaN where it was left out.
        broken = logits == np.inf if generation.normalized else ~np.isfinite(logits)
        if broken.any() or np.isnan(logits).all():
            count = int(broken.sum()) or logits.size
            said = f"{count} of {logits.size} logits are not finite"
            return f"{said}; {first_nonfinite_text(model, generation)}"
        for token in generation.tokens:
            if not 0 <= token < model.vocab_size:
                said = f"token {token} is not among the model's {model.vocab_size}"
                return f"{said}; {first_nonfinite_text(model, generation)}"
    return None


def first_nonfinite_text(model: ModelInfo, generation: GreedyGeneration | None = None) -> str:
    """Say in which tensor and layer numbers that are not finite begin."""
    if fault := nonfinite_weights_fault(model):
        return fault
    if unsupported_feature(model) is not None:
        return "all weights of the file are finite"
    if found := NonfiniteReference(model).first_nonfinite_place(
        generation.tokens if generation else [0]
    ):
        return found
    return "weights and the reference's numbers are finite: it begins in the engine"


def nonfinite_weights_fault(model: ModelInfo) -> str | None:
    """Say which of the file's weights are not finite, None if all are."""
    for tensor in model.tensors.values():
        if count := sum(int((~np.isfinite(rows)).sum()) for rows in _weight_chunks(model, tensor)):
            place = tensor_and_layer_text(tensor.name)
            return f"it begins in the file: weights not finite in {place}: {count}"
    return None


def tensor_and_layer_text(name: str) -> str:
    """Return a tensor's name, and its layer."""
    layer = _LAYER.match(name)
    return f"{name} (layer {layer[1]})" if layer else name


def _weight_chunks(model: ModelInfo, tensor: TensorInfo) -> Iterator[Array]:
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    raw = model.gguf.tensor_bytes(tensor.name).reshape(-1, block_bytes)
    step = max(1, _CHUNK_WEIGHTS // block)
    for start in range(0, len(raw), step):
        with np.errstate(all="ignore"):  # it is what we look for
            yield dequantize(raw[start : start + step], tensor.type)


class NonfiniteReference(Reference):
    """The reference, stopped where it leaves what half precision holds."""

    def __init__(self, model: ModelInfo) -> None:
        super().__init__(model)
        self._found = ""

    def first_nonfinite_place(self, tokens: Sequence[int]) -> str:
        """Return where that is for some of the model's tokens, "" for nowhere."""
        with np.errstate(all="ignore"):
            try:
                self.logits([min(max(token, 0), self.model.vocab_size - 1) for token in tokens])
            except StopIteration:
                return self._found
        return ""

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        """See `Reference`."""
        return self._stop_at_nonfinite(super().linear(x, name, expert), f"{name}.weight")

    def _norm(self, x: Array, name: str) -> Array:
        return self._stop_at_nonfinite(super()._norm(x, name), name)

    def _stop_at_nonfinite(self, values: Array, name: str) -> Array:
        largest = float(np.abs(values).max())
        if not largest <= HALF_MAX:
            far = "are not finite" if not np.isfinite(largest) else f"reach {largest:.1e}"
            self._found = (
                f"it begins behind {tensor_and_layer_text(name)}, whose products {far} in the "
                f"reference; half precision ends at {HALF_MAX:.0f}"
            )
            raise StopIteration
        return values


def require_tensors(model: ModelInfo) -> None:
    """Raise BenchError for a tensor that is missing or that does not fit the metadata."""
    gguf = model.gguf
    try:
        config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor)
    except BadInput as error:
        raise BenchError(f"{model.path}: {error}") from None
