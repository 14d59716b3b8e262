"""The other end of `JobProcess`: does jobs within limits of time and memory.

A line of JSON on standard input is a job, a line on standard output its result. Where what comes
first takes long, each job has a copy of the process: one that is ended costs the next job nothing.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

Job = Mapping[str, Any]


def answer_jobs_until_eof(
    answer: Callable[[Job, int], Mapping[str, Any]], first: Callable[[Job], None] | None = None
) -> None:
    """Answer jobs until there are no more: `python -m MODULE SECONDS MEMORY`.

    SECONDS of CPU time for each, MEMORY bytes for all.

    Args:
      answer: Hears a job and its bytes.
      first: Takes the first line, which is no job, and has all the time that it needs; each job
        is done in a copy of the process (fork) then.
    """
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    _limit_resource(resource.RLIMIT_AS, memory)
    _limit_resource(resource.RLIMIT_CORE, 0)
    too_much = json.dumps({"error": f"it takes more than {memory >> 20} MB of memory"})
    if first is not None:
        first(json.loads(sys.stdin.buffer.readline()))

    def do(line: bytes) -> None:
        # Beyond the time a signal ends the process; whoever gave the job sees that.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            said = json.dumps(answer(json.loads(line), len(line)))
        except MemoryError:
            said = too_much
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(said, flush=True)

    for line in sys.stdin.buffer:
        if first is None:
            do(line)
        elif status := _do_in_fork_returning_status(do, line):
            print(json.dumps({"error": end_reason_text(status, seconds, memory)}), flush=True)


def _do_in_fork_returning_status(do: Callable[[bytes], None], line: bytes) -> int:
    """Do a job in a copy of this process; return its exit status, as `subprocess` says it."""
    if copy := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    try:
        do(line)
    except BaseException:
        os._exit(1)
    os._exit(0)


def end_reason_text(status: int, seconds: float, memory: int) -> str:
    """Say why a process ended with a status."""
    if status == -signal.SIGPROF:
        return f"it takes more than {seconds:g} s"
    if status in (-signal.SIGABRT, -signal.SIGSEGV):  # no memory left, or no stack
        return f"it takes more than {memory >> 20} MB of memory, or is nested too deep"
    return f"the process that works on it ended with status {status}"


def _limit_resource(which: int, least: int) -> None:
    """Limit a resource; where a service may not, its own limits hold."""
    _, most = resource.getrlimit(which)
    with contextlib.suppress(PermissionError):
        resource.setrlimit(which, (least if most < 0 else min(least, most), most))
