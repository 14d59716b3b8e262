"""The command as a user types it: what it prints where, and its exit codes."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from tests.benchmarks.orinbench_command import Build, Capture, Patch, orinbench, refused

from orinbench.cli import main
from orinbench.judge.schema import FIELDS
from orinbench.measure import command as llama_bench
from orinbench.measure import models_and_backends
from orinbench.measure.backends.llama_cpp import LlamaCppBackend
from orinbench.measure.backends.tinygrad_backend import TinygradBackend
from orinbench.measure.llama_flags import LlamaBenchOptions
from orinbench.measure.plan import BACKEND_NAMES, Case, Lane
from orinbench.options import with_options
from orinbench.progress import Progress
from orinboard.files import Roots
from orinboard.replay import TreeOnDisk

pytestmark = pytest.mark.usefixtures("known_bandwidth")
run = partial(orinbench, "llama-bench")


def test_results_go_to_stdout_and_talk_to_stderr(bench: list[str], capsys: Capture) -> None:
    assert run(*bench, "-p", "8,16", "-n", "4", "-r", "2", "-o", "jsonl", "-oe", "csv") == 0
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["test"] for record in records] == ["pp8", "pp16", "tg4"]
    assert all(record["samples_ns"] == [1_000_000] * 2 for record in records)
    assert all(record["synthetic"] for record in records)  # the file says so, whoever named it
    assert "orinbench: 2 rounds of 3 tests, spread over 2 fresh processes" in captured.err
    table = captured.err[captured.err.index('"build_commit"') :]
    rows = list(csv.DictReader(io.StringIO(table)))
    assert list(rows[0]) == list(FIELDS)
    assert [row["test"] for row in rows] == ["pp8", "pp16", "tg4"]


def test_knobs_reach_llama_cpp_and_multiply_its_rows(
    bench: list[str], fake_llama_bench: Path, capsys: Capture
) -> None:
    flags = ["-b", "128,256", "-fa", "on", "-ngl", "-1", "--prio", "1", "--no-warmup"]
    assert run(*bench, "-p", "8", "-n", "0", "-r", "1", "-o", "json", *flags) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 2
    log = [json.loads(line) for line in fake_llama_bench.with_name("argv.log").open()]
    assert {tuple(call[-6:]) for call in log[1:]} == {
        ("-b", "128", "-ngl", "-1", "-fa", "on"),
        ("-b", "256", "-ngl", "-1", "-fa", "on"),
    }
    assert all("--no-warmup" in call and "--prio" in call for call in log)


def test_a_failing_backend_is_a_row_and_exit_code_1(
    bench: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    opened = LlamaCppBackend.open_and_identify

    def open_then_break(self: LlamaCppBackend) -> Any:
        identity = opened(self)
        monkeypatch.setenv("FAKE_LLAMA_BENCH", "fail")
        return identity

    monkeypatch.setattr(LlamaCppBackend, "open_and_identify", open_then_break)
    assert run(*bench, "-p", "8", "-n", "4", "-r", "2") == 1
    captured = capsys.readouterr()
    reason = "llama-bench ended with status 1: llama_bench: error: failed to load model 'x'"
    assert f"- llama.cpp pp8 failed: {reason}." in captured.out
    assert f"orinbench: llama.cpp: pp8: {reason}" in captured.err


def test_nothing_opens_is_exit_code_2(
    bench: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_BENCH", "silent")
    assert run(*bench) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("orinbench: --backend: none opens (llama.cpp:")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-r", "0"], "Invalid value for '-r' / '--repetitions': 0 is not in the range x>=1"),
        (["-r", "x"], "Invalid value for '-r' / '--repetitions': 'x' is not a valid integer"),
        (["-p", "5-1"], "-p 5-1: the range 5-1 is empty"),
        (["-n", "a"], "-n a: 'a' is neither a number nor a range"),
        (["-pg", "5"], "-pg 5: not a pair of numbers"),
        (["-p", "0", "-n", "0"], "-p 0 -n 0: nothing to run"),
        (["-d", "-1"], "-d -1: -1 is too small"),
        (["-ub", "0"], "-ub 0: 0 is too small; the least is 1"),
        (["-o", "xml"], "Invalid value for '-o' / '--output': 'xml' is not one of 'csv', "),
        (["-oe", "xml"], "Invalid value for '-oe' / '--output-err': 'xml' is not one of"),
        (["-p", "100000"], "pp100000 needs a context of 100000 tokens;"),
        (["--llama-bench", "/nowhere"], "--llama-bench /nowhere: no such file"),
        (["-m", "/nowhere.gguf"], "/nowhere.gguf: "),
        (["--shape", "tiny"], "--shape tiny: is of the synthetic model that is made without -m;"),
        (["--quant", "Q6_K"], "--quant Q6_K: is of the synthetic model that is made without -m;"),
        (["--ttft", "x"], "--ttft x: 'x' is neither a number nor a range"),
        (["--ttft", "512"], "--ttft: a text of 512 tokens leaves no room for an answer"),
        (["--path", "fast"], "Invalid value for '--path'"),
        (["--nonsense"], "No such option '--nonsense'"),
        (["-rpcx"], "No such option '-rpcx'"),
        (["-r5"], "No such option '-r5'"),
        (["-hff", "x.gguf"], "-hff: not read here; name the file's type, as in -hf OWNER/REPO"),
        (["-hft", "x"], "-hft: not read here; set HF_TOKEN"),
        (["-rpc", "host"], "-rpc host: 'host' is no HOST:PORT"),
        (["--numa", "x"], "Invalid value for '--numa': 'x' is not one of 'distribute', "),
        (["--prio", "9"], "Invalid value for '--prio': 9 is not in the range -1<=x<=3"),
        (["-fa", "maybe"], "-fa maybe: 'maybe' is none of on, off, auto, 0, 1"),
        (["-sm", "x"], "-sm x: 'x' is none of none, layer, row, tensor"),
        (["-ctk", "q9"], "-ctk q9: 'q9' is none of f32, f16, bf16,"),
        (["-nkvo", "2"], "-nkvo 2: 2 is too large; the most is 1"),
        (["--poll", "101"], "--poll 101: 101 is too large; the most is 100"),
        (["-C", "zz"], "-C zz: 'zz' is no number in hexadecimal"),
        (["-ts", "1/x"], "-ts 1/x: '1/x' is no list of shares"),
        (["-lm", "x"], "-lm x: 'x' is none of auto, none, mmap, mlock, mmap+mlock, dio"),
        (["-lzm", "x"], "-lzm x: 'x' is none of on, auto, off"),
        (["--offline", "--delay", "-1"], "Invalid value for '--delay'"),
        (["--delay", "nan"], "Invalid value for '--delay': nan is not a finite number"),
        (["--timeout", "inf"], "Invalid value for '--timeout': inf is not a finite number"),
        (["-p"], "Option '-p' requires an argument"),
        (["--require", "cold"], "--require cold: no condition is called 'cold': there are maxn"),
        (["--textfile", "/nowhere"], "--textfile /nowhere: no such directory"),
        (["-npl", "33"], "-npl 33: 33 is too large; the most is 32"),
        (["-npl", "2", "-n", "0"], "-npl 2: sequences decode -n tokens each, and -n is 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    bench: list[str], capsys: Capture, arguments: list[str], says: str
) -> None:
    assert refused(capsys, "llama-bench", *bench, *arguments).startswith(says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["CPU", "-npl", "1,9"], "-npl 9: tinygrad:CPU decodes at most 8 at once on the cpu path"),
        (
            ["CUDA", "-npl", "2", "--path", "general"],
            "-npl 2: tinygrad:CUDA decodes at most 1 at once on the general path",
        ),
        (["CPU", "-ctk", "q4_0"], "-ctk, -ctv q4_0: tinygrad keeps keys and values as f16, and as"),
        (["CPU", "-ctk", "q8_0", "-ctv", "q8_0"], "-ctk, -ctv q8_0: tinygrad keeps keys and"),
        (["CUDA", "-ctk", "q8_0"], "-ctk, -ctv: keys and values are of one type in tinygrad; give"),
    ],
)
def test_what_tinygrad_alone_cannot_do_is_refused(
    tiny_path: Path, capsys: Capture, arguments: list[str], says: str
) -> None:
    device, *more = arguments
    words = ("llama-bench", "-m", str(tiny_path), "--backend", f"tinygrad:{device}", *more)
    assert refused(capsys, *words).startswith(says)


def test_devices_and_versions_are_listed(
    fake_llama_bench: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    fake_llama_bench.write_text("#!/bin/sh\necho 'Available devices:'\necho '  CUDA0: H200'\n")
    reasons = {"NV": "no GPU"}
    monkeypatch.setattr("orinbench.measure.llama_flags.open_failure_reason", reasons.get)
    assert run("--list-devices", "--llama-bench", str(fake_llama_bench)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tinygrad:NV: does not open: no GPU",
        "tinygrad:CUDA: opens",
        "tinygrad:CPU: opens",
        "llama.cpp:",
        "  Available devices:",
        "  CUDA0: H200",
    ]
    assert run("--version") == 0
    assert re.match(r"orinbench \d+\.\d+.*\ntinygrad 0\.13\.0", capsys.readouterr().out)


def test_an_unknown_backend_lists_what_there_is_and_why_not(
    bench: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    reasons = {"NV": "no GPU", "CUDA": "no libcuda"}
    monkeypatch.setattr(models_and_backends, "open_failure_reason", reasons.get)
    line = refused(capsys, "llama-bench", *bench, "--backend", "tinygrad:TPU")
    assert line == (
        "--backend tinygrad:TPU: unknown; there are "
        "tinygrad:NV (does not open: no GPU), tinygrad:CUDA (does not open: no libcuda), "
        "tinygrad:CPU, llama.cpp"
    )
    assert all(name in line for name in BACKEND_NAMES)


def test_llama_cpp_without_a_binary(
    tiny_path: Path, no_llama_bench: None, monkeypatch: Patch, capsys: Capture
) -> None:
    assert run("-m", str(tiny_path), "--backend", "llama.cpp") == 2
    assert "no llama-bench on PATH; name it with --llama-bench" in capsys.readouterr().err
    monkeypatch.setattr(models_and_backends, "open_failure_reason", lambda device: f"no {device}")
    assert run("-m", str(tiny_path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("orinbench: --backend: nothing opens: tinygrad:NV (does not open: no")


def test_the_default_is_the_best_device_that_opens_and_llama_cpp(
    fake_llama_bench: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(models_and_backends, "open_failure_reason", {"NV": "no GPU"}.get)
    backends, binary = models_and_backends.choose_backends([], str(fake_llama_bench), Progress())
    assert backends == ["tinygrad:CUDA", "llama.cpp"]
    assert binary == fake_llama_bench


def options(**given: Any) -> LlamaBenchOptions:
    """The options as click gives them for a command line of nothing, but for these."""
    seen: list[LlamaBenchOptions] = []
    click.command()(with_options(LlamaBenchOptions)(seen.append)).main([], standalone_mode=False)
    knobs = {name: given.pop(name, value) for name, value in seen[0].knobs.items()}
    return replace(seen[0], **given, knobs=knobs)


def test_a_beam_search_is_not_repeated_for_a_cold_start(
    tiny_path: Path, monkeypatch: Patch
) -> None:
    plan = Lane("tinygrad:CPU", (Case(0, 1, 0),), tiny_path)

    def made(**given: Any) -> TinygradBackend:
        backend = llama_bench.make_backend(plan, None, options(**given))
        assert isinstance(backend, TinygradBackend)
        backend.close()
        return backend

    def cold(**given: Any) -> bool:
        return made(**given).cold_start

    monkeypatch.delenv("JITBEAM", raising=False)
    monkeypatch.delenv("BEAM", raising=False)
    assert cold() and not cold(cold_start=False)
    monkeypatch.setenv("JITBEAM", "2")
    assert not cold() and cold(cold_start=True)
    assert made(path_="general").general and not made().general


def test_tinygrad_against_llama_cpp_for_real(
    fake_llama_bench: Path,
    fake_llama_server: Path,
    tiny_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SECONDS", "0.1")
    arguments = [
        *("-m", str(tiny_path), "--llama-bench", str(fake_llama_bench), "-ctk", "q8_0"),
        *("--backend", "tinygrad:CPU,llama.cpp", "-p", "40", "-n", "4", "-d", "8", "-r", "3"),
        *("--processes", "2", "--no-cold-start"),
    ]
    assert run(*arguments, "-o", "json", "-oe", "md", "--check") == 0
    captured = capsys.readouterr()
    records = json.loads(captured.out)
    assert [(record["backend"], record["test"]) for record in records] == [
        (backend, test)
        for backend in ("tinygrad:CPU", "llama.cpp")
        for test in ("pp40 @ d8", "tg4 @ d8", "ttft40")
    ]
    for record in records[2::3]:
        assert (record["n_prompt"], record["n_gen"], record["n_depth"]) == (40, 0, 0)
        assert len(record["samples_ns"]) == 3
        assert record["excluded"] == "process start, model load, warm-up"
        assert record["extra"]["first_text_ms"] == pytest.approx(40e3 / record["median_ts"])
        assert 40e9 / max(record["samples_ns"]) <= record["median_ts"]
    theirs = records[5]
    assert theirs["extra"]["first_text_ms"] > 100 > theirs["extra"]["http_ms"] > 0
    assert (theirs["type_k"], theirs["build_commit"]) == ("q8_0", "0c1e570")
    assert "| first text |" in captured.err and "of ttft40: process start" in captured.err
    ours = records[1]
    assert len(ours["samples_ns"]) == 3 and ours["error"] is None
    assert ours["processes"] == [0, 0, 1] and len(ours["ttft_warm_samples_s"]) == 2
    assert ours["kernels_per_token"] == 1  # a token on a CPU is one program
    assert ours["roofline_percent"] > 0
    assert ours["ttft_cold_s"] is None and ours["ttft_warm_s"] > 0
    assert ours["check"]["passed"] is True
    assert ours["ignored_flags"] == ["-ctk q8_0"]
    assert ours["environment"]["tinygrad_series"] == ours["build_commit"]
    assert not any(warning["kind"] == "compiled_while_timed" for warning in ours["warnings"])
    assert ours["comparisons"][0]["baseline"] == "llama.cpp"
    assert records[4]["ignored_flags"] == []
    assert "too few processes for a verdict: tinygrad:CPU is" in captured.err


def test_without_a_model_there_is_a_synthetic_one(
    fake_llama_bench: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["--shape", "tiny", "--backend", "llama.cpp", "--no-check", "-r", "1"]
    assert run(*arguments, "--llama-bench", str(fake_llama_bench)) == 0
    captured = capsys.readouterr()
    assert "The model is synthetic" in captured.out
    assert "no -m: synthetic model tiny Q6_K (random weights)" in captured.err
    assert "(--ttft) left out: a text of 512 tokens leaves no room" in captured.err
    assert list((tmp_path / "cache").rglob("*.gguf"))
    assert run(*arguments, "--quant", "Q9_Z", "--llama-bench", str(fake_llama_bench)) == 2
    assert "Q9_Z" in capsys.readouterr().err.splitlines()[-1]


def test_an_unexpected_crash_keeps_what_was_measured(
    bench: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    measure = LlamaCppBackend.time_repetition

    def crash(self: LlamaCppBackend, case: Any, seed: int) -> Any:
        if seed == 1:
            raise ZeroDivisionError
        return measure(self, case, seed)

    monkeypatch.setattr(LlamaCppBackend, "time_repetition", crash)
    with pytest.raises(ZeroDivisionError):
        main(["llama-bench", *bench, "-p", "8", "-n", "0", "-r", "3", "-o", "json"])
    (record,) = json.loads(capsys.readouterr().out)
    assert record["partial"] is True and len(record["samples_ns"]) == 1


def test_a_reader_that_leaves_is_no_traceback(bench: list[str]) -> None:
    command = [sys.executable, "-m", "orinbench", "llama-bench", *bench, "-p", "8", "-r", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.wait(60)
    assert "Traceback" not in error and "BrokenPipe" not in error


@pytest.fixture
def on_the_orin(orin: TreeOnDisk, monkeypatch: Patch) -> TreeOnDisk:
    """Let the command find the simulated board's sensors."""
    monkeypatch.setattr(llama_bench, "Roots", lambda: orin.roots)
    return orin


def test_a_board_that_is_not_as_required_is_not_measured(
    bench: list[str], fake_llama_bench: Path, on_the_orin: TreeOnDisk, capsys: Capture
) -> None:
    line = refused(capsys, "llama-bench", *bench, "--require", "maxn,pinned")
    assert line.startswith("--require maxn,pinned: ") and "run: sudo jetson_clocks" in line
    assert not fake_llama_bench.with_name("argv.log").exists()


def test_cooling_needs_a_sensor_and_is_given_up(
    bench: list[str], on_the_orin: TreeOnDisk, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    quick = [*bench, "-p", "8", "-n", "0", "-r", "1"]
    assert run(*quick, "--cooldown", "90") == 0
    capsys.readouterr()
    monkeypatch.setattr(llama_bench, "Roots", lambda: Roots.in_directory(tmp_path))
    assert run(*quick, "--cooldown", "50") == 2
    error = "orinbench: --cooldown 50: this machine has no temperature sensor\n"
    assert capsys.readouterr().err == error


def test_figures_go_into_the_textfile(
    bench: list[str], on_the_orin: TreeOnDisk, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    assert run(*bench, "-p", "0", "-n", "4", "-r", "1", "--textfile", str(folder)) == 0
    text = (folder / "orinbench.prom").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("orinbench_tokens_per_second")]
    assert 'backend="llama.cpp"' in line and 'test="tg4"' in line and line.endswith(" 4000.0")
    monkeypatch.setattr(
        "orinbench.measure.board.os.access", lambda *_: False
    )  # root writes anywhere
    assert run(*bench, "--textfile", str(folder)) == 2
    assert "not writable for this user" in capsys.readouterr().err


def test_a_killed_run_is_told_of_at_the_next_start(
    bench: list[str], fake_llama_bench: Path, tmp_path: Path, capsys: Capture
) -> None:
    arguments = [*bench, "-p", "8", "-n", "4", "-r", "9", "--delay", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "orinbench", "llama-bench", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    folder = tmp_path / "tinygrad-orin" / "runs"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if any(path.stat().st_size for path in folder.glob("*")):
            break
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    (tmp_path / "runs").symlink_to(folder)
    assert run(*bench, "-p", "8", "-n", "0", "-r", "1") == 0
    error = capsys.readouterr().err
    (lost,) = folder.glob("*")
    assert "orinbench: an earlier run was killed; its samples are in " in error
    assert f"{lost.name}" in error
    assert json.loads(lost.read_text().splitlines()[0])["backend"] == "llama.cpp"


def test_a_first_run_on_a_cpu_says_what_it_shows(recorded_run: Build, tmp_path: Path) -> None:
    times = {Case(0, 4, 0): [8.0]}
    alone = recorded_run({"tinygrad:CPU": times})
    assert "the kernels are made for GPUs" in (llama_bench.newcomer_note(alone) or "")
    both = recorded_run({"tinygrad:CPU": times, "llama.cpp": times})
    assert llama_bench.newcomer_note(both) is None
    alone.lanes[0].rows[0].error = "killed by SIGSEGV"
    assert llama_bench.newcomer_note(alone) is None
    alone.lanes[0].rows[0].error, alone.partial = None, True
    assert llama_bench.newcomer_note(alone) is None
    # It is for once: neither for a second run, nor for one that leaves no trace.
    path = tmp_path / "history.db"
    assert llama_bench.is_first_run(options(history=path))
    assert not llama_bench.is_first_run(options(no_history=True))
    path.touch()
    assert not llama_bench.is_first_run(options(history=path))


def test_flags_that_tinygrad_ignores_are_said() -> None:
    given = options(n_ubatch=("64",), n_threads=("2",))
    assert llama_bench.ignored_flags("tinygrad:CUDA", "fused", given) == ["-ub 64", "-t 2"]
    assert llama_bench.ignored_flags("tinygrad:CPU", "general", given) == ["-ub 64"]
    given = options(type_k=("q8_0",))
    assert llama_bench.ignored_flags("tinygrad:CUDA", "fused", given) == ["-ctk q8_0"]
    given = options(type_k=("q8_0",), type_v=("q8_0",))
    assert llama_bench.ignored_flags("tinygrad:CUDA", "fused", given) == []
    ignored = llama_bench.ignored_flags("tinygrad:CPU", "general", given)
    assert ignored == ["-ctk q8_0", "-ctv q8_0"]


def test_help_names_every_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-h"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("llama-bench", "synth", "check", "compare"))
