"""The bench in a process of its own that signals meet where a test wants them to."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Sequence

#: The least that Linux gives a pipe: results that are longer wait for their reader.
PIPE_BYTES = 4096


def interrupted(
    command: Sequence[str], line: str, number: signal.Signals, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    """Interrupt a command at its line on standard error, and twice more while it writes results.

    Its first byte of results is the sign that it writes, and the rest of them, which the pipe does
    not hold, keeps it there. Returns exit code, output and what standard error has behind the line.
    """
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    process = subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, bufsize=1,
        env=(os.environ if env is None else env) | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    os.close(theirs)
    assert process.stderr is not None
    with process, open(ours, "rb", buffering=0) as results:
        assert any(line in said for said in process.stderr), "it ended before its line"
        process.send_signal(number)
        out = results.read(1)
        for _ in range(2):
            process.send_signal(number)
        while more := results.read(PIPE_BYTES):
            out += more
        assert len(out) > PIPE_BYTES, "all was written before the later signals"
        err = process.stderr.read()
    return process.returncode, out.decode(), err
