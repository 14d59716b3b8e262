"""A process of its own for what a client or a file may make endless (job_loop.py)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from orinllm.errors import BadInput
from orinllm.text.processes.job_loop import end_reason_text

_CHILDREN: weakref.WeakSet[JobProcess] = weakref.WeakSet()


class JobProcess:
    """A process that does jobs, one at a time; threads may share it.

    Args:
      module: What it runs: `job_loop.answer_jobs_until_eof`, which answers each job.
      seconds: CPU time of a job at most.
      memory: Bytes that the process may take.
      first: What each such process is told before its first job.
    """

    def __init__(
        self, module: str, seconds: float, memory: int, first: Mapping[str, Any] | None = None
    ) -> None:
        self.seconds, self.memory = seconds, memory
        self._module, self._first = module, first
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        _CHILDREN.add(self)

    def start_or_get_process(self) -> subprocess.Popen[bytes]:
        """Return the process, which is started if there is none."""
        with self._lock:
            if self._process is None:
                # A session of its own: Ctrl-C in a terminal is not meant for it. -P: nothing of
                # the current folder is imported.
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", self._module),
                        *(str(self.seconds), str(self.memory)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
                if self._first is not None:
                    assert self._process.stdin is not None
                    self._process.stdin.write(json.dumps(self._first).encode() + b"\n")
            return self._process

    def run_job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's result; raises BadInput where it fails."""
        try:
            line = json.dumps(job).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"what it is given is no JSON: {error}") from None
        with self._lock:
            try:
                answer = self._exchange_lines(line)
            except BaseException:
                self.close()  # an answer that nobody read would be the next job's
                raise
            if not answer.endswith(b"\n"):
                assert self._process is not None
                status = self._process.wait()
                self.close()  # the next job gets a new one
                raise BadInput(end_reason_text(status, self.seconds, self.memory))
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise BadInput(found["error"])
        return found

    def _exchange_lines(self, line: bytes) -> bytes:
        process = self.start_or_get_process()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        return process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with its copy (job_loop.py)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process = None

    def __del__(self) -> None:
        self.close()


@atexit.register
def _close_job_processes() -> None:
    for child in list(_CHILDREN):
        child.close()
