"""Jinja in a process of its own, which a template may exhaust without harm (jinja_process.py)."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from orinllm.errors import BadInput


class Renderer:
    """Renders templates; one for a process is enough, and threads may share it.

    A template may take `seconds` of CPU time, and all of them `memory` bytes.
    """

    def __init__(self, seconds: int = 3, memory: int = 1 << 30) -> None:
        self.seconds, self.memory = seconds, memory
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Return the process, which is started if there is none."""
        with self._lock:
            if self._process is None:
                # A session of its own: Ctrl-C in a terminal is not meant for it. -P: nothing of
                # the current folder is imported.
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "orinllm.jinja_process"),
                        *(str(self.seconds), str(self.memory)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                )
            return self._process

    def run(self, job: Mapping[str, Any]) -> str:
        """Return what a template makes of variables; raises BadInput where it fails."""
        try:
            line = json.dumps(job).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"what it is given is no JSON: {error}") from None
        with self._lock:
            try:
                answer = self._exchange(line)
            except BaseException:
                self.close()  # an answer that nobody read would be the next job's
                raise
            if not answer.endswith(b"\n"):
                raise BadInput(self._ended())
        found = json.loads(answer)
        if "error" in found:
            raise BadInput(found["error"])
        return str(found["text"])

    def _exchange(self, line: bytes) -> bytes:
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line)
            process.stdin.flush()
        return process.stdout.readline()

    def _ended(self) -> str:
        """Say why the process is gone; the next template gets a new one."""
        assert self._process is not None
        status = self._process.wait()
        self.close()
        if status == -signal.SIGXCPU:
            return f"it takes more than {self.seconds} s"
        return f"the process that renders it ended with status {status}"

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process = None


@functools.cache
def renderer() -> Renderer:
    """Return the renderer that all models of this process share."""
    made = Renderer()
    atexit.register(made.close)
    return made
