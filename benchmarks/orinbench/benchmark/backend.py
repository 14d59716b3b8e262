"""Data that the backends hand to the statistics: samples, warm-ups, and what is known of a lane."""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from orinbench.benchmark.plan import AnyCase
from orinbench.benchmark.protocol import Identity, Loaded, Measured, WarmedUp
from orinbench.board.clocks import ClockState
from orinbench.samples import BenchWarning

CaseT = TypeVar("CaseT", bound=AnyCase, contravariant=True)


class BackendDiedError(Exception):
    """A backend cannot go on; the message is the one line that its rows carry."""


class LeftOutError(Exception):
    """A case would take too long on this device: left out, and no failure."""


@dataclass(frozen=True)
class FirstToken:
    """Time to the first token, from the start of the process, for a prompt of `n_prompt` tokens.

    `warm` and `cold` are what the two workers said; llama.cpp has none.
    """

    n_prompt: int
    warm_s: float
    cold_s: float | None = None  # kernel cache empty; None: nothing is cached, or it was not asked
    warm: Loaded | None = None
    cold: Loaded | None = None


@dataclass(frozen=True)
class Sample(Measured):
    """One timed repetition, and the machine's clocks around it."""

    round: int = 0
    process: int = 0  # which of the lane's fresh processes it is of
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
