"""A file's metadata, read by architecture: typed, with defaults, and one line for what is wrong.

Defaults are those of llama.cpp 0.5.0 (src/llama-model.cpp, load_hparams).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput


class TensorShapeAndType(Protocol):
    """A tensor as the architecture table sees it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, rows first: (out_features, in_features)."""

    @property
    def type(self) -> int:
        """GGML id of the type."""


# Layers of a file whose tensors do not bound them.
_MOST_BLOCKS = 1024
Vector = Callable[[str], NDArray[np.float32]]


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a file. `max_context` is how many tokens a sequence may have."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorShapeAndType]
    vector: Vector  # the values of a small F32 tensor, by name
    max_context: int
    whole: bool = False  # blocks that propose later tokens are layers, too

    @property
    def architecture(self) -> str:
        """The file's general.architecture."""
        return str(self.metadata["general.architecture"])

    def has_key(self, key: str) -> bool:
        """Return whether the file has ARCHITECTURE.key."""
        return f"{self.architecture}.{key}" in self.metadata

    def value_or_raise(self, key: str, default: Any = None) -> Any:
        """Return the value of ARCHITECTURE.key; without a default a missing key is BadInput."""
        name = f"{self.architecture}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise BadInput(f"{name} is missing from the file's metadata; a value was expected")
        return value

    def whole_number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number of at least `least`."""
        value = self.value_or_raise(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise BadInput(
                self._wrong_value_text(key, value, f"a whole number of at least {least}")
            )
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.value_or_raise(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise BadInput(self._wrong_value_text(key, value, "a number"))
        if not np.isfinite(value):
            raise BadInput(self._wrong_value_text(key, value, "a finite number"))
        return float(value)

    def positive_number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        if (value := self.number(key, default)) <= 0:
            raise BadInput(self._wrong_value_text(key, value, "a number above 0"))
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self.value_or_raise(key, default)
        if not isinstance(value, str):
            raise BadInput(self._wrong_value_text(key, value, "a string"))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.value_or_raise(key, default)
        if not isinstance(value, bool | np.bool_):
            raise BadInput(self._wrong_value_text(key, value, "true or false"))
        return bool(value)

    def whole_numbers_by_layer(
        self, key: str, default: Sequence[int] | None = None, least: int = 1
    ) -> tuple[int, ...]:
        """Return a whole number of at least `least` by layer, from one or an array of them."""
        name, layers = f"{self.architecture}.{key}", self.n_layers
        value = self.metadata.get(name)
        if value is None and default is not None:
            return tuple(default)
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            return (self.whole_number(key, least=least),) * layers
        if len(value) < layers or any(int(item) != item or item < least for item in value):
            wanted = f"{layers} whole numbers of at least {least}, one a layer"
            raise BadInput(self._wrong_value_text(key, list(value), wanted))
        return tuple(int(item) for item in value[:layers])

    @property
    def n_mtp_blocks(self) -> int:
        """Blocks at the end that propose later tokens (MTP)."""
        return self.whole_number("nextn_predict_layers", 0, least=0)

    @property
    def n_layers(self) -> int:
        """Number of layers; each has tensors of its own.

        Blocks at the end that propose later tokens are none of them, but in a `whole` header.
        """
        layers = self.whole_number("block_count") - (0 if self.whole else self.n_mtp_blocks)
        if layers < 1:
            raise BadInput(
                f"{self.architecture}.nextn_predict_layers is {self.n_mtp_blocks} of "
                f"{self.whole_number('block_count')} blocks; fewer were expected"
            )
        # A file may have such a block alone.
        if layers > (_MOST_BLOCKS if self.whole else len(self.tensors)):
            raise BadInput(
                f"{self.architecture}.block_count is {layers}, more than the file's "
                f"{len(self.tensors)} tensors"
            )
        return layers

    def refuse_keys(self, keys: Mapping[str, str]) -> None:
        """Refuse the file if one of `keys` is set and not 0; each says what it would stand for."""
        for key, meaning in keys.items():
            if self.has_key(key) and np.any(np.asarray(value := self.value_or_raise(key)) != 0):
                raise BadInput(f"{self.architecture}.{key} is {value}: {meaning} is not supported")

    def _wrong_value_text(self, key: str, value: object, expected: str) -> str:
        return (
            f"{self.architecture}.{key} is {value!r} in the file's metadata; "
            f"{expected} was expected"
        )
