"""The command line as a user types it: runs, exit codes, one-line errors, reports, traces."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import nvgpusim
from nvgpusim import cli
from nvgpusim.errors import SimError
from nvgpusim.options import Options

KERNEL = Path(__file__).parents[1]
SIMULATOR = str(Path(nvgpusim.__file__).parent.parent)
LIFE = """
import os, sys
sys.path.insert(0, {here!r})
import rawclient as rc
board = rc.Board()
board.buffer(8192).mem[0] = 1
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of the tests stay out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def script(tmp_path: Path, text: str, name: str = "script.py") -> str:
    """A client's source file."""
    path = tmp_path / name
    path.write_text(LIFE.format(here=str(KERNEL)) + text)
    return str(path)


@contextmanager
def started(*command: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """Python with this command line; nothing that it started outlives the block."""
    env = os.environ | {"PYTHONPATH": SIMULATOR} | kwargs.pop("env", {})
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, *command], env=env, start_new_session=True, **pipes, **kwargs
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def sim(*args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """`python -m nvgpusim args`."""
    with started("-m", "nvgpusim", *args, **kwargs) as process:
        out, err = process.communicate(timeout=400)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def test_a_script_runs_and_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    run = sim(
        "--report", str(report), "--", "python", script(tmp_path, "print('done', board.veid)")
    )
    assert (run.returncode, run.stdout) == (0, "done 1\n")
    for line in ("NVMAP_CREATE_64 1", "ctrl 1", "leak  1 ctrl fd", "peak 8.0 KiB"):
        assert line in run.stderr
    shown = sim("report", str(report))
    assert shown.returncode == 0 and "never  map.batch:" in shown.stdout
    assert sim("report").stdout == shown.stdout, "the last report is kept"
    (entry,) = [json.loads(line) for line in report.read_text().splitlines()]
    assert entry["counts"]["ioctl ALLOC_AS"] == 1 and entry["rules"]["map.holds"] == 1


def test_quiet_and_status(tmp_path: Path) -> None:
    run = sim("--quiet", "--", script(tmp_path, "board.close(); sys.exit(5)"))
    assert (run.returncode, run.stderr) == (5, "")


def test_a_clean_teardown_has_no_leaks(tmp_path: Path) -> None:
    assert "leaks  none" in sim("--", script(tmp_path, "board.close()")).stderr


def test_modules_code_and_console_scripts(tmp_path: Path) -> None:
    probe = "import os; print(os.path.exists('/dev/nvmap'))"
    assert sim("--quiet", "--", "-c", probe).stdout == "True\n"
    assert sim("--quiet", "--", "python", "-c", probe).stdout == "True\n"
    assert "JSON" in sim("--quiet", "--", "-m", "json.tool", "--help").stdout
    test = tmp_path / "test_it.py"
    test.write_text("import os\ndef test_it():\n  assert os.path.exists('/dev/nvgpu/igpu0/ctrl')\n")
    run = sim("--quiet", "--", "pytest", "-q", "-p", "no:cacheprovider", str(test), cwd=tmp_path)
    assert run.returncode == 0 and "1 passed" in run.stdout
    assert "opened no device" in sim("--", "-c", "pass").stderr


def test_child_processes_have_a_board_of_their_own(tmp_path: Path) -> None:
    text = """
import subprocess
if len(sys.argv) == 1:
    print(subprocess.run([sys.executable, __file__, "child"]).returncode, os.getpid() > 0)
"""
    run = sim("--", script(tmp_path, text))
    assert run.stdout == "0 True\n" and run.stderr.count("ALLOC_AS 1") == 2


def test_forked_workers_are_reported(tmp_path: Path) -> None:
    text = """
import multiprocessing
def work(i):
    other = rc.Board()
    other.close()
    return i
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""
    run = sim("--", script(tmp_path, text))
    assert run.stdout == "[1, 2]\n"


def test_the_real_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.marker = 7\n")
    env = {"PYTHONPATH": f"{SIMULATOR}{os.pathsep}{tmp_path}"}
    code = "import sys, os; print(sys.marker, os.path.exists('/dev/nvmap'))"
    assert sim("--quiet", "--", "-c", code, env=env).stdout == "7 True\n"


def test_the_compile_cache_lies_beside_its_ptx(tmp_path: Path) -> None:
    code = "import os; print(os.environ['CACHEDB'])"
    env = {"NVGPUSIM_CACHE": str(tmp_path)}
    assert sim("--quiet", "--", "-c", code, env=env).stdout == f"{tmp_path}/tinygrad-2.db\n"
    assert sim("--quiet", "--", "-c", code, env=env | {"CACHEDB": "mine"}).stdout == "mine\n"


def test_a_crash_is_named(tmp_path: Path) -> None:
    run = sim("--", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert run.returncode == 139 and "ended by SIGSEGV" in run.stderr
    assert "no report" in run.stderr and "Traceback" not in run.stderr


def test_an_exception_still_gives_a_report(tmp_path: Path) -> None:
    run = sim("--", script(tmp_path, "rc.alloc_as(board.ctrl, 0, 0)"))
    assert run.returncode == 1 and "OSError" in run.stderr and "as.range" in run.stderr


def test_strict(tmp_path: Path) -> None:
    clean = script(tmp_path, "board.close()")
    assert sim("--strict", "--quiet", "--", clean).returncode == 0
    unknown = script(tmp_path, "\ntry: rc.call(board.ctrl, 'G', 37, '16x')\nexcept OSError: pass")
    assert sim("--strict", "--quiet", "--", unknown).returncode == 3
    assert sim("--quiet", "--", unknown).returncode == 0
    failing = script(tmp_path, "\nrc.alloc_as(board.ctrl, end=0xFFFFE00000)")
    assert sim("--strict", "--quiet", "--", failing).returncode == 3


def test_an_injection_that_never_fires_is_told(tmp_path: Path) -> None:
    flags = ["--inject", "EBUSY@ALLOC_AS:n=9", "--inject", "EIO@MMAP:n=3", "--quiet"]
    buffer = "from contextlib import suppress\nwith suppress(OSError): board.buffer(4096)"
    run = sim(*flags, "--strict", "--", script(tmp_path, buffer))
    line = "nvgpusim: --inject EBUSY@ALLOC_AS:n=9 never fired: 1 calls matched"
    assert [text for text in run.stderr.splitlines() if "never fired" in text] == [line]
    assert run.returncode == 1
    assert sim(*flags, "--", script(tmp_path, buffer)).returncode == 0
    none = sim("--inject", "EBUSY@*", "--strict", "--", "-c", "pass")
    assert none.returncode == 1 and "never fired: 0 calls matched" in none.stderr


def test_a_gpu_error_is_told_once_and_by_the_programs_own_line(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "library.py"
    library.parent.mkdir()
    library.write_text(
        "def submit(channel):\n"
        "    exec('channel.submit(0x1000000, 1)', {'channel': channel})\n"
        "    import time\n"
        "    while channel.error() is None: time.sleep(0.001)\n"
    )
    text = f"""
sys.path.insert(0, {str(library.parent)!r})
import library
channel = board.channel()
library.submit(channel)  # the program's own line
"""
    path = script(tmp_path, text)
    run = sim("--", path)
    here = Path(path).read_text().splitlines().index(text.splitlines()[-1]) + 1
    assert run.stderr.count("channel 511, TSG 511: dead") == 1
    (submitted,) = (x.strip() for x in run.stderr.splitlines() if "submitted:" in x)
    assert submitted.startswith(f"submitted: {path}:{here} in <module>, through {library}:")
    assert "    fault  GPU error 31: " in run.stderr
    assert "channel 511, TSG 511: dead" in sim("report").stdout


def test_injection_and_seed(tmp_path: Path) -> None:
    run = sim("--inject", "ENOMEM@ALLOC_AS", "--", script(tmp_path, ""))
    assert "Cannot allocate memory" in run.stderr and "injected  ENOMEM at ALLOC_AS" in run.stderr


def test_what_the_gpu_may_do_late(tmp_path: Path) -> None:
    report, path = tmp_path / "report", script(tmp_path, "board.close()")
    for flags, prefetch, write_back in (
        ((), True, False),
        (("--no-prefetch", "--write-back"), False, True),
    ):
        assert sim("--quiet", "--report", str(report), *flags, "--", path).returncode == 0
        options = json.loads(report.read_text())["options"]
        assert (options["prefetch"], options["write_back"]) == (prefetch, write_back)


def test_a_report_says_how_to_repeat_its_run(tmp_path: Path) -> None:
    report, path = tmp_path / "report", script(tmp_path, "board.close()", "my script.py")
    options = ["--delay", "1.5", "--place", "random", "--inject", "EINTR@*:p=0.01", "--seed", "7"]
    options += ["--inject", "EBUSY@GET_FD", "--no-prefetch", "--strict"]
    first = sim("--report", str(report), *options, "--", path)
    (line,) = [n for n in first.stderr.splitlines() if n.startswith("    again  nvgpusim ")]
    again = shlex.split(line)[2:]
    assert again[again.index("--") :] == ["--", path] and set(options) <= set(again)
    options_before = json.loads(report.read_text())["options"]
    second = sim("--report", str(report), *again)
    assert second.returncode == first.returncode
    assert json.loads(report.read_text())["options"] == options_before
    plain = sim("--", path).stderr
    assert f"    again  nvgpusim -- {shlex.quote(path)}\n" in plain


def test_profiles_and_boards(tmp_path: Path) -> None:
    call = "rc.call(board.ctrl, 'G',"
    text = f"print({call} 5, 'QQ', 0, 0)[0], {call} 18, 'II', 0, 0)[0])"
    path = script(tmp_path, text)
    assert sim("--quiet", "--board", "nano4", "--", path).stdout == "328 4\n"
    assert sim("--quiet", "--profile", "r38", "--", path).stdout == "336 16\n"
    assert sim("--quiet", "--profile", "r39", "--", path).stdout == "344 16\n"
    assert sim("--quiet", "--profile", "r35", "--", path).returncode == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no command: expected nvgpusim [options] -- python3 script.py"),
        (("--nonsense",), "--nonsense"),
        (("--profile", "r37", "--", "x.py"), "'r37' is not one of 'r35', 'r36', 'r38', 'r39'"),
        (("--delay", "-1", "--", "x.py"), "'--delay'"),
        (("--inject", "WRONG", "--", "-c", "pass"), "unknown fault 'WRONG'"),
        (("--", "/bin/true"), "/bin/true is not a Python program"),
        (("--", "no-such-program"), "no-such-program: command not found"),
        (("--", "absent.py"), "absent.py: no such file"),
        (("--report", "/absent/report", "--", "-c", "pass"), "/absent/report: cannot be written"),
        (("--", "python", "-I", "-c", "pass"), "never loaded the simulator"),
        (("report", "/absent"), "/absent: No such file or directory"),
        (("report",), "no run yet"),
        (("replay", "/absent"), "/absent: No such file or directory"),
        (("replay",), "Missing argument 'FILE'"),
        (("recorder", "/absent/x.pyz"), "/absent/x.pyz: cannot be written"),
    ],
)
def test_bad_use_is_one_line(
    args: tuple[str, ...], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(list(args)) == 2
    out, err = capfd.readouterr()
    assert err.startswith("nvgpusim: error: ") and says in err
    assert len(err.splitlines()) == 1 and out == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a report"),
        ("[]", "not a report of this version"),
        ('{"nvgpusim-report": 99}', "format 1"),
        ("", "an empty report"),
    ],
)
def test_bad_reports(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report"
    path.write_text(text)
    assert cli.main(["report", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1


def test_no_memfd_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert cli.main(["--", "-c", "pass"]) == 2
    assert "this machine has no memfd" in capsys.readouterr().err


def test_help_names_the_other_commands() -> None:
    run = sim("--help")
    assert run.returncode == 0 and "  replay FILE " in run.stdout
    rules = sim("rules").stdout.splitlines()
    assert any(line.startswith("getfd.full\tBad address\t") for line in rules)


def test_interrupts_reach_the_program(tmp_path: Path) -> None:
    path = script(tmp_path, "\nimport time\nprint('up', flush=True)\ntime.sleep(300)")
    with started("-m", "nvgpusim", "--", path) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)  # to the end of what writes there: of the program too
        assert process.returncode == 143


STARTING = """
import os, signal, subprocess, sys
from nvgpusim import cli
signal.signal(signal.SIGHUP, signal.SIG_IGN)
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for number in (signal.SIGHUP, {number}): os.kill(os.getpid(), number)
subprocess.Popen = Popen
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_while_the_program_starts_is_kept_for_it() -> None:
    launcher = STARTING.format(number=int(signal.SIGTERM))
    with started("-c", launcher, "--", "-c", "import time; time.sleep(300)") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "no report: the process was killed" in err


def test_a_signal_that_is_ignored_is_so_for_the_program_too() -> None:
    show = "import signal; print(signal.getsignal(signal.SIGHUP).name)"
    with started("-c", STARTING.format(number=0), "--", "-c", show) as process:
        out, _ = process.communicate(timeout=120)
    assert (out, process.returncode) == ("SIG_IGN\n", 0)


def test_a_run_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    os.mkfifo(path)
    alive = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def give_up(*_: object) -> None:
        raise TimeoutError

    code = f"import os, time; held = open({str(path)!r}, 'w')\n"
    code += f"os.kill({os.getpid()}, {int(signal.SIGUSR1)}); time.sleep(120)"
    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeoutError):
            sim("--", "-c", code)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert select.select([alive], [], [], 60)[0], "nobody holds it any more"
    os.close(alive)


def test_python_command() -> None:
    assert cli.resolve_python_argv(("-m", "x"))[0] == sys.executable
    assert cli.resolve_python_argv((sys.executable, "x"))[0] == sys.executable
    with pytest.raises(SimError):
        cli.resolve_python_argv(())


def test_options_round_trip() -> None:
    options = Options(inject=("ENOMEM@*",), seed=3, order=True)
    assert Options.from_json(options.to_json()) == options
    assert options.sms == 16 and Options(board="nano4").ram_bytes == 4 << 30
