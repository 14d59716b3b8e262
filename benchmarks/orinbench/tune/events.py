"""The other end of the worker's pipe: events as they come, each within a time."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError
from orinbench.process import WorkerProcess
from orinbench.samples import BackendDiedError
from orinbench.tinygrad_backend import worker_environment
from orinllm.compiler import compiler_hint

TUNE_WORKER = (sys.executable, "-m", "orinbench.tune.worker")
# While a model is met, kernels have to reach the search's seam, captured ones too (JITBEAM), and at
# no other time.
_OWN = {"BEAM": "0", "JITBEAM": "1", "IGNORE_BEAM_CACHE": "0", "DEBUG": "0"}


class EventProcess(WorkerProcess):
    """A worker that is asked once and then talks until it is done."""

    def __enter__(self) -> "EventProcess":
        return self

    def start(self, request: Mapping[str, Any]) -> None:
        """Send the one request; raises BackendDiedError where nobody reads it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BackendDiedError(self._obituary()) from None

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next event; raises BackendDiedError when none comes within `seconds`."""
        self._timeout = seconds
        event: dict[str, Any] = json.loads(self._read_line("tune"))
        if event["event"] == "died":
            raise BackendDiedError(compiler_hint(event["error"]))
        return event


@contextmanager
def events(
    device: str,
    request: Mapping[str, Any],
    patience: Callable[[], float],
    variables: Mapping[str, str] | None = None,
) -> Iterator[Iterator[dict[str, Any]]]:
    """Start a worker on a device and yield its events up to the last.

    `patience` says before each event how many seconds it may take, `variables` what the worker's
    environment has besides. Raises BackendDiedError when
    the worker ends early or an event does not come; the worker ends with the context.
    """
    with tempfile.TemporaryDirectory(prefix="orinbench-tune-") as directory:
        environment = {**worker_environment(device, Path(directory)), **_OWN, **(variables or {})}
        with EventProcess(environment, patience(), TUNE_WORKER) as process:
            process.start(request)

            def until_the_end() -> Iterator[dict[str, Any]]:
                while (event := process.next(patience()))["event"] != "end":
                    yield event

            yield until_the_end()


def chosen_device(asked: str | None) -> str:
    """Return tinygrad's device: as asked, as DEV says, or the first that opens."""
    from orinbench.plan import TINYGRAD_DEVICES
    from orinbench.tinygrad_backend import probe_device

    if asked or os.environ.get("DEV"):
        return asked or os.environ["DEV"]
    why = {}
    for device in TINYGRAD_DEVICES:
        if (reason := probe_device(device)) is None:
            return device
        why[device] = reason
    raise BenchError("tune: no device opens: " + "; ".join(f"{d}: {r}" for d, r in why.items()))
