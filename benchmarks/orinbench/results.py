"""What a run leaves behind, before it is turned into records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orinbench.environment import Environment
from orinbench.model import ModelInfo
from orinbench.plan import Case, LanePlan, Plan
from orinbench.protocol import Bandwidth
from orinbench.samples import FirstToken, Identity, Sample, WarmUp


@dataclass
class RowResult:
    """One case of one lane."""

    case: Case
    warm_up: WarmUp | None = None
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None

    @property
    def throughputs(self) -> list[float]:
        """Tokens per second of each sample, in the order taken."""
        return [self.case.n_tokens * 1e9 / sample.ns for sample in self.samples]


@dataclass
class LaneResult:
    """One backend with one model."""

    plan: LanePlan
    model: ModelInfo
    rows: list[RowResult]
    identity: Identity | None = None
    first_token: FirstToken | None = None
    bandwidth: Bandwidth | None = None
    check: dict[str, Any] | None = None  # what the correctness gate found; None: not run
    error: str | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes it."""
        return self.identity is not None and self.identity.device != "CPU"


@dataclass
class RunResult:
    """One run of the bench, whole or cut short."""

    plan: Plan
    environment: Environment
    lanes: Sequence[LaneResult]
    started: str  # ISO 8601, UTC
    synthetic: bool = False  # no model was given: made-up weights
    partial: bool = False  # interrupted: samples are missing

    @property
    def failed(self) -> bool:
        """Whether any row carries an error."""
        return any(lane.error or row.error for lane in self.lanes for row in lane.rows)
