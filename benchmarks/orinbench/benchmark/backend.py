"""Data that the backends hand to the statistics: samples, warm-ups, and what is known of a lane."""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from orinbench.benchmark.plan import AnyCase
from orinbench.benchmark.protocol import Identity, WarmedUp
from orinbench.board.clocks import ClockState
from orinbench.samples import BenchWarning

CaseT = TypeVar("CaseT", bound=AnyCase, contravariant=True)


class BackendDiedError(Exception):
    """A backend cannot go on; the message is the one line that its rows carry."""


class LeftOutError(Exception):
    """A case would take too long on this device: left out, and no failure."""


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token, from the start of the process, for a prompt of `n_prompt` tokens."""

    n_prompt: int
    cold_s: float | None  # kernel cache empty; None where nothing is cached or it was not asked for
    warm_s: float
    load_s: float | None  # of the warm run, the model file alone
    cold_compile_s: float | None
    kernels_compiled: int | None
    decode_path: str | None = None  # tinygrad's "fused", "general" or "jit"
    included: str | None = None  # what its timed region holds, for people
    chunk: int | None = None  # prompt tokens that go through at once; None: as -ub says


@dataclass(frozen=True)
class Sample:
    """One timed repetition, and the machine's clocks around it."""

    round: int
    ns: int
    peak_device_bytes: int | None
    peak_rss_bytes: int | None
    process: int = 0  # which of the lane's fresh processes it is of
    ended_s: float | None = None  # when the timed region ended, in seconds of time.monotonic()
    kernels_compiled: int = 0
    discarded_ns: list[int] = field(default_factory=list)  # llama-bench's own first repetition
    engine_record: dict[str, Any] | None = None  # llama-bench's own record
    clocks_before: ClockState | None = None
    clocks_after: ClockState | None = None
    # The board's sensors (power, temperature, clocks), None where there are none; what of them
    # makes the sample suspect, None if it is no Jetson; and what the timed region drew:
    # `board.EnergyRun.fields`.
    board_before: dict[str, Any] | None = None
    board_after: dict[str, Any] | None = None
    board_warnings: tuple[BenchWarning, ...] | None = None
    energy: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # what this benchmark alone measures


class BackendOf(Protocol[CaseT]):
    """A lane at work. Each method raises BackendDiedError with one line."""

    def open(self) -> Identity:
        """Start, load the model where the process stays, and say what runs."""
        ...

    def first_token(self) -> FirstToken:
        """Measure the time to the first token."""
        ...

    def warm_up(self, case: CaseT) -> WarmedUp | None:
        """Get a case ready to be timed; None where each repetition does that for itself.

        Raises LeftOutError for a case that the device is too small or too slow for.
        """
        ...

    def measure(self, case: CaseT, round_: int, seed: int) -> Sample:
        """Time one repetition."""
        ...

    def renew(self) -> float | None:
        """Replace the process by a fresh one, as it was before the first warm-up.

        Returns the seconds from its start to its first token, None where there is none.
        """
        ...

    def close(self) -> None:
        """End the process; never raises."""
        ...


Backend = BackendOf[Any]
