"""`python -m nvgpusim [options] -- script.py` in copies of a process that has the modules.

To start both interpreters and to import tinygrad costs more than most scripts. A copy is told
nothing else than the command: its environment, folder and streams are those given, the script is
its main module, and it ends as an interpreter does. Programs that the script starts are as ever.

As a program it is the process that is copied. It reads a request a line, and answers with two
lines: the copy's process, and how that ended.
"""

import atexit
import gc
import importlib
import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

#: What scripts and their device import.
MODULES = (
    "numpy", "tinygrad", "tinygrad.device", "tinygrad.runtime.graph.hcq", "tinygrad.runtime.ops_nv",
    "tinygrad.runtime.support.compiler_cuda", "tinygrad.uop.ops", "traceback",
)  # fmt: skip
#: Variables that nobody reads at an import: others are of processes that start afresh.
LATE = {"HCQDEV_WAIT_TIMEOUT_MS", "NV_SMEM_TARGET", "OLD", "SEEDS", "TEGRA_L2", "TEGRA_RESERVE_MB"}


class Copies:
    """Copies of a process that was started in this environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout

    def start(self, words: list[str], folder: Path, env: dict[str, str], files: list[Path]) -> int:
        """Begin `python -m nvgpusim *words` in a session of its own; returns its process.

        Args:
            words: the command's arguments.
            folder: where it runs.
            env: its environment.
            files: its standard input, output and error.
        """
        request = {"words": words, "folder": str(folder), "env": env, "files": [*map(str, files)]}
        self._asked.write(json.dumps(request).encode() + b"\n")
        return int(self._answer())

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if not select.select([self._answers], [], [], 0)[0]:
            return None
        return os.waitstatus_to_exitcode(int(self._answer()))

    def _answer(self) -> bytes:
        line = self._answers.readline()
        assert line, "the process that is copied has ended"
        return line

    def close(self) -> None:
        """End the process; no copy runs."""
        self._process.communicate()


class _Waiting:
    """In place of the Popen by which nvgpusim starts Python: a copy that waits for its command."""

    def __init__(self) -> None:
        there, here = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(here)
            with open(there) as pipe:
                self.command = pipe.read()
            return
        os.close(there)
        self._pipe = open(here, "w")  # noqa: SIM115 - whose end is the command's

    def __call__(self, argv: list[str], env: dict[str, str]) -> "_Waiting":
        json.dump([argv, env], self._pipe)
        self._pipe.close()
        return self

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send_signal(self, number: int) -> None:
        """As Popen."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """As Popen."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _serve(at_exit: list[Callable[[], object]]) -> None:
    """Make copies until the requests end; only a copy's main module returns."""
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
            waiting = _Waiting()
            if waiting.pid == 0:
                if not waiting.command:  # refused
                    os._exit(0)
                argv, env = json.loads(waiting.command)
                _run(argv, env, at_exit)
                return
            subprocess.Popen = waiting  # type: ignore[assignment, misc]
            status = importlib.import_module("nvgpusim.cli").main()
            sys.stdout.flush()
            os._exit(status)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def _become(request: dict[str, Any]) -> None:
    """Take over what a process is started with."""
    os.setsid()
    os.chdir(request["folder"])
    modes = (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)
    for number, (path, mode) in enumerate(zip(request["files"], modes, strict=True)):
        fd = os.open(path, mode)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["nvgpusim", *request["words"]]


def _run(argv: list[str], env: dict[str, str], at_exit: list[Callable[[], object]]) -> None:
    """Be the interpreter of `argv` from its sitecustomize on."""
    from tinygrad import helpers

    from nvgpusim.orin import simulation

    os.environ.clear()
    os.environ.update(env)
    helpers.getenv.cache_clear()
    helpers.CACHEDB = env["CACHEDB"]
    simulation.start_from_environment()
    for function in at_exit:
        atexit.register(function)
    sys.argv = argv[1:]
    sys.path[0] = str(Path(argv[1]).parent)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = argv[1]
    exec(compile(Path(argv[1]).read_bytes(), argv[1], "exec"), main.__dict__)


def _imported() -> list[Callable[[], object]]:
    """Import all; what modules want done at the end is done before the simulator's report."""
    wanted: list[Callable[[], object]] = []
    register = atexit.register
    atexit.register = lambda function: wanted.append(function) or function  # type: ignore
    for name in MODULES:
        importlib.import_module(name)
    atexit.register = register
    for name in ("nvgpusim.cli", "nvgpusim.orin.simulation", "nvgpusim.orin.gpu"):
        importlib.import_module(name)
    gc.freeze()  # a collection in a copy would copy their pages
    return wanted


if __name__ == "__main__":
    _serve(_imported())
