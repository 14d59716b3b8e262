"""The gate of an encoder of pictures: its rows against the float64 reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orinbench.check.reference_vision import VisionReference

Pixels = NDArray[np.uint8]
#: Makes rows of tiles, (rows, width of the language model).
Encode = Callable[[Sequence[Pixels]], NDArray[np.float32]]
# Blocks of the tiles where pictures are of any size: odd, wide, and more than one window.
_BLOCKS = ((5, 7), (1, 13), (9, 4))
# An engine rounds in more places than the estimate. With halves these are norms and activations;
# with single floats the sums too, each of thousands of terms.
_TIMES = {np.float16: 4.0, np.float32: 32.0}


@dataclass(frozen=True)
class EncoderVerdict:
    """The result of a check: root mean squares of errors, as shares of that of the rows."""

    backend: str
    mmproj: str
    n_rows: int
    error: float
    allowed: float
    worst_row: float
    passed: bool

    def summary_line(self) -> str:
        """Return the verdict as one line."""
        return (
            f"{self.backend}: {'pass' if self.passed else 'FAIL'}: {self.n_rows} rows of pictures, "
            f"error {self.error:.2g} of them, worst row {self.worst_row:.2g}; "
            f"{self.allowed:.2g} allowed, in a row {2 * self.allowed:.2g}"
        )


def random_tiles(reference: VisionReference, seed: int) -> list[Pixels]:
    """Return seeded tiles in sizes that the encoder takes."""
    rng, side = np.random.default_rng(seed), reference.patch * reference.merge
    sizes = [(down * side, across * side) for down, across in _BLOCKS]
    if reference.size is not None:
        sizes = [(reference.size, reference.size)]
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def judge_encoder(backend: str, mmproj: Path, encode: Encode, seed: int) -> EncoderVerdict:
    """Judge an encoder; raises BenchError for a projector that the reference does not know.

    Allowed is what the rounding of the backend's products makes of the same weights, to single
    floats on a CPU and to halves on a GPU, times a factor; in each row twice that.
    """
    exact = VisionReference(mmproj)
    rounding = np.float32 if backend.endswith("CPU") else np.float16
    rounded = VisionReference(mmproj, rounding)
    tiles = random_tiles(exact, seed)
    wanted, near = (np.concatenate([r.encode_tile(t) for t in tiles]) for r in (exact, rounded))
    found, scale = encode(tiles).astype(np.float64), float(np.sqrt(np.mean(wanted**2)))
    if found.shape != wanted.shape:
        return EncoderVerdict(backend, str(mmproj), len(found), np.inf, 0.0, np.inf, False)
    by_row = np.sqrt(np.mean((found - wanted) ** 2, axis=1)) / scale
    error, worst = float(np.sqrt(np.mean(by_row**2))), float(by_row.max())
    allowed = _TIMES[rounding] * float(np.sqrt(np.mean((near - wanted) ** 2))) / scale
    passed = error <= allowed and worst <= 2 * allowed  # a NaN is neither
    return EncoderVerdict(backend, str(mmproj), len(found), error, allowed, worst, passed)
