"""State of a device check, the programs that its steps run, and ends without a result."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orinbench.check.device.gpu import Found
from orinbench.child import run

# tinygrad's wait for the GPU: longer than any kernel here takes, on an interpreted GPU too.
_WAIT_MS = {"board": "10000", "tiny": "300000"}
PROBE = ("-m", "orinbench.check.device.probe")


class NotRun(Exception):  # noqa: N818
    """The step cannot be taken here; the message says why and what would help."""


class OutOfTime(Exception):  # noqa: N818
    """The step's time ran out; `result` is what it has, None if that is nothing."""

    def __init__(self, seconds: float, result: Any = None) -> None:
        super().__init__(f"not done in {seconds:.0f} s")
        self.result = result


@dataclass(frozen=True)
class Ask:
    """A program of `probe.py`: its name, the environment and the choice that it runs with."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    choice: str = "-"


@dataclass(frozen=True)
class Check:
    """State shared by the steps; `begun_us` is its start, in microseconds of CLOCK_MONOTONIC."""

    folder: Path
    simulated: bool
    begun_us: int
    model: Path | None = None

    @property
    def size(self) -> str:
        """Amounts of work: "board", or "tiny" for a simulated GPU."""
        return "tiny" if self.simulated else "board"

    @property
    def trace(self) -> Path:
        """The recorded calls: beside the report."""
        return self.folder / "trace.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        """Environment for tinygrad: its own driver, and a bounded wait."""
        return {"DEV": "TEGRA+NV", "HCQDEV_WAIT_TIMEOUT_MS": _WAIT_MS[self.size]}

    def must(self, ask: Ask, seconds: float, recorder: Sequence[object] = ()) -> Found:
        """Return what a program found; raises OutOfTime, and RuntimeError with its error.

        `recorder` is a Python program with its arguments, in which it runs.
        """
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "found.json")
            words = (*PROBE, out, ask.name, self.size, ask.choice)
            variables = {**self.environment, **ask.variables}
            ended = run([sys.executable, *recorder, *words], max(seconds, 1), variables)
            found: Found = {"failed": ended.reason}
            if out.exists():
                found = json.loads(out.read_text())
            elif ended.status is None:
                raise OutOfTime(seconds)
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def ask(self, ask: Ask, seconds: float) -> Found:
        """Return what a program found; an end without a result is its `error`."""
        try:
            return self.must(ask, seconds)
        except (OutOfTime, RuntimeError) as error:
            return {"error": str(error)}
