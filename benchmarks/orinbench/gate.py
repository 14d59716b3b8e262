"""The correctness gate in front of the timing: which models it checks, and what it says."""

from collections.abc import Callable
from typing import Any

from orinbench.results import LaneResult
from orinbench.samples import Backend
from orinbench.talk import Talk


def make_gate(
    asked: bool | None, talk: Talk
) -> Callable[[LaneResult, Backend], dict[str, Any] | None]:
    """Return the gate."""
    return lambda lane, backend: None
