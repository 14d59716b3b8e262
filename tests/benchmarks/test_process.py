import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orinbench.benchmark import protocol
from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.process import WorkerProcess

READ = "import sys, os, time, signal; sys.stdin.readline(); "
REPLY = protocol.encode(protocol.Loaded(1.5, "general", "all", 9))
LOADED = f"print({REPLY!r}, flush=True); "


@contextmanager
def worker(script: str, timeout: float = 20) -> Iterator[WorkerProcess]:
    with WorkerProcess({"HELLO": "there"}, timeout, (sys.executable, "-c", script)) as process:
        yield process


def ask(process: WorkerProcess) -> protocol.Loaded:
    return process.ask(protocol.Load("m", 1), protocol.Loaded)


def alive(pid: int) -> bool:
    """True if it runs; a zombie that nobody has waited for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_an_answer_comes_back() -> None:
    with worker(READ + LOADED + "sys.stdin.read()") as process:
        assert ask(process) == protocol.Loaded(1.5, "general", "all", 9)


def test_the_environment_reaches_the_worker() -> None:
    script = READ + "sys.stderr.write(os.environ['HELLO']); sys.exit(4)"
    with worker(script) as process, pytest.raises(BackendDiedError, match=r"status 4: there$"):
        ask(process)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("sys.exit(3)", "ended with status 3$"),
        ("raise RuntimeError('no device')", "ended with status 1: RuntimeError: no device$"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed by SIGKILL \(out of memory\?\)$"),
        ("print('hello', flush=True); time.sleep(9)", "not a message: 'hello"),
        ('print(\'{"type": "Open"}\', flush=True); time.sleep(9)', "answered Open to Load"),
    ],
)
def test_a_death_is_one_line_with_its_reason(script: str, says: str) -> None:
    with worker(READ + script) as process, pytest.raises(BackendDiedError, match=says) as caught:
        ask(process)
    assert "\n" not in str(caught.value)


def test_a_failed_request_leaves_the_worker_alive() -> None:
    failed = 'print(\'{"type": "Failed", "error": "E: x", "traceback": ""}\', flush=True); '
    with worker(READ + failed + "sys.stdin.readline(); " + LOADED) as process:
        with pytest.raises(BackendDiedError, match=r"^E: x$"):
            ask(process)
        assert ask(process).chunk == 9


def test_a_missing_compiler_says_how_to_get_one() -> None:
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'clang'"
    failed = f'print(\'{{"type": "Failed", "error": "{error}"}}\'.replace("~", chr(39)))'
    script = READ + failed.replace("'clang'", "~clang~")
    with worker(script) as process, pytest.raises(BackendDiedError, match="pip install ziglang"):
        ask(process)


def test_no_answer_in_time_ends_the_worker() -> None:
    start = time.monotonic()
    with worker(READ + "time.sleep(60)", timeout=0.3) as process:
        with pytest.raises(BackendDiedError, match=r"no answer to Load in 0\.3 s \(--timeout\)"):
            ask(process)
        with pytest.raises(BackendDiedError):
            ask(process)
    assert time.monotonic() - start < 20


def test_asking_the_dead_says_how_it_died() -> None:
    with worker("import sys; sys.stderr.write('gone'); sys.exit(7)") as process:
        time.sleep(0.5)
        for _ in range(2):
            with pytest.raises(BackendDiedError, match="ended with status 7: gone"):
                ask(process)


def test_closing_ends_a_stubborn_worker_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orinbench.benchmark.process.QUIT_SECONDS", 0.2)
    monkeypatch.setattr("orinbench.benchmark.process.CLOSE_SECONDS", 0.5)
    script = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = os.fork(); "
        f"child and print({REPLY!r}.replace(': 9,', f': {{child}},'), flush=True); time.sleep(60)"
    )
    with worker(script) as process:
        child = ask(process).chunk
        assert child is not None
        assert alive(child)
    until = time.monotonic() + 60
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(child)
