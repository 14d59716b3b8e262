import io
import json

from orinbench.benchmark import protocol
from orinbench.benchmark.worker import one_line, serve


def answers(*lines: str, answer: object = None) -> list[protocol.Message]:
    def default(request: protocol.Request) -> protocol.Reply:
        if isinstance(request, protocol.Open):
            raise RuntimeError("no\n  such device")
        return protocol.Loaded(1.0, "general", "all", None)

    replies = io.StringIO()
    serve(io.StringIO("".join(line + "\n" for line in lines)), replies, default)
    return [protocol.decode(line) for line in replies.getvalue().splitlines()]


def test_each_request_has_one_answer_until_the_pipe_closes() -> None:
    load = protocol.encode(protocol.Load("m", 1))
    assert answers(load, load) == [protocol.Loaded(1.0, "general", "all", None)] * 2
    assert answers() == []


def test_an_exception_is_an_answer_and_not_the_end() -> None:
    failed, loaded = answers(
        protocol.encode(protocol.Open()), protocol.encode(protocol.Load("m", 1))
    )
    assert isinstance(failed, protocol.Failed)
    assert failed.error == "RuntimeError: no such device"
    assert "Traceback" in failed.traceback
    assert loaded == protocol.Loaded(1.0, "general", "all", None)


def test_nonsense_is_answered_too() -> None:
    (failed,) = answers(json.dumps({"type": "Nonsense"}))
    assert isinstance(failed, protocol.Failed)
    assert failed.error.startswith("ValueError: not a message")


def test_a_group_says_what_its_members_say() -> None:
    group = ExceptionGroup("no interface", [OSError("no nvidia0"), RuntimeError("no PCI device")])
    assert one_line(group) == "OSError: no nvidia0; RuntimeError: no PCI device"


def test_an_exception_without_a_message_is_its_name() -> None:
    assert one_line(StopIteration()) == "StopIteration"
