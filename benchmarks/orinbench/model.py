"""Models as the bench sees them: GGUF files that an engine can run, and what a token reads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from orinbench.errors import BenchError
from orinbench.model_type_label import type_label
from orinllm.errors import BadInput
from orinllm.file.ggml import kernel_ggml_types
from orinllm.file.gguf import GGUF, TensorInfo
from orinllm.network.arch import ARCHITECTURES

# Types that the engine's kernels read, and those that tinygrad 0.13.0 adds: `_GGML_NATIVE` and
# `_GGML_QUANT` of tinygrad/llm/gguf.py.
_OF_TINYGRAD = "F32 I8 I16 I32 I64 F64 IQ3_XXS IQ3_S IQ2_S Q1_0".split()
SUPPORTED_TYPES = frozenset(
    kind
    for kind in GGMLQuantizationType
    if kind in kernel_ggml_types() or kind.name in _OF_TINYGRAD
)


@dataclass(frozen=True)
class ModelInfo:
    """A validated GGUF model. Sizes are bytes."""

    path: Path
    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    gguf: GGUF = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by name, in the file's order
    metadata: Mapping[str, Any] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Of all tensors, as llama-bench's model_size."""
        return self.gguf.n_tensor_bytes

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return sum(tensor.n_elements for tensor in self.tensors.values())

    @cached_property
    def type_label(self) -> str:
        """The model as llama.cpp calls it, e.g. "llama 1B Q6_K"."""
        return type_label(self)

    @property
    def has_tied_head(self) -> bool:
        """True if the token embedding is the output head too."""
        return "output.weight" not in self.tensors

    @property
    def is_mixture(self) -> bool:
        """True if routers choose experts for each token."""
        return _has_experts(self.tensors)

    @cached_property
    def token_read_by_tensor(self) -> Mapping[str, int]:
        """Bytes that decoding one token must read, by tensor.

        Every tensor in full, but of an embedding table that is not the head one row, of stacked
        experts those that a token uses, and none of blocks behind the layers, which propose later
        tokens. The KV cache grows with the context and is not in here.
        """
        return {tensor.name: self._tensor_read_bytes(tensor) for tensor in self.tensors.values()}

    @property
    def token_read_bytes(self) -> int:
        """Sum of `token_read_by_tensor`."""
        return sum(self.token_read_by_tensor.values())

    def _tensor_read_bytes(self, tensor: TensorInfo) -> int:
        part = tensor.name.split(".")
        if part[0] == "blk" and part[1].isdecimal() and int(part[1]) >= self.n_layers:
            return 0
        if tensor.name == "token_embd.weight" and not self.has_tied_head:
            return tensor.n_bytes // tensor.shape[0]
        if "_exps." in tensor.name:
            used = self.metadata[f"{self.architecture}.expert_used_count"]
            return tensor.n_bytes * int(used) // tensor.shape[0]
        return tensor.n_bytes


def _has_experts(names: Iterable[str]) -> bool:
    return any("_exps." in name for name in names)


def open_model(path: str | Path) -> ModelInfo:
    """Read and validate the GGUF file at `path`, header and tensor table only.

    Raises BenchError, one line, for a file that is missing, not a GGUF, damaged or truncated, or
    of an architecture or with a tensor type that the engine does not support.
    """
    path = Path(path)
    try:
        gguf = GGUF.open(path)
    except BadInput as error:
        raise BenchError(str(error)) from None
    metadata, tensors = gguf.metadata, gguf.tensors
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise BenchError(
            f"{path}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise BenchError(
                f"{path}: {architecture}.{key} is {value!r} in the metadata; "
                "a whole number above 0 was expected"
            )
        return value

    _require_supported_tensors(path, tensors)
    if _has_experts(tensors):
        number("expert_used_count")
    n_embd, n_heads = number("embedding_length"), number("attention.head_count")
    by_layer = metadata.get(f"{architecture}.attention.head_count_kv")
    if isinstance(by_layer, list) and by_layer and all(isinstance(n, int) for n in by_layer):
        kv_heads = max(1, *by_layer)  # some layers may have none
    else:
        kv_heads = number("attention.head_count_kv", n_heads)
    n_tokens = metadata.array_length("tokenizer.ggml.tokens")
    return ModelInfo(
        path=path,
        architecture=architecture,
        name=str(metadata.get("general.name", path.stem)),
        n_layers=number("block_count")
        - int(metadata.get(f"{architecture}.nextn_predict_layers", 0)),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_dim=number("attention.key_length", n_embd // n_heads),
        vocab_size=tensors["token_embd.weight"].shape[0] if n_tokens is None else n_tokens,
        context_length=number("context_length"),
        gguf=gguf,
        tensors=tensors,
        metadata=metadata,
    )


def _require_supported_tensors(path: Path, tensors: Mapping[str, TensorInfo]) -> None:
    for tensor in tensors.values():
        if tensor.type not in SUPPORTED_TYPES:
            raise BenchError(
                f"{path}: tensor {tensor.name} has the type {tensor.type.name}, which is not "
                f"supported; supported are {', '.join(t.name for t in sorted(SUPPORTED_TYPES))}"
            )
    if "token_embd.weight" not in tensors:
        raise BenchError(f"{path}: is no language model: it has no tensor token_embd.weight")
