"""Revisions that are built and measured: trees of patches in a repository made for the test.

Its `tools/series install` puts fake_worker.py there in the place of a patched tinygrad. All else is
the real thing: git, the environments, the processes, the statistics.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest
from tests.benchmarks.history.test_compare import run

import orinbench
from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.plan import Case
from orinbench.benchmark.protocol import Bandwidth, Identity
from orinbench.benchmark.results import RunResult
from orinbench.benchmark.tinygrad_backend import TinygradBackend
from orinbench.compare import command, rounds
from orinbench.compare.revisions import Built, Revision, build, find_revision
from orinbench.compare.rounds import Bench, Measured, measure
from orinbench.errors import BenchError
from orinbench.history.store import History
from orinbench.interrupts import Interrupts
from orinbench.model import ModelInfo
from orinbench.talk import Talk

SERIES = """\
import pathlib, shutil, sys
verb, venv = sys.argv[1:]
assert verb == "install"
series = pathlib.Path(__file__).parents[1].joinpath("patches", "tinygrad", "series").read_text()
if "broken" in series:
    sys.exit("series: 0001-broken.patch: does not apply")
(site,) = pathlib.Path(venv).glob("lib/python3*/site-packages")
info = site / "tinygrad-0.13.0.dist-info"
info.mkdir()
version = "0.13.0+orin." + series.strip().encode().hex()
text = f"Metadata-Version: 2.1\\nName: tinygrad\\nVersion: {version}\\n"
info.joinpath("METADATA").write_text(text)
for name in ("tinygrad", "orinbench", "orinbench/benchmark"):
    package = site / name
    package.mkdir()
    package.joinpath("__init__.py").touch()
shutil.copy(pathlib.Path(__file__).with_name("worker.py"), package)
site.joinpath("speed.txt").write_text("12" if "slow" in series else "10")
"""
WORKER = Path(__file__).with_name("fake_worker.py")


def git(place: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    command = ["git", "-C", str(place), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Revisions `plain`, `slow`, `broken`, `same` (other commit, same patches) and `none`."""
    place = tmp_path_factory.mktemp("repository")
    git(place, "init", "-q")
    (place / "tools").mkdir()
    (place / "patches" / "tinygrad").mkdir(parents=True)
    (place / "tools" / "series").write_text(SERIES)
    shutil.copy(WORKER, place / "tools" / "worker.py")
    for name in ("plain", "slow", "broken"):
        (place / "patches" / "tinygrad" / "series").write_text(f"{name}\n")
        git(place, "add", "-A")
        git(place, "commit", "-qm", name)
        git(place, "tag", name)
    git(place, "checkout", "-q", "plain")
    git(place, "commit", "-qm", "same", "--allow-empty")
    git(place, "tag", "same")
    git(place, "rm", "-rq", "patches")
    git(place, "commit", "-qm", "none")
    git(place, "tag", "none")
    return place


def revision(repository: Path, name: str) -> Revision:
    found = find_revision(name, repository)
    assert found is not None
    return found


def test_what_is_a_revision(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = revision(repository, "plain")
    assert plain.commit == git(repository, "rev-parse", "plain")
    assert revision(repository / "tools", plain.commit[:10]).commit == plain.commit
    assert revision(repository, "same").patches == plain.patches
    assert find_revision("no-such", repository) is None
    assert find_revision("--help", repository) is None
    assert find_revision("plain", tmp_path) is None
    with pytest.raises(BenchError, match="none: this revision has no tools/series and"):
        find_revision("none", repository)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_revision("plain", repository) is None


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of this file's builds: each is built once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH adds a package, another tinygrad, and the orinbench under test."""
    added = cache / "added"
    (added / "tinygrad-9.9.dist-info").mkdir(parents=True, exist_ok=True)
    text = "Metadata-Version: 2.1\nName: tinygrad\nVersion: 9.9\n"
    (added / "tinygrad-9.9.dist-info" / "METADATA").write_text(text)
    for name in ("tinygrad", "only_on_pythonpath"):
        (added / name).mkdir(exist_ok=True)
        (added / name / "__init__.py").touch()
    bench = Path(orinbench.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (added, bench))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.usefixtures("environment")
def test_the_whole_way(
    repository: Path,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A revision against a slower one; what PYTHONPATH adds comes after what was built."""
    monkeypatch.setattr(rounds, "copy_bandwidth", lambda *_: Bandwidth(1 << 20, [10.0]))
    monkeypatch.chdir(repository / "tools")
    path = tmp_path / "history.db"
    flags = ["-m", str(tiny_path), "--backend", "tinygrad:CPU", "-p", "0", "-n", "8", "--no-check"]
    flags += ["--rounds", "6", "-r", "1", "--history", str(path)]

    assert run("rev:same", "slow", *flags, "-o", "json") == 1
    captured = capsys.readouterr()
    (judged,) = json.loads(captured.out)
    assert judged["verdict"] == "slower" and judged["n"] == 6
    assert judged["ratio"] == pytest.approx(10 / 12, rel=0.02)
    assert (
        captured.err.count("building tinygrad of") == 2
        and "spread over 6 fresh processes" in captured.err
    )

    talk = Talk()
    again = build(revision(repository, "plain"), talk)  # another commit, the same patches
    assert "building" not in capsys.readouterr().err and again.version.endswith(b"plain".hex())

    assert run("plain", "broken", *flags) == 2
    assert "broken: cannot be built: series: 0001-broken.patch" in capsys.readouterr().err

    versions = [f"0.13.0+orin.{name.encode().hex()}" for name in ("plain", "slow")]
    with History(path) as history:
        for kept, version in zip(history.runs(), versions, strict=True):
            (record,) = history.records(kept.id)
            assert record.software == f"tinygrad {version}"
            assert record.environment["tinygrad_version"] == version
            assert record.rounds == [*range(6)]
            assert record.repetitions == 6
        assert record.extra == {"revision": git(repository, "rev-parse", "slow"), "name": "slow"}


@pytest.mark.usefixtures("environment")
def test_a_revision_has_its_own_tinygrad_and_our_other_packages(
    repository: Path, cache: Path
) -> None:
    made = build(revision(repository, "plain"), Talk())
    assert made.version == f"0.13.0+orin.{b'plain'.hex()}"
    names = ("tinygrad", "orinbench", "only_on_pythonpath", "click")
    program = f"import {', '.join(names)}\nfor m in ({', '.join(names)}): print(m.__file__)"
    done = subprocess.run(
        [made.python, "-c", program],
        env=os.environ | {"PYTHONPATH": ""},  # as a worker has it
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    own, worker, added, ours = done.stdout.splitlines()
    assert own.startswith(str(made.folder)) and worker.startswith(str(made.folder))
    assert added.startswith(str(cache / "added")) and ours == click.__file__


@pytest.fixture
def built(tmp_path: Path) -> Callable[[str], Built]:
    def make(name: str) -> Built:
        where = Revision(name, name * 8, tmp_path, "0" * 40)
        return Built(where, Path(sys.executable), f"0.13.0+orin.{name * 12}", tmp_path)

    return make


def test_another_tinygrad_in_the_way_is_told(
    built: Callable[[str], Built],
    tiny_model: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = Identity("tinygrad 1", "1", None, "CPU", None, None, None, None)
    monkeypatch.setattr(TinygradBackend, "open", lambda _: opened)
    bench = Bench("tinygrad:CPU", tiny_model, (Case(0, 4, 0),), 6, 1, 0, False, 300.0, False)
    other = r"runs tinygrad 1 instead of 0\.13\.0\+orin\.a+: is there one in the current folder"
    with pytest.raises(BenchError, match=other):
        measure((built("a"), built("b")), bench, Talk(), False, Interrupts())


def paired_run(
    recorded_run: Callable[..., RunResult], milliseconds: list[tuple[float, float]]
) -> RunResult:
    """A run in whose processes the two sides took so long, three times each."""
    case = Case(0, 8, 0)
    before, after = ([pair[side] for pair in milliseconds for _ in range(3)] for side in (0, 1))
    run = recorded_run({"tinygrad:CPU": {case: before}, "x": {case: after}}, 3 * len(milliseconds))
    for lane in run.lanes:
        (row,) = lane.rows
        row.samples = [replace(s, process=i // 3) for i, s in enumerate(row.samples)]
    return run


NOISE = (1.0, 0.97, 1.04, 0.99, 1.02, 0.95, 1.01, 1.03)


@pytest.mark.parametrize(
    ("factor", "verdict", "code"),
    [(1.0, "no difference shown", 0), (1.25, "slower", 1), (0.8, "faster", 0)],
)
def test_the_verdict_is_of_pairs_of_rounds(
    factor: float,
    verdict: str,
    code: int,
    recorded_run: Callable[..., RunResult],
    built: Callable[[str], Built],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_path: Path,
    tmp_path: Path,
) -> None:
    pairs = [
        (10 * left, 10 * factor * right) for left, right in zip(NOISE, NOISE[::-1], strict=True)
    ]
    sides = (built("a"), built("b"))
    measured = Measured(sides, paired_run(recorded_run, pairs))
    (judged,) = measured.judge()
    assert judged.comparison.verdict.value == verdict and judged.comparison.n == len(pairs)

    monkeypatch.setattr(command, "find_revision", lambda name, _: sides["ab".index(name)].revision)
    monkeypatch.setattr(command, "build", lambda found, _: sides["ab".index(found.name)])
    monkeypatch.setattr(command, "measure", lambda *_: measured)
    path = tmp_path / "history.db"
    flags = ["-m", str(tiny_path), "--backend", "tinygrad:CPU", "-p", "0", "-n", "8"]
    assert run("a", "b", "--history", str(path), *flags) == code
    text = capsys.readouterr().out
    assert verdict in text and "8 rounds of fresh processes" in text
    assert "A: a, commit aaaaaaaa, tinygrad 0.13.0+orin.aaaaaaaaaaaa" in text
    with History(path) as history:
        assert [kept.n_records for kept in history.runs()] == [1, 1]
        (record,) = history.records(2)
        assert record.extra["name"] == "b" and len(record.samples_ts) == 24


def test_ctrl_c_and_failures_have_their_codes(
    recorded_run: Callable[..., RunResult], built: Callable[[str], Built]
) -> None:
    measured = Measured((built("a"), built("b")), paired_run(recorded_run, [(10.0, 10.0)] * 3))
    (row,) = measured.run.lanes[1].rows
    row.samples = row.samples[:6]  # the third process of one side alone is no pair
    assert measured.rounds == measured.judge()[0].comparison.n == 2
    row.error = "no kernel"
    assert measured.errors() == ["b tg8 failed: no kernel"]
    assert command._exit_code(measured, []) == 1
    measured.run.partial = True
    assert command._exit_code(measured, measured.judge()) == 130


def test_a_side_that_does_not_start_ends_it(
    built: Callable[[str], Built], tiny_model: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: object) -> None:
        raise BackendDiedError("out of memory")

    version = built("a").version
    opened = Identity("tinygrad", version, None, "CPU", None, None, None, None)
    monkeypatch.setattr(TinygradBackend, "open", lambda _: opened)
    monkeypatch.setattr(TinygradBackend, "first_token", dies)
    monkeypatch.setattr(rounds, "copy_bandwidth", lambda *_: Bandwidth(1 << 20, [10.0]))
    bench = Bench("tinygrad:CPU", tiny_model, (Case(0, 8, 0),), 6, 3, 0, False, 300.0, False)
    with pytest.raises(BenchError, match="a: tinygrad:CPU: out of memory"):
        measure((built("a"), built("a")), bench, Talk(), False, Interrupts())
