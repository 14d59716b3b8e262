"""Results of a run, before they are turned into records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orinbench.measure.backends.backend import (
    BackendIdentity,
    CopyBandwidthSamples,
    FirstTokenTime,
    Sample,
    SuiteWarmUpResult,
    WarmUpCost,
)
from orinbench.measure.environment import Environment
from orinbench.measure.plan import AnyCase, Case, Lane, Plan
from orinbench.model import ModelInfo


@dataclass
class RowResult:
    """One case of one lane."""

    case: AnyCase
    warm_up: WarmUpCost | None = None
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None
    left_out: str | None = None  # why it was not run, which is no failure
    reference_error: float | None = None  # of its last logits; None: not compared

    @property
    def work_units(self) -> float:
        """Units of work in one repetition: tokens, or what the warm-up of the suite's case says."""
        if isinstance(self.case, Case):
            return self.case.n_tokens
        assert self.suite_warm_up is not None
        return self.suite_warm_up.work

    @property
    def suite_warm_up(self) -> SuiteWarmUpResult | None:
        """Description of a repetition, for a suite's case."""
        return self.warm_up if isinstance(self.warm_up, SuiteWarmUpResult) else None

    @property
    def sample_processes(self) -> list[int]:
        """Index of the lane's process that took each sample."""
        return [sample.process for sample in self.samples]

    @property
    def throughputs(self) -> list[float]:
        """Units of work a second of each sample, in the order taken."""
        return [self.work_units * 1e9 / sample.ns for sample in self.samples]


@dataclass
class LaneResult:
    """One backend, with llama-bench on one model."""

    plan: Lane
    model: ModelInfo | None
    rows: list[RowResult]
    identity: BackendIdentity | None = None
    first_token: FirstTokenTime | None = None
    # Seconds from start to first token of each process, kernels in the cache.
    first_tokens_s: list[float] = field(default_factory=list)
    bandwidth: CopyBandwidthSamples | None = None
    check: dict[str, Any] | None = None  # what the correctness gate found; None: not run
    error: str | None = None
    no_numbers: bool = False  # the error is that logits are none

    @property
    def ran_on_gpu(self) -> bool:
        """True if a GPU computes it."""
        return self.identity is not None and self.identity.device != "CPU"

    def can_run(self, row: RowResult) -> bool:
        """Return whether neither the lane nor this row of it has failed or was left out."""
        return self.error is row.error is row.left_out is None


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
    def has_failures(self) -> bool:
        """True if any row carries an error."""
        return any(lane.error or row.error for lane in self.lanes for row in lane.rows)
