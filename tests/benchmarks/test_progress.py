import io
import sys
import time

from tests.benchmarks.orinbench_command import Capture, Patch

from orinbench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use(talk: Progress) -> None:
    talk.show_phase("opening tinygrad:CPU")
    talk.show_detail("a detail")
    talk.print_line("a line that stays")
    talk.finish_step("opened")
    talk.announce_steps("1 round of 2 tests", 300.0, 2)
    talk.show_phase("tinygrad:CPU: process 1 of 2")
    talk.finish_step("tinygrad:CPU tg16")
    talk.finish_step("tinygrad:CPU pp32")
    talk.close()


def test_the_rest_is_told_now_and_then(capsys: Capture, monkeypatch: Patch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    talk = Progress()
    talk.announce_steps("20 rounds", 0.5, 20)
    for _ in range(20):
        now[0] += 3.0
        talk.finish_step("tinygrad:CPU tg16")
    assert capsys.readouterr().err.splitlines() == [
        "orinbench: 20 rounds",
        "orinbench: 20%, about 48 s left: tinygrad:CPU tg16",
        "orinbench: 40%, about 36 s left: tinygrad:CPU tg16",
        "orinbench: 60%, about 24 s left: tinygrad:CPU tg16",
        "orinbench: 80%, about 12 s left: tinygrad:CPU tg16",
        "orinbench: 100%, about 0 s left: tinygrad:CPU tg16",
    ]


def test_details_are_lines_now_and_then(capsys: Capture, monkeypatch: Patch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    talk = Progress()
    talk.show_phase("checking")
    for token in range(1, 31):
        now[0] += 1.0
        talk.show_detail(f"token {token}")
    said = capsys.readouterr().err.splitlines()
    assert said == [f"orinbench: {t}" for t in ("checking", "token 10", "token 20", "token 30")]


def test_progress_adds_a_line_for_each_repetition(capsys: Capture) -> None:
    use(Progress(every=True))
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "orinbench: tinygrad:CPU: process 1 of 2",
        "orinbench: 50%, about 0 s left: tinygrad:CPU tg16",
        "orinbench: 100%, about 0 s left: tinygrad:CPU pp32",
    ]


def test_on_a_terminal_the_last_line_changes(monkeypatch: Patch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    use(Progress())
    lines = terminal.getvalue().split("\n")
    assert [line.rpartition("\x1b[K")[2] for line in lines] == [
        "orinbench: a line that stays",
        "orinbench: 1 round of 2 tests; at least 5 min",
        "",  # nothing is left behind the last line
    ]
    shown = terminal.getvalue().split("\r\x1b[K")
    assert "a detail" in shown and "100%, about 0 s lef" in shown, "a long one is cut"
