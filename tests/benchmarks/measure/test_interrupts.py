"""Ctrl-C, as often as one likes: what was measured is printed, and the journal goes with that."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.benchmarks.interrupted import interrupted
from tests.benchmarks.orinbench_command import Capture, Patch

from orinbench.child import ChildProcess
from orinbench.interrupts import SIGNALS, Interrupts

# The bench in a process of its own, with llama-bench's stand-in as its only backend.
COMMAND = (
    *(sys.executable, "-m", "orinbench", "llama-bench", "--backend", "llama.cpp", "-p", "8"),
    *("-n", "0", "--ttft", "0", "-r", "1000", "--no-check", "--progress", "-o", "json"),
)


@pytest.mark.parametrize("number", SIGNALS)
def test_any_number_of_interrupts_keeps_the_results(
    tiny_path: Path, fake_llama_bench: Path, tmp_path: Path, number: signal.Signals
) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    command = [*COMMAND, "-m", str(tiny_path), "--llama-bench", str(fake_llama_bench)]
    code, out, err = interrupted(command, "left: llama.cpp pp8", number, environment)
    assert code == 130
    (record,) = json.loads(out)
    assert record["partial"] and record["samples_ns"]
    assert "Traceback" not in err and "kept as run 1 of the history" in err
    assert f"orinbench: ended by {number.name}; what was measured follows\n" in err
    runs = tmp_path / "tinygrad-orin" / "runs"
    assert list(runs.iterdir()) == [], "the journal outlives its results"


def test_nohup_keeps_a_run_from_ending_with_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_results_that_cannot_be_written_leave_the_journal(
    tiny_path: Path, fake_llama_bench: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "-r", "2", "-m", tiny_path, "--llama-bench", fake_llama_bench],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=300,
            check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("orinbench: standard output: cannot be written")
    (journal,) = (tmp_path / "tinygrad-orin" / "runs").iterdir()
    assert len(journal.read_text().splitlines()) == 2


def test_ctrl_c_during_the_imports_is_silent() -> None:
    """At several moments of the second that the imports take."""
    for delay in (0.15, 0.3, 0.5, 0.8):
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "orinbench", "--help"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:  # from here on our handler is there
            if line.rstrip().endswith(" click.core"):
                break
        time.sleep(delay / 10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode in (0, 130)  # a quick machine has printed the help by then
        assert "Traceback" not in err


def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Ctrl-C is in test_synth; a `timeout` must not leave gigabytes either."""
    words = ["synth", "--shape", "1b", str(tmp_path / "m.gguf")]
    process = subprocess.Popen([sys.executable, "-m", "orinbench", *words], stderr=-1, text=True)
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[1].strip() == "orinbench: interrupted"
    assert process.returncode == 130 and not list(tmp_path.iterdir())


def test_one_goes_through_and_those_behind_it_wait() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Interrupts() as interrupts:
        interrupts.start_holding()
        interrupts.release_and_raise()
        interrupts.start_holding()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.release_and_raise()
        signal.raise_signal(signal.SIGINT)  # one was enough


def test_one_that_python_drops_comes_again(capsys: Capture) -> None:
    """As in the weak references of asyncio's tasks: Python only says that it was ignored."""

    class Freed:
        pass

    def interrupt(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    freed = Freed()
    reference = weakref.ref(freed, interrupt)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        del freed
        assert reference() is None
        start = time.monotonic()
        time.sleep(60)
    assert time.monotonic() - start < 50, "it reached a thread that was not asleep"
    assert interrupts.name == "SIGTERM" and "ignored" not in capsys.readouterr().err


def test_work_that_something_else_cancels_has_not_ended_well() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with (
        Interrupts() as interrupts,
        asyncio.Runner() as loop,
        pytest.raises(asyncio.CancelledError),
    ):
        interrupts.run_coroutine(loop, cancelled())


def test_one_that_comes_again_behind_the_block_ends_nothing(monkeypatch: Patch) -> None:
    """Its handler is gone then, and SIGTERM would end the process without a word."""
    gone: list[bool] = []

    def late(_thread: int, _number: int) -> None:
        time.sleep(0.2)
        gone.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)

    monkeypatch.setattr(signal, "pthread_kill", late)
    with Interrupts() as interrupts:
        interrupts.name = "SIGTERM"
        sys.unraisablehook(SimpleNamespace(exc_type=KeyboardInterrupt))
        time.sleep(0.1)
    assert gone == [False]


def test_an_interrupt_while_a_program_is_ended_leaves_none_behind() -> None:
    """The program takes its time over SIGTERM, and Ctrl-C comes meanwhile."""
    child = ChildProcess(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; sleep 60"], out=subprocess.PIPE
    )
    assert child.read_output(time.monotonic() + 60) == b"ready\n"
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            child.terminate(grace=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert child.exit_status() == -signal.SIGKILL
    child.close()
