import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.measure.backends.backend import BackendError, LoadReport, LoadRequest
from orinbench.measure.backends.worker_process import DONE, FAILED, WorkerProcess

READ = "import os, pickle, signal, sys, time; pickle.load(sys.stdin.buffer); "
ANSWER = LoadReport(1.5, "general", "all", 9)


def says(kind: str, value: Any) -> str:
    """Code of a worker's script that writes an answer."""
    data = pickle.dumps((kind, value))
    return f"sys.stdout.buffer.write({len(data).to_bytes(8) + data!r}); sys.stdout.flush(); "


LOADED = says(DONE, ANSWER)


@contextmanager
def worker(script: str, timeout: float = 20) -> Iterator[WorkerProcess]:
    command = (sys.executable, "-c", script)
    with WorkerProcess({}, timeout, command) as process:
        yield process


def ask(process: WorkerProcess) -> LoadReport:
    return process.runner.load_to_first_token(LoadRequest("m", 1))


def alive(pid: int) -> bool:
    """True if it runs; a zombie that nobody has waited for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit(3)", "ended with status 3$"),
        ("raise RuntimeError('no device')", "ended with status 1: RuntimeError: no device$"),
        (
            "print('hello there', flush=True); time.sleep(60)",
            "wrote text beside its answers: .*hello there",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed by SIGKILL \(out of memory\?\)$"),
    ],
)
def test_a_death_is_one_line_with_its_reason(script: str, reason: str) -> None:
    with worker(READ + script) as process, pytest.raises(BackendError, match=reason) as caught:
        ask(process)
    assert "\n" not in str(caught.value)


def test_a_failed_request_leaves_the_worker_alive() -> None:
    with worker(READ + says(FAILED, "E: x") + READ + LOADED) as process:
        with pytest.raises(BackendError, match=r"^E: x$"):
            ask(process)
        assert ask(process).chunk == 9


def test_a_missing_compiler_says_how_to_get_one() -> None:
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'clang'"
    with (
        worker(READ + says(FAILED, error)) as process,
        pytest.raises(BackendError, match="pip install ziglang"),
    ):
        ask(process)


def test_no_answer_in_time_ends_the_worker() -> None:
    start = time.monotonic()
    with worker(READ + "time.sleep(60)", timeout=0.3) as process:
        with pytest.raises(BackendError, match=r"^no answer from it in 0\.3 s \(--timeout\)$"):
            ask(process)
        with pytest.raises(BackendError):
            ask(process)
    assert time.monotonic() - start < 50  # it would end by itself after 60


def test_closing_ends_a_stubborn_worker_and_its_children(monkeypatch: Patch) -> None:
    monkeypatch.setattr("orinbench.measure.backends.worker_process.QUIT_SECONDS", 0.2)
    monkeypatch.setattr("orinbench.measure.backends.worker_process.CLOSE_SECONDS", 0.5)
    script = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = os.fork(); "
        "data = __import__('pickle').dumps(('done', child)); "
        "child and os.write(1, len(data).to_bytes(8) + data); time.sleep(120)"
    )
    with worker(script) as process:
        child = cast(int, ask(process))
        assert alive(child)
        until = time.monotonic() + 60  # it would end by itself behind that
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(child) and time.monotonic() < until
