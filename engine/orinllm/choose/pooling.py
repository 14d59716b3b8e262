"""Hidden states: what a model makes of each token before its logits, for embeddings."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF

Floats = NDArray[np.float32]
#: How the states of a text's tokens become one vector: their mean, or the last token's.
Pooling = Literal["mean", "last"]
# enum llama_pooling_type of llama.h, as files say it in ARCHITECTURE.pooling_type.
_OF_FILE: dict[int, Pooling] = {1: "mean", 3: "last"}


def choose_pooling(gguf: GGUF, architecture: str, asked: Pooling | None) -> Pooling:
    """Return the pooling that is asked for, else the file's, else the mean.

    Raises BadInput for a file that wants another one.
    """
    kind = gguf.metadata.get(f"{architecture}.pooling_type", 0)
    if asked is not None or not kind:
        return asked or "mean"
    if kind not in _OF_FILE:
        raise BadInput(
            f"{gguf.path}: {architecture}.pooling_type is {kind}; 1 (mean) and 3 (last) are "
            "known; --pooling says another"
        )
    return _OF_FILE[kind]


def rms_normed(rows: Floats, weight: Floats, eps: float) -> Floats:
    """Return rows through the model's last RMS norm: (tokens, width)."""
    exact = rows.astype(np.float64)
    scale = 1 / np.sqrt(np.square(exact).mean(-1, keepdims=True) + eps)
    found: Floats = (exact * scale * weight).astype(np.float32)
    return found


class PooledStates:
    """One text's vector while its states come, from the first position on."""

    def __init__(self, kind: Pooling) -> None:
        self._kind, self._sum, self._n = kind, np.zeros(0), 0

    def add_states(self, start: int, rows: Floats) -> None:
        """Take the states of neighbours from position `start` on; 0 begins anew."""
        if self._kind == "last":
            self._sum = rows[-1].astype(np.float64)
            return
        if start == 0:
            self._sum, self._n = np.zeros(rows.shape[1]), 0
        assert start == self._n, "a text's states come in order"
        self._sum, self._n = self._sum + rows.sum(0, np.float64), start + len(rows)

    @property
    def unit_vector(self) -> Floats:
        """The vector, of length 1: (width)."""
        length = np.linalg.norm(self._sum)
        return (self._sum / (length or 1)).astype(np.float32)
