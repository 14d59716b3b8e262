"""A backend at work, and what it hands to the statistics. A worker's answers cross a pipe.

Times are seconds or nanoseconds as the field says, sizes are bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orinbench.judge.sample_statistics import BenchWarning
from orinbench.measure.clocks import ClockState


class BackendError(Exception):
    """A backend cannot go on; the message is the one line that its rows carry."""


class NonfiniteLogitsError(BackendError):
    """A model's logits are no numbers: the gate can say where that begins."""


class CaseLeftOutError(Exception):
    """A case would take too long on this device: left out, and no failure."""


@dataclass(frozen=True)
class BackendIdentity:
    """A backend's description of itself when its device is open and computes."""

    software: str  # e.g. "tinygrad 0.13.0+orin.0123456789ab"
    build_commit: str
    build_number: int | None
    device: str  # tinygrad's device, or llama.cpp's backends field
    device_name: str | None  # as the vendor calls it, where that can be read
    driver: str | None = None
    arch: str | None = None
    n_threads: int | None = None  # threads that kernels may use, on the CPU device
    renderer: str | None = None
    sms: int | None = None  # multiprocessors, where not all of the device are used


@dataclass(frozen=True)
class CopyBandwidthSamples:
    """Bytes read plus bytes written per second, for each repetition."""

    n_bytes: int
    samples_gb_s: list[float]


@dataclass(frozen=True)
class LoadRequest:
    """A GGUF to load for contexts of up to `max_context` tokens.

    `general`: into tinygrad.llm's own network.
    """

    model: str
    max_context: int
    sequences: int = 1  # so many contexts fit
    key_type: str = "f16"  # of keys and values, in llama.cpp's words
    general: bool = False
    mmproj: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """The model is loaded, and the first token is on the host."""

    load_s: float  # of the file alone
    decode_path: str  # "fused", "cpu", "general" (all the engine's), "jit" (tinygrad.llm's)
    included: str  # what a timed region of that path holds, for people
    chunk: int | None  # prompt tokens that go through at once; None: all
    compile_s: float = 0.0  # inside the compilers, since the process started
    kernels_compiled: int = 0
    search_s: float = 0.0  # inside BEAM's search, compiling and timing included


@dataclass(frozen=True)
class FirstTokenTime:
    """Time to the first token, from the start of the process, for a prompt of `n_prompt` tokens.

    `warm` and `cold` are what the two workers said; llama.cpp has none.
    """

    n_prompt: int
    warm_s: float
    cold_s: float | None = None  # kernel cache empty; None: nothing is cached, or it was not asked
    warm: LoadReport | None = None
    cold: LoadReport | None = None


@dataclass(frozen=True)
class RowCheckResult:
    """A row's last logits at its depth and batch beside the same ones computed in another way."""

    finite: bool
    error: float  # rms of the difference, of the logits' spread
    against: str
    tokens: list[int] = field(default_factory=list)  # of one sequence, and the logits behind them
    logits: Any = None
    misdrawn: int = 0  # of `drawn` tokens, those that the host would not draw from the same logits
    drawn: int = 0
    mixed: float = 0.0  # as `error`: of a batch among copies of one of its sequences


@dataclass(frozen=True)
class WarmUpCost:
    """Cost of getting a case ready: its kernels are compiled and its graphs captured."""

    seconds: float = 0.0
    repetition_s: float = 0.0  # of which a whole repetition, depth and preparation included
    compile_s: float = 0.0
    kernels_compiled: int = 0
    kernels_per_token: int | None = None  # of a decoded token, those in graphs included
    launches_per_token: int | None = None  # calls that the host makes for them
    type_k: str | None = None
    type_v: str | None = None
    checked: RowCheckResult | None = None  # the first time that a case is warmed up
    search_s: float = 0.0  # inside BEAM's search, compiling and timing included


@dataclass(frozen=True)
class SuiteWarmUpResult(WarmUpCost):
    """A repetition of a case of the suite, or the reason for leaving the case out."""

    left_out: str | None = None
    work: float = 0.0  # units of work in a repetition
    calls: int = 0  # that a repetition makes
    flops: float = 0.0  # of a repetition; 0: does not compute
    n_bytes: float = 0.0  # that a repetition must move in device memory; 0: not known
    peak_flops: float | None = None  # what the device can do at most a second, in this type
    check: str = ""  # what the check of the result has found
    included: str = ""  # what the timed region holds, for people
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One timed repetition; None is what an engine does not say.

    What stands behind `extra` is the runner's: the round, and the machine around the repetition.
    """

    ns: int
    # When the timed region ended: CLOCK_MONOTONIC, the same in every process.
    ended_s: float | None = None
    peak_device_bytes: int | None = None
    peak_rss_bytes: int | None = None
    kernels_compiled: int = 0  # inside the timed region; must be 0
    finite: bool = True  # all logits that the repetition left, and the numbers its tokens are of
    discarded_ns: list[int] = field(default_factory=list)  # llama-bench's own first repetition
    engine_record: dict[str, Any] | None = None  # llama-bench's own record
    extra: dict[str, Any] = field(default_factory=dict)  # what this benchmark alone measures
    round: int = 0
    process: int = 0  # which of the lane's fresh processes it is of
    clocks_before: ClockState | None = None
    clocks_after: ClockState | None = None
    # The board's sensors (power, temperature, clocks), None where there are none; what of them
    # makes the sample suspect, None if it is no Jetson; and what the timed region drew:
    # `board.MeasuredEnergy.record_fields`.
    board_before: dict[str, Any] | None = None
    board_after: dict[str, Any] | None = None
    board_warnings: tuple[BenchWarning, ...] | None = None
    energy: dict[str, Any] | None = None


class Backend(Protocol):
    """A lane at work; cases are of the lane's kind. Methods raise BackendError, one line."""

    def open_and_identify(self) -> BackendIdentity:
        """Start, load the model where the process stays, and say what runs."""

    def time_first_token(self) -> FirstTokenTime:
        """Measure the time to the first token, where there is a model."""
        raise AssertionError("a lane without a model")

    def warm_up(self, case: Any) -> WarmUpCost | None:
        """Get a case ready to be timed; None where each repetition does that for itself.

        Raises CaseLeftOutError for a case that the device is too small or too slow for.
        """

    def time_repetition(self, case: Any, seed: int) -> Sample:
        """Time one repetition."""

    def restart(self) -> float | None:
        """Replace the process by a fresh one, as it was before the first warm-up.

        Returns the seconds from its start to its first token, None where there is none. Here each
        call is a fresh process.
        """
        return None

    def close(self) -> None:
        """End the process, if one stays; never raises."""
        return


class SequenceExecutor(Protocol):
    """A sequence on a model, token by token: what is checked and profiled."""

    name: str  # of the path
    vocab_size: int

    def fill_cache(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Start keys and values of tokens[start:end] at their positions."""
        ...

    def prefill_and_submit_token(self, tokens: Sequence[int], start: int) -> None:
        """Start keys and values of tokens[start:], and the token behind them."""
        ...

    def submit_step(self, token: int | None = None, position: int = 0) -> None:
        """Start one token more: the given one, or the one that `wait_for_token` returns."""
        ...

    def wait_for_token(self) -> int:
        """Wait for the most likely next token; -1 where logits are no numbers."""
        ...

    def wait_for_logits(self) -> NDArray[np.float32]:
        """Wait for the logits after the last token: (vocabulary)."""
        ...

    def watch_layer_inputs(self, positions: int) -> NDArray[np.float32] | None:
        """Return what each layer will be given from now on; None: the path does not say.

        That is (layers + 1, positions, width), NaN where nothing was computed. For no positions it
        is no longer noted.
        """
        return None
