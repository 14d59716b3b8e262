"""The twin of an AGX Orin: what times in the envelope (`--sms 16`) are worth on a real board.

Somebody measured llama.cpp on an AGX Orin and published every run. The same release ran on the
same shapes in the envelope, and `twin.json` has both times of each cell. From them the twin takes
two numbers, and its own error: each type of weights is predicted by a fit to all others.

- Matrices take sqrt(i² + m²): i is the work's time in the envelope at the board's clock, m its
  weights over the bandwidth, once for a token and for each chunk of a prompt. Both overlap, never
  wholly.
- Without flash attention a prompt's scores go through memory `passes` times besides. Kernels that
  only move them overlap with nothing.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# A prompt's chunk: llama.cpp's n_ubatch, and the engine's.
_CHUNK = 512
# Half of what a fit may choose from, GB/s: up to the memory's 204.8 (Jetson AGX Orin data sheet).
_BANDWIDTHS = tuple(range(100, 206))
_PASSES = tuple(n / 2 for n in range(17))
# Bytes of a score of attention: llama.cpp keeps them as F32.
_SCORE = 4
# Share of the cells' errors that an interval spans.
_SHARE = 0.9


@dataclass(frozen=True)
class TimedWork:
    """A token behind others, or a prompt: its time in the envelope, in ms, and what it reads."""

    is_prompt: bool
    tokens: int  # of the prompt, or before the token
    weights: float  # bytes that a pass over the model reads
    milliseconds: float
    mhz: float  # clock of the multiprocessors meanwhile
    scores: int = 0  # layers times heads, where scores go through memory


@dataclass(frozen=True)
class TwinAndBoardTime:
    """A work of both machines. `kind` names what a fit is tried without, model and type."""

    kind: str
    sms: int
    work: TimedWork
    board: float  # ms


@dataclass(frozen=True)
class BoardFit:
    """Two numbers of a board: GB/s, and how often a score is read or written."""

    clock: float  # MHz
    bandwidth: float
    passes: float

    def predicted_ms(self, work: TimedWork) -> float:
        """Return how long the board takes, in ms."""
        issue = work.milliseconds * work.mhz / self.clock
        chunks = math.ceil(work.tokens / _CHUNK) if work.is_prompt else 1
        matrices = math.hypot(issue, chunks * work.weights / self.bandwidth / 1e6)
        if not work.is_prompt:
            return matrices
        ends = (min(work.tokens, (chunk + 1) * _CHUNK) for chunk in range(chunks))
        scores = sum(min(work.tokens, _CHUNK) * end for end in ends) * work.scores * _SCORE
        return matrices + self.passes * scores / self.bandwidth / 1e6


@dataclass(frozen=True)
class OrinTwin:
    """A fit, and the errors of predictions that it has not seen, as logarithms of ratios."""

    fit: BoardFit
    errors: dict[bool, list[float]]  # of prompts (True) and of tokens

    def predicted_interval(self, work: TimedWork) -> tuple[float, float, float]:
        """Return the prediction in ms, and the ends of its interval of 90 %."""
        expected = self.fit.predicted_ms(work)
        reach = math.exp(_upper_quantile([abs(error) for error in self.errors[work.is_prompt]]))
        return expected, expected / reach, expected * reach

    def error_summary(self, is_prompt: bool) -> tuple[int, float, float, float]:
        """Return number of cells, then median, 90 % quantile and largest error, as shares."""
        sizes = [math.expm1(abs(error)) for error in self.errors[is_prompt]]
        return len(sizes), statistics.median(sizes), _upper_quantile(sizes), max(sizes)


def _upper_quantile(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(_SHARE * len(values)) - 1]


def fit_board(cells: Sequence[TwinAndBoardTime], clock: float) -> BoardFit:
    """Return the fit with the smallest squares of errors, bandwidth by tokens, passes by prompts.

    Errors are logarithms of ratios. Raises ValueError without a token or without a prompt.
    """
    tokens = [cell for cell in cells if not cell.work.is_prompt]
    prompts = [cell for cell in cells if cell.work.is_prompt]
    if not tokens or not prompts:
        raise ValueError("a fit needs a token and a prompt")
    bandwidth = min(_BANDWIDTHS, key=lambda gb_s: _sum_of_squares(tokens, BoardFit(clock, gb_s, 0)))
    fits = [BoardFit(clock, bandwidth, passes) for passes in _PASSES]
    return min(fits, key=lambda fit: _sum_of_squares(prompts, fit))


def _sum_of_squares(cells: Iterable[TwinAndBoardTime], fit: BoardFit) -> float:
    return sum(_log_error(cell, fit) ** 2 for cell in cells)


def _log_error(cell: TwinAndBoardTime, fit: BoardFit) -> float:
    return math.log(fit.predicted_ms(cell.work) / cell.board)


def cross_validated_twin(cells: Sequence[TwinAndBoardTime], clock: float) -> OrinTwin:
    """Return the fit to all cells, with the error of each under a fit without its kind."""
    errors: dict[bool, list[float]] = {False: [], True: []}
    for kind in sorted({cell.kind for cell in cells}):
        without = fit_board([cell for cell in cells if cell.kind != kind], clock)
        for cell in cells:
            if cell.kind == kind:
                errors[cell.work.is_prompt].append(_log_error(cell, without))
    return OrinTwin(fit_board(cells, clock), errors)


@dataclass(frozen=True)
class TwinCalibration:
    """Contents of twin.json: cells, the board's clock in MHz, its published times and sources.

    `watts` are the least and the most that its rails took while an engine decoded.
    """

    clock: float
    watts: tuple[float, float]
    board: str
    source: str
    envelope: str
    cells: tuple[TwinAndBoardTime, ...]

    def fit_twin(
        self, sms: int = 16, accept: Callable[[TwinAndBoardTime], bool] = lambda cell: True
    ) -> OrinTwin:
        """Return the twin by the cells of so many multiprocessors that `accept` takes."""
        return cross_validated_twin(
            [c for c in self.cells if c.sms == sms and accept(c)], self.clock
        )


@cache
def load_calibration() -> TwinCalibration:
    """Return the calibration that ships with orinbench."""
    data = json.loads((files("orinbench.judge") / "twin.json").read_text("utf-8"))
    scores = data["scores_by_model"]
    cells = tuple(
        TwinAndBoardTime(
            f"{model} {kind}",
            sms,
            TimedWork(
                is_prompt=which == "prompt",
                tokens=tokens,
                weights=weights,
                milliseconds=envelope,
                mhz=data["envelope_mhz"],
                scores=scores[model],
            ),
            board,
        )
        for model, kind, sms, which, tokens, weights, envelope, board in data["cells"]
    )
    least, most = data["decode_watts"]
    sources = data["board"], data["source"], data["envelope"]
    return TwinCalibration(data["board_mhz"], (least, most), *sources, cells)
