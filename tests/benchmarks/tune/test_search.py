"""Search, export, import: real kernels of tinygrad's CPU device, a search of few actions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.tune.conftest import ROOT, Tune

from orinbench.benchmark.tinygrad_backend import worker_environment
from orinbench.tune import tuning

MODEL_FLAGS = ("--context", "128", "--level", "2")


def beam_run(tmp_path: Path, level: int, **environment: str) -> int:
    """Run the small kernels with BEAM=level; return how many candidates were compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.tune.beam_run"],
        env=os.environ
        | worker_environment("CPU", tmp_path)
        | {"BEAM": str(level), "PARALLEL": "0"}
        | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["beam"] == str(level)
    return int(said["candidates"])


def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine: no cache, nothing kept."""
    monkeypatch.setenv("CACHEDB", str(tmp_path / "fresh.db"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Path:
    """Export of a search of the small kernels, beside the caches and what the search said."""
    folder = tmp_path_factory.mktemp("found")
    environment = {"XDG_CACHE_HOME": str(folder), "CACHEDB": str(folder / "cache.db")}
    environment |= {"DEV": "CPU", "PYTHONPATH": str(ROOT)}
    process = run_alone(environment, "search", str(tiny_path), *MODEL_FLAGS)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (folder / "said").write_text(out)
    shutil.copy(folder / "tinygrad-orin" / "tuning.json", folder / "found.json")
    return folder / "found.json"


def test_a_found_kernel_is_found_again_without_a_search(
    tune: Tune, found: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is the one that `beam_search` itself uses, in the searching and in a fresh cache."""
    said = (found.parent / "said").read_text()
    assert "2 of 2 kernels have results, 2 searched now" in said
    assert "A token is 3 hand-written kernels" in said
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.parent))
    # Searches go on from what is kept: nothing is left to do, in another cache too.
    assert "0 searched now" in tune("search", tiny_path, *MODEL_FLAGS).out
    assert beam_run(tmp_path, 2) == 0

    file = tmp_path / "tuning.json"
    assert tune("export", file).code == 0
    assert file.read_text() == found.read_text()
    fresh(tmp_path, monkeypatch)
    said_of_import = tune("import", file, tiny_path, "--context", "128")
    assert said_of_import.code == 0 and "2 in use, 0 rejected" in said_of_import.err
    assert beam_run(tmp_path, 2) == 0
    # Another level is another key.
    assert beam_run(tmp_path, 1, BEAM_MIN_PROGRESS="1e9") > 0
    # Imported entries are this machine's now, with this machine's times.
    assert {(e.kernel, e.opts) for e in tuning.load_store()} == {
        (e.kernel, e.opts) for e in tuning.load(file)
    }


def test_what_is_found_says_what_it_is_of_and_nothing_private(found: Path, tiny_path: Path) -> None:
    first, second = tuning.load(found)
    assert {first.name.split("_")[0], second.name.split("_")[0]} == {"E", "r"}
    assert first.measured_on and first.target.series and "context 128, chunk 32" in first.model
    assert {e.launches["token"] for e in (first, second)} == {1, 2}
    assert str(tiny_path) not in found.read_text()
    assert os.uname().nodename not in found.read_text()


REJECTED = {
    2: ("LOCAL(0,4)", "LOCAL(0,4) does not apply: locals needed for opt"),
    3: ("UPCAST(0,7)", "UPCAST(0,7) does not apply"),
    4: ("TC(0,(-1,2,1))", "TC(0,(-1,2,1)) does not apply"),
    5: ("UPCAST(40,4)", "UPCAST(40,4) does not apply"),
    6: ("", "slower than the default here"),
}


def test_what_does_not_apply_or_is_slower_stays_out(
    tune: Tune, found: Path, tiny_path: Path, tmp_path: Path
) -> None:
    real = next(e for e in tuning.load(found) if e.name.startswith("r_"))
    file = tmp_path / "bad.json"
    tuning.write([replace(real, level=n, opts=opts) for n, (opts, _) in REJECTED.items()], file)
    said = tune("import", file, tiny_path, "--context", "128")
    assert said.code == 1 and "0 in use, 5 rejected" in said.err
    lines = [line for line in said.err.splitlines() if "rejected: " in line]
    for line, (_, reason) in zip(lines, REJECTED.values(), strict=True):
        assert real.name in line and reason in line
    assert tune("export", tmp_path / "none.json").code == 2


def test_an_entry_that_takes_the_worker_with_it_is_rejected(
    tune: Tune, found: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_WORKER", "die")
    said = tune("import", found, tiny_path)
    assert said.code == 1 and "0 in use, 2 rejected" in said.err
    assert said.err.count("ended with status 7") == 2


def test_a_kernel_that_takes_the_worker_with_it_costs_only_itself(
    tune: Tune, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_WORKER", "die first")
    said = tune("search", tiny_path, *MODEL_FLAGS)
    assert said.code == 1 and said.err.count("ended with status 7") == 1
    assert "1 of 2 kernels have results, 1 searched now" in said.out


def test_entries_for_others_and_for_unknown_kernels_are_counted(
    tune: Tune, found: Path, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuning.json"
    here = tuning.load(found)[0]
    cuda = replace(here, target=replace(here.target, device="CUDA", arch="sm_87"))
    older = replace(here, target=replace(here.target, series="f" * 12))
    unknown = replace(here, kernel="a" * 64)
    tuning.write([cuda, older, unknown], file)
    said = tune("import", file, tiny_path)
    assert said.code == 0 and "1 in use, 0 rejected, 1 for kernels that" in said.err
    assert f"1 entries are for {cuda.target}; here is {here.target}" in said.err
    # A service imports at each start: the second time there is nothing to do.
    assert tune("import", file, tiny_path, "--once").code == 0
    monkeypatch.setenv("SMALL_WORKER", "hidden")
    assert tune("import", file, tiny_path, "--once").err == ""


def test_the_budget_ends_a_search_and_keeps_what_there_is(
    tune: Tune, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_WORKER", "slow")
    said = tune("search", tiny_path, *MODEL_FLAGS, "--budget", "3s")
    assert said.code == 0
    assert "the budget is spent; 0 of" in said.err
    assert "0 searched now" in said.out


def run_alone(environment: Mapping[str, str], *arguments: str) -> subprocess.Popen[str]:
    """Start `orinbench tune` with the small worker in a process that can be interrupted."""
    program = (
        "import sys; from orinbench.tune import events;"
        "events.TUNE_WORKER = (sys.executable, '-m', 'tests.benchmarks.tune.small_worker');"
        "from orinbench.cli import main; main(sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "tune", *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_keeps_what_was_found(tune: Tune, found: Path, tiny_path: Path) -> None:
    tuning.keep(tuning.load(found))
    process = run_alone({"SMALL_WORKER": "slow"}, "search", str(tiny_path), "--level", "3")
    assert process.stderr is not None
    for line in process.stderr:
        if "searching" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; 0 of 2 kernels kept: the same command goes on from here" in err
    assert "Traceback" not in err and "0 of 2 kernels have results" in out
    assert {e.level for e in tuning.load_store()} == {2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("search",), "want one of MODEL and --shape"),
        (("search", "--shape", "tiny", "model.gguf"), "want one of MODEL and --shape"),
        (("search", "--shape", "huge"), "--shape huge: no such shape"),
        (("search", "MODEL", "--budget", "soon"), "--budget soon: no time; right are 90s"),
        (("search", "MODEL", "--budget", "0s"), "--budget 0s: no time"),
        (("import", "nowhere.json", "MODEL"), "nowhere.json: No such file"),
        (("search", "nowhere.gguf"), "nowhere.gguf"),
    ],
)
def test_bad_use_is_one_line(
    tune: Tune, tiny_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = tune(*(str(tiny_path) if a == "MODEL" else a for a in arguments))
    assert result.code == 2 and said in result.err and "\n" not in result.err.strip()
