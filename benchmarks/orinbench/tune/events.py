"""The other end of the worker's pipe: events as they come, each within a time."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.process import WorkerProcess
from orinbench.benchmark.tinygrad_backend import worker_environment
from orinllm.compiler import compiler_hint

TUNE_WORKER = (sys.executable, "-m", "orinbench.tune.worker")
# While a model is met, kernels have to reach the search's seam, captured ones too (JITBEAM), and at
# no other time.
_OWN = {"BEAM": "0", "JITBEAM": "1", "IGNORE_BEAM_CACHE": "0", "DEBUG": "0"}


class EventProcess(WorkerProcess):
    """A worker that is asked once and then talks until it is done."""

    def __enter__(self) -> "EventProcess":
        return self

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next event; raises BackendDiedError when none comes within `seconds`."""
        event: dict[str, Any] = json.loads(self.next_line("tune", seconds))
        if event["event"] == "died":
            raise BackendDiedError(compiler_hint(event["error"]))
        return event


@contextmanager
def events(
    device: str,
    request: Mapping[str, Any],
    patience: Callable[[], float],
) -> Iterator[Iterator[dict[str, Any]]]:
    """Start a worker on a device and yield its events up to the last.

    `patience` says before each event how many seconds it may take. Raises BackendDiedError when the
    worker ends early or an event does not come; the worker ends with the context.
    """
    with tempfile.TemporaryDirectory(prefix="orinbench-tune-") as directory:
        environment = {**worker_environment(device, Path(directory)), **_OWN}
        with EventProcess(environment, patience(), TUNE_WORKER) as process:
            process.send(json.dumps(dict(request)))

            def until_the_end() -> Iterator[dict[str, Any]]:
                while (event := process.next(patience()))["event"] != "end":
                    yield event

            yield until_the_end()
