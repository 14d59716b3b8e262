"""A command in a copy of this process, which has its modules: what refuses at once costs no start.

Of what goes on to load a model the tests start a process of its own, as a user does: a copy has no
threads but one, and a device that was open before is none that it may use.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from io import FileIO, TextIOWrapper
from tempfile import TemporaryFile

import pytest

#: Seconds after which a command is taken for one that did not refuse.
PATIENCE = 60.0


def forked(
    main: Callable[[], object], words: list[str], environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of `main` with these arguments."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_run(main, words, environment or {}))
        end = time.monotonic() + PATIENCE
        while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail(f"{words}: runs after {PATIENCE:.0f} s")
            time.sleep(0.005)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status[1]), out.read(), err.read()


def _run(main: Callable[[], object], words: list[str], environment: Mapping[str, str]) -> int:
    """Run it with streams and arguments of its own; return the exit code."""
    sys.stdout, sys.stderr = (TextIOWrapper(FileIO(n, "w", closefd=False)) for n in (1, 2))
    sys.argv = ["forked", *words]
    os.environ.update(environment)
    code: object = 0
    try:
        code = main()
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0
