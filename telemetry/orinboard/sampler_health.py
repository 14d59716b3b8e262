"""Health of the energy sampler, in a figure and in words."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerHealth:
    """Health of a sampler: its thread's life, its last error, and the age of its samples.

    `age_seconds` is that of the last sample; `still_seconds` is how long none of them has brought
    energy to the counters. Either may be `patience` seconds.
    """

    alive: bool
    age_seconds: float
    still_seconds: float
    patience: float
    errors: dict[str, int]

    @property
    def complaint(self) -> str | None:
        """The problem, in words; None if there is none."""
        if not self.alive:
            return "the energy sampler has ended"
        if self.age_seconds > self.patience:
            return f"the energy sampler's last sample is {self.age_seconds:.0f} s old"
        if self.still_seconds > self.patience:
            return f"the energy counters have stood still for {self.still_seconds:.0f} s"
        return None
