import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from orinbench.measure.backends.backend import NonfiniteLogitsError
from orinbench.measure.backends.worker import error_line, serve_calls
from orinbench.measure.backends.worker_process import (
    DONE,
    FAILED,
    NO_NUMBERS,
    SIZE_BYTES,
    WorkerProcess,
)


class Served:
    """An object that a worker serves."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.made = self
        self.say = say

    def double(self, number: int) -> int:
        self.say(f"doubling {number}")
        return 2 * number

    def fail(self) -> None:
        raise RuntimeError("no\n  such device")

    def nothing(self) -> None:
        raise NonfiniteLogitsError("logits are none")


def answers(*calls: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The answers to (name, arguments...), until the pipe closes."""
    asked = b"".join(pickle.dumps((name, arguments)) for name, *arguments in calls)
    out = io.BytesIO()
    serve_calls(io.BytesIO(asked), out, Served)
    out.seek(0)
    found = []
    while size := out.read(SIZE_BYTES):
        found.append(pickle.loads(out.read(int.from_bytes(size))))
    return found


def test_an_exception_is_an_answer_and_not_the_end() -> None:
    failed, none, _, done = answers(("fail",), ("nothing",), ("double", 1))
    assert failed == (FAILED, "RuntimeError: no such device") and done == (DONE, 2)
    assert none == (NO_NUMBERS, "logits are none")


def test_a_group_says_what_its_members_say() -> None:
    group = ExceptionGroup("no interface", [OSError("no nvidia0"), RuntimeError("no PCI device")])
    assert error_line(group) == "OSError: no nvidia0; RuntimeError: no PCI device"


def test_an_exception_without_a_message_is_its_name() -> None:
    assert error_line(StopIteration()) == "StopIteration"


def test_what_the_runner_prints_is_no_answer_and_it_stays() -> None:
    script = """if True:
    import sys, types
    from orinbench.measure.backends.backend import NonfiniteLogitsError
    class TinygradRunner:
        calls = 0
        def nothing(self):
            raise NonfiniteLogitsError("none")
        def __init__(self, say): pass
        def count(self):
            print("noise", flush=True)
            self.calls += 1
            return self.calls
    name = "orinbench.measure.backends.tinygrad_runner"
    sys.modules[name] = types.SimpleNamespace(TinygradRunner=TinygradRunner)
    from orinbench.measure.backends.worker import main
    main()
    """
    with WorkerProcess({}, 60, (sys.executable, "-c", script)) as process:
        runner: Any = process.runner
        with pytest.raises(NonfiniteLogitsError, match="none"):
            runner.nothing()
        assert [runner.count(), runner.count()] == [1, 2]
