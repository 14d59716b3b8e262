"""The command `orinllm` as its user sees it: what it prints where, and its exit codes."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.engine.models import smollm2
from tests.forked import forked

from orinbench.synth import write_synthetic
from orinllm.command.cli import main
from orinllm.command.terminal import print_answer, print_line, print_message, showing_progress
from orinllm.text.answer import Delta

ORINLLM = [sys.executable, "-m", "orinllm.command.cli"]
MODEL = str(smollm2())
PARIS = "The capital of France is Paris."
FRANCE = "What is the capital of France?"
SMALL = ["--context", "512", "--device", "CPU"]
SECONDS = 300


def orinllm(
    *words: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    done = subprocess.run(
        [*ORINLLM, *words], input=stdin, capture_output=True, timeout=SECONDS, check=False,
        env=os.environ | (environment or {}),
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_run_prints_the_answer_and_nothing_else(tmp_path: Path) -> None:
    odd = tmp_path / "[b]\x1b[2J.gguf"  # no markup, and nothing that a terminal obeys
    odd.symlink_to(MODEL)
    code, out, talk = orinllm("run", str(odd), "-p", FRANCE, "--temperature", "0", *SMALL)
    assert (code, out) == (0, f"{PARIS}\n")
    assert talk.startswith(r"[b]\x1b[2J.gguf: cpu path") and "\x1b" not in talk
    assert "cpu path on CPU, context of 512 tokens" in talk
    assert re.search(
        r"^\[7 tokens, [\d.]+ tok/s; prompt of 37 tokens, first token after", talk, re.M
    )
    assert "ended by the model]" in talk


class Answer:
    """A generation, as `print_answer` reads it."""

    tokens, n_cached, n_proposed, n_prompt, finish_reason = (1, 2), 0, 0, 3, "stop"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_obeys_nothing_of_an_answer(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file gets each byte, a terminal escapes for those that it would obey."""
    evil = "a\tb\x1b]52;c;ZXZpbA==\x07\x9b2J\r\N{ZERO WIDTH JOINER}\n"
    shown = evil
    if terminal:
        shown = "a\tb\\x1b]52;c;ZXZpbA==\\x07\\x9b2J\\r\N{ZERO WIDTH JOINER}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_answer(Answer(), [Delta(reasoning="\x1b[2J"), Delta(evil)])
    out, said = capsys.readouterr()
    assert out == f"{shown}\n"
    assert said.startswith("\\x1b[2J\n[2 tokens")
    print_line("\x1b[2J\n")
    print_message("\x1b[2J")
    assert capsys.readouterr() == ("\\x1b[2J\\n\n", "\\x1b[2J\n")


def test_a_terminal_has_a_line_of_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "10"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
    with showing_progress("loading \x1b[2J") as show_progress:
        show_progress("b" * 99)
    print_message("done", dim=True)
    seen = "\r\x1b[Kloading \\\r\x1b[Kbbbbbbbbb\r\x1b[K\x1b[2mdone\x1b[0m\n"
    assert capsys.readouterr().err == seen
    monkeypatch.setenv("NO_COLOR", "1")
    print_message("done", dim=True)
    monkeypatch.setenv("TERM", "dumb")
    with showing_progress("loading"):
        assert capsys.readouterr().err == "done\n"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("guess", [["--lookup"], ["--draft", MODEL]])
def test_guessed_tokens_leave_the_answer_as_it_is(guess: list[str]) -> None:
    words = ["run", MODEL, "-p", FRANCE, "--temperature", "0", *SMALL]
    code, out, talk = orinllm(*words, *guess)
    assert (code, out) == (0, f"{PARIS}\n")
    found = re.search(r"^\[7 tokens, .*tok/s, (\d+) of (\d+) guessed tokens right; ", talk, re.M)
    assert found
    assert 0 < int(found[1]) <= int(found[2])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--lookup", "--draft", MODEL], "--lookup, --draft: two ways to guess tokens; "),
        (["--lookup", "--repeat-penalty", "1.2"], "--lookup: guesses no tokens under penalties; "),
        (["--draft", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["--draft", "mtp"], f"{MODEL}: llama.nextn_predict_layers is missing "),
    ],
)
def test_guesses_that_cannot_be(flags: list[str], why: str) -> None:
    code, out, talk = orinllm("run", MODEL, "-p", "x", *SMALL, *flags)
    assert (code, out) == (2, "")
    (line,) = talk.splitlines()  # and no word of a model that was loaded before
    assert line.startswith(f"orinllm: {why}")


def test_the_form_of_an_answer_and_what_the_template_is_told(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    name = {"type": "string", "maxLength": 12}
    schema.write_text(
        json.dumps({"type": "object", "properties": {"city": name}, "required": ["city"]})
    )
    words = ["run", MODEL, *SMALL, "--temperature", "0", "-n", "40", "-p", FRANCE]
    code, out, talk = orinllm(*words, "--json-schema", f"@{schema}", "--system", "Be brief.")
    assert code == 0 and isinstance(json.loads(out)["city"], str), talk
    penalties = ["--presence-penalty", "0.5", "--frequency-penalty", "0.5"]
    code, out, talk = orinllm(*words, *penalties, "--grammar", 'root ::= "Rome" | "Oslo"')
    assert (code, out) in ((0, "Rome\n"), (0, "Oslo\n")), talk
    code, out, talk = orinllm(*words, "--no-think")
    assert (code, out) == (2, "")
    assert "--no-think: this model's template cannot be told so" in talk


def test_run_reads_standard_input_and_continues_text() -> None:
    words = ["run", MODEL, "-p", "-", "--temperature", "0", *SMALL]
    assert orinllm(*words, stdin=FRANCE.encode())[:2] == (0, f"{PARIS}\n")
    code, out, talk = orinllm(*words, "--raw", "-n", "4", stdin=b"One, two, three,")
    assert (code, out) == (0, " four, five,\n") and "ended by the limit of tokens]" in talk


def test_a_fresh_machine_with_ziglang_alone(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    place = {"PATH": str(tmp_path / "empty"), "XDG_CACHE_HOME": str(tmp_path)}
    words = ["run", MODEL, "-p", FRANCE, "--temperature", "0", *SMALL]
    assert orinllm(*words, environment=place)[:2] == (0, f"{PARIS}\n")


def test_no_compiler_is_one_line(tmp_path: Path) -> None:
    words = ["run", MODEL, "-p", "x", *SMALL]
    place = {"CC": "cc-of-nobody", "XDG_CACHE_HOME": str(tmp_path)}
    code, out, talk = orinllm(*words, environment=place)
    assert (code, out) == (2, "")
    assert talk == "orinllm: CC=cc-of-nobody: no such compiler; leave CC out, or name a clang\n"


def test_questions_may_be_piped() -> None:
    lines = (
        f"{FRANCE}\n\n/system Answer in one word.\n/what\n{FRANCE}\n/reset\n{FRANCE}\n/quit\nno\n"
    )
    words = ["chat", MODEL, "--temperature", "0", "-n", "8", *SMALL]
    code, out, talk = orinllm(*words, stdin=lines.encode())
    first, second, third = out.splitlines()
    assert (code, first) == (0, PARIS)
    assert second == third, "/reset keeps the instruction and forgets the rest"
    assert "instruction set, conversation forgotten" in talk
    assert "/what: no such command; /reset forgets" in talk
    assert ">" not in out


@pytest.mark.parametrize("flags", [["--system", "Be short."], ["--think"], ["--no-think"]])
def test_what_only_a_template_takes_is_not_dropped(flags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_synthetic(path, "tiny", "Q8_0", 0)
    code, out, said = orinllm("run", str(path), "-p", "x", *flags, "--device", "CPU")
    line = f"orinllm: --system, --think: {path} has no chat template, it continues text; "
    assert (code, out) == (2, "") and line in said


def test_a_conversation_that_is_too_long_goes_on_after_reset() -> None:
    lines = f"{'word ' * 100}\n/reset\n{FRANCE}\n"
    words = ["chat", MODEL, "--temperature", "0", "--context", "100", "--device", "CPU"]
    code, out, talk = orinllm(*words, stdin=lines.encode())
    assert (code, out) == (0, f"{PARIS}\n")
    assert re.search(
        r"the prompt has \d+ tokens and leaves no room in a context of 100; /reset", talk
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "nothing.gguf", "-p", "x"], "nothing.gguf: no such file; a GGUF model was"),
        (["run", __file__, "-p", "x"], "test_cli.py: not a GGUF file: it starts with"),
        (["run", MODEL, "-p", " "], "-p: the prompt is empty; a question was expected"),
        (["run", MODEL, "-p", "x", "--top-p", "2"], "--top-p: 2.0 is not from 0 to 1"),
        (["run", MODEL, "-p", "x", "--seed", "-1"], "seed: -1 is not from 0 to"),
        (["run", MODEL, "-p", "x", "--json-schema", "{"], "--json-schema: is no JSON: Expecting"),
        (["run", MODEL, "-p", "x", "--grammar", "@/no"], "--grammar @/no: No such file"),
        (
            ["run", MODEL, "-p", "x", "--grammar", "a", "--json-schema", "{}"],
            "--json-schema, --grammar: two forms of one answer; leave one out",
        ),
        (["run", MODEL, "-p", "x", "--raw", "--no-think"], "--raw: continues text, without --sy"),
        (["run", MODEL, "-p", "x", "-n", "0"], "'-n' / '--max-tokens': 0 is not in the range"),
        (
            ["run", MODEL, "-p", "x", "-c", "0"],
            "a context of 0 tokens (-c) was given; the model was",
        ),
        (["run", MODEL, "-p", "x", "--device", "DISK"], "--device DISK: no such device; CPU, CUD"),
        (["run", MODEL, "-p", "x", "--device", ""], "--device : no such device; CPU, CUDA, NV"),
        (["run", MODEL, "-p", "x", "--what"], "No such option '--what'"),
        (["chat", MODEL, "-ctk", "q8_0"], "-ctk q8_0, -ctv f16: keys and values are of one type;"),
        (["run", MODEL, "-p", "x", "-ctk", "q4_0"], "'q4_0' is not one of 'f16', 'q8_0'"),
        (
            ["run", MODEL, "-p", "x", "--device", "CPU", "-ctk", "q8_0", "-ctv", "q8_0"],
            "keys and values of type q8_0 (-ctk, -ctv) need the fused kernels, which cannot run "
            "(device: CPU is neither CUDA nor NV); take f16",
        ),
        (["show"], "Missing argument 'MODEL'; orinllm show --help lists what there is"),
        (["talk"], "No such command 'talk'; orinllm --help lists what there is"),
        (
            ["compile", MODEL, "--arch", "sm_75", "-o", "x"],
            "--arch sm_75: an architecture from sm_",
        ),
        (["compile", MODEL, "--arch", "compute_87", "-o", "x"], "--arch compute_87: an archi"),
        (["compile", MODEL, "--arch", "sm_120", "-o", "x"], "--arch sm_120: give its number of"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str) -> None:
    code, out, talk = forked(main, words)
    assert (code, out) == (2, "")
    assert talk.startswith("orinllm: ") and talk.count("\n") == 1
    assert says in talk


def test_ctrl_c_during_the_imports_is_silent() -> None:
    """The signal comes once our handler is there, and before there is a command."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "orinllm", "show", MODEL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(" click.core"):
            break
    process.send_signal(signal.SIGINT)
    out, talk = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in talk and "Interrupt" not in talk


def test_nobody_waits_for_a_device_that_hangs() -> None:
    """Ctrl-C ends a start while the device opens, and bad input does."""
    program = """
import sys, time
import orinllm.command.cli, orinllm.gpu.device
def hang(name):
    print("opens", file=sys.stderr, flush=True)
    time.sleep(1e6)
orinllm.gpu.device.open_and_name_device = hang
orinllm.command.cli.main()
"""
    for words, code, says in (("chat", 130, ""), ("run -p ''", 2, "orinllm: -p: the prompt is")):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *shlex.split(words), MODEL],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None and process.stderr.readline() == "opens\n"
        if code == 130:
            process.send_signal(signal.SIGINT)
        try:
            out, talk = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, out) == (code, "")
        assert len(talk.splitlines()) <= 1
        assert talk.startswith(says) and "Traceback" not in talk


def test_a_start_imports_what_it_needs() -> None:
    """A device begins to open before tinygrad is there, and a CPU answers without it."""
    program = f"""
import sys
import orinllm.command.cli
print(*sys.modules.keys() & {{"tinygrad", "numpy", "tokenizers", "rich", "orinllm.gpu.device"}})
import orinllm.model, orinllm.text.conversation
orinllm.model.Model.load({MODEL!r}, device="CPU", context=64).generate("A", max_tokens=1).text
print(*sys.modules.keys() & {{"gguf", "yaml", "sentencepiece", "jinja2", "llguidance", "tinygrad",
    "PIL", "orinllm.other.tinygrad_llm", "orinllm.gpu.launch", "orinllm.server.engine",
    "uvicorn"}})
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert said == b"\n\n"


def test_a_device_that_fails_is_one_line() -> None:
    program = """
import sys
import orinllm.command.cli
from orinllm.cpu.executor import CpuRunner
collect, asked = CpuRunner.wait_for_tokens, []
def fails(self):
    asked.append(self)
    if len(asked) == 3:
        raise RuntimeError("CUDA Error 700, an illegal memory access\\n  SM 3 fault")
    return collect(self)
CpuRunner.wait_for_tokens = fails
orinllm.command.cli.main()
"""
    for words in (["run", "-p", FRANCE], ["chat"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words, MODEL, *SMALL],
            input=FRANCE, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        *_, last = done.stderr.splitlines()
        assert last == "orinllm: CPU: failed: CUDA Error 700, an illegal memory access; SM 3 fault"
        assert "Traceback" not in done.stderr


def test_standard_input_that_is_no_text() -> None:
    code, out, talk = orinllm("run", MODEL, "-p", "-", stdin=b"\xff\xfe")
    assert (code, out) == (2, "")
    assert talk == "orinllm: standard input: is not UTF-8; text was expected\n"


def test_text_is_utf_8_whatever_the_locale() -> None:
    """The model answers in words that it was told to repeat, of two and of four bytes."""
    place = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["--temperature", "0", "-n", "6", *SMALL]
    said = "Grüße, 🙂 and"
    typed = orinllm("run", MODEL, "-p", said, "--raw", *words, environment=place)
    read = orinllm("run", MODEL, "-p", "-", "--raw", *words, stdin=said.encode(), environment=place)
    assert typed[0] == read[0] == 0 and typed[1] == read[1] != "\n"
    code, _, talk = orinllm("chat", MODEL, *words, stdin="Grüße 🙂\n".encode(), environment=place)
    assert code == 0 and "ended by" in talk and "Unicode" not in talk
    code, _, talk = orinllm("chat", MODEL, *words, stdin=b"Gr\xfc\n", environment=place)
    assert code == 2
    assert talk.endswith("orinllm: standard input: is not UTF-8; text was expected\n")


def test_streams_that_are_closed_or_full() -> None:
    words = [*ORINLLM, "run", MODEL, "-p", "x", "-n", "2", *SMALL]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS, check=False
        )
    assert done.returncode == 1
    assert done.stderr.decode().endswith("\norinllm: standard output: No space left on device\n")
    shell = f"{shlex.join([*ORINLLM, 'chat', MODEL, *SMALL])} <&-"
    done = subprocess.run(shell, shell=True, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr


def test_show_says_what_a_model_is() -> None:
    code, out, talk = orinllm("show", MODEL, "--device", "CPU")
    assert (code, talk) == (0, "")
    assert "architecture  llama, 30 layers, width 576" in out
    assert "96.5 MB of weights, as they lie in the file" in out
    assert re.search(r"^blk\.0\.ffn_down\.weight +Q4_1 +576 x 1536 +552,960 +cpu path: ", out, re.M)


class Terminal:
    """A person at `orinllm chat`."""

    def __init__(self) -> None:
        words = [*ORINLLM, "chat", MODEL, "--temperature", "0", *SMALL]
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execvp(words[0], words)
        self.text = ""

    def wait_for(self, pattern: str, again: str = "") -> None:
        """Read until what was printed since the last call holds a pattern.

        A person who sees nothing for 20 s presses the key `again` once more.
        """
        start = pressed = time.monotonic()
        while not re.search(pattern, self.text):
            assert time.monotonic() - start < SECONDS, self.text
            if again and time.monotonic() - pressed > 20:
                self.type(again)
                pressed = time.monotonic()
            if select.select([self._end], [], [], 1)[0]:
                self.text += os.read(self._end, 4096).decode(errors="replace")
        self.text = re.split(pattern, self.text, maxsplit=1)[1]

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    try:
        os.kill(opened.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def test_a_person_stops_an_answer_and_goes_on(terminal: Terminal) -> None:
    terminal.wait_for("Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("Count from one to one hundred, in words.\n")
    # An answer has begun when a line follows what was typed.
    terminal.wait_for(r"in words\.(\s|\x1b\[\?2004l)+\w")
    terminal.type("\x03")
    terminal.wait_for("ended by Ctrl-C", again="\x03")
    terminal.wait_for("> ")
    # Python's readline loses a Ctrl-C that comes after the prompt and before it waits for keys,
    # until the next key: a person sees what was typed first.
    terminal.type("a line that is not wanted")
    terminal.wait_for("not wanted")
    terminal.type("\x03")
    terminal.wait_for("> ", again="\x03")
    terminal.type(f"/reset\r{FRANCE}\r")
    terminal.wait_for(re.escape(PARIS))
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
