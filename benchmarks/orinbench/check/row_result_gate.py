"""The gate for each row at its own depth and batch, once a run.

A worker hands over the last logits of a row and the same ones computed in another way
(measure/backends/row_check.py). Where the model is small for its context, the float64 reference
judges the row's own, too.
"""

import numpy as np

from orinbench.check.reference import Reference
from orinbench.errors import CheckFailed
from orinbench.measure.plan import Case
from orinbench.measure.results import LaneResult, RowResult

# Two ways of an engine differ by at most this, of the logits' spread: times what the gate allows
# one way, or where the gate did not look, as much as 8-bit activations make of deep models.
_TWO_WAYS, _UNKNOWN = 2.5, 0.25
# Where routers choose, rounding takes another expert for one that ties. Of gpt-oss-20b-8 in MXFP4
# the reference rounding to 8 bits chooses otherwise in 43 of 264 places of 33 tokens: its logits
# are 8 to 23 % off (3 % with the same experts), two ways of the fused kernels 32 %.
_ROUTED = 0.5
# Of a batch whose other sequences change: nothing, but for sums in another order.
_SAME = 0.01
# Rows of an encoder in halves differ from those in floats by a tenth of this (docs/vision.md).
_ENCODED = 0.01
# Share of draws that rounding may move to the next token.
_MISDRAWN = 0.15
# Weights times tokens that the reference computes in a few seconds.
_SMALL = 3e9


def require_row_passed(lane: LaneResult, row: RowResult) -> None:
    """Raise CheckFailed, exit code 3, for a row whose last logits are wrong or no numbers."""
    found = row.warm_up and row.warm_up.checked
    if not found:
        return
    where = f"check of {lane.plan.name} {row.case.label} failed: its last logits are"
    if not found.finite:
        raise CheckFailed(f"{where} not finite")
    tolerance = (lane.check or {}).get("tolerance")
    limit = _TWO_WAYS * tolerance if tolerance else _UNKNOWN
    if lane.model is not None and lane.model.is_mixture:
        limit = max(limit, _ROUTED)
    if isinstance(row.case, Case) and row.case.is_picture_encoding:
        limit, where = _ENCODED, where.replace("last logits", "rows")
    if found.error > limit:
        raise CheckFailed(
            f"{where} {_error_text(found.error)} off {found.against}, {_limit_text(limit)}"
        )
    if found.mixed > _SAME:
        raise CheckFailed(
            f"{where} {_error_text(found.mixed)} off if other sequences change, "
            f"{_limit_text(_SAME)}"
        )
    if found.misdrawn > _MISDRAWN * found.drawn:
        raise CheckFailed(
            f"check of {lane.plan.name} {row.case.label} failed: {found.misdrawn} of {found.drawn} "
            "tokens are not those that its logits and the seed give"
        )
    model = lane.model
    if model is None or not found.tokens or not tolerance:
        return
    if model.n_params * len(found.tokens) > _SMALL:
        return
    reference = Reference(model, context=lane.plan.max_context)
    wanted = reference.logits(found.tokens)[-1]
    error = float(np.sqrt(np.mean((found.logits - wanted) ** 2)) / wanted.std())
    if not error <= limit and not reference.routed:  # ties of routers are the gate's
        raise CheckFailed(
            f"{where} {_error_text(error)} off the float64 reference, {_limit_text(limit)}"
        )
    row.reference_error = error


def row_check_text(row: RowResult) -> str:
    """Say how the numbers of a row were checked at its depth and batch, or that they were not."""
    found = row.warm_up and row.warm_up.checked
    if not found:
        return "not checked at this depth and batch"
    said = f"{100 * found.error:.2g} % off {found.against}"
    if row.reference_error is not None:
        said += f", {100 * row.reference_error:.2g} % off the float64 reference"
    return said


def _error_text(error: float) -> str:
    return f"{100 * error:.2g} % of their spread"


def _limit_text(limit: float) -> str:
    return f"allowed {100 * limit:.2g} %"
