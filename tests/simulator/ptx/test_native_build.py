"""The folder of compiled kernels and the compiler behind it, where they are not as one wishes."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nvgpusim.cli import main
from nvgpusim.compilers import NoCompilerError
from nvgpusim.ptx.native import build


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of libraries, and nothing said so far."""
    monkeypatch.setenv("NVGPUSIM_CACHE", str(tmp_path))
    return tmp_path / "native"


def c(value: int) -> str:
    """A file whose function returns a number."""
    return f"int run(void *c) {{ return {value}; }}\n"


def test_a_library_that_others_can_write_is_not_loaded(folder: Path, capsys: Any) -> None:
    """One in a folder of theirs, one that is writable, a link."""
    assert build.load_run_function(c(1))(None) == 1
    (mine,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, mine.stat().st_mode & 0o777) == (0o700, 0o600)
    assert build.load_run_function(c(66))(None) == 66
    (planted,) = set(folder.iterdir()) - {mine}
    kept = mine.stat().st_ino
    assert build.load_run_function(c(1))(None) == 1 and mine.stat().st_ino == kept

    def writable() -> None:
        shutil.copy(planted, mine)
        mine.chmod(0o666)

    for how in (writable, lambda: mine.symlink_to(planted)):
        mine.unlink()
        how()
        assert build.load_run_function(c(1))(None) == 1
        assert not mine.is_symlink() and mine.stat().st_mode & 0o777 == 0o600
    assert not capsys.readouterr().err
    folder.chmod(0o777)
    with pytest.raises(NoCompilerError, match="others may write there"):
        build.load_run_function(c(1))


def test_a_part_of_a_library_is_compiled_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each in a folder of its own: one that is loaded is not read again."""
    assert build.load_run_function(c(1))(None) == 1
    (whole,) = folder.iterdir()
    for size in (0, 4, whole.stat().st_size // 2):
        other = tmp_path / f"cut {size}" / folder.name
        other.mkdir(0o700, parents=True)
        cut = other / whole.name
        cut.write_bytes(whole.read_bytes()[:size])
        cut.chmod(0o600)
        monkeypatch.setenv("NVGPUSIM_CACHE", str(other.parent))
        assert build.load_run_function(c(1))(None) == 1
        assert cut.stat().st_size == whole.stat().st_size


def test_a_compiler_that_hangs_is_asked_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """It ends with what it has started, and leaves no file."""
    script, pids = tmp_path / "slow", tmp_path / "pids"
    version = 'case "$*" in *-S*) exit 0;; esac'
    script.write_text(f"#!/bin/sh\n{version}\nsleep 600 &\necho $! >> {pids}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(build, "compiler_command", lambda: (str(script),))
    monkeypatch.setattr(build, "SECONDS", 2)
    with pytest.raises(NoCompilerError, match="was ended"):
        build.load_run_function(c(1))
    (child,) = pids.read_text().split()
    state = Path(f"/proc/{child}/stat")
    for _ in range(200):  # the kernel ends it in its own time
        if not state.exists() or state.read_text().rsplit(")")[-1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("what the compiler had started still runs")
    assert not list(folder.iterdir())


def test_cc_may_have_options_and_must_exist(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("CC", "sh -e")
    assert build.compiler_command.__wrapped__() == (shutil.which("sh"), "-e")
    for wrong, why in (
        ("no-such-compiler -O1", "CC=no-such-compiler is no program of PATH"),
        ("'gcc", "CC='gcc: No closing quotation"),
    ):
        monkeypatch.setenv("CC", wrong)
        with pytest.raises(NoCompilerError, match=why):
            build.compiler_command.__wrapped__()
        assert main(["--", "-c", "pass"]) == 2
        assert f"nvgpusim: error: {why}" in capsys.readouterr().err


def compiler_script(path: Path, kind: str) -> None:
    """A gcc of another version ("new"), without _Float16 ("old"), or without headers ("bare")."""
    refuse = 'case "$*" in *-S*) echo "error: no _Float16" >&2; exit 1;; esac'
    rename = 'case "$*" in *-S*) echo "cc version 99" >&2; exit 0;; esac'
    first = {"old": refuse, "new": rename, "bare": 'set -- -nostdinc "$@"'}[kind]
    path.write_text(f'#!/bin/sh\n{first}\nexec {shutil.which("gcc")} "$@"\n')
    path.chmod(0o755)


def test_another_version_compiles_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of one compiler is not loaded for the next one of the same name."""
    script = folder.parent / "mycc"
    compiler_script(script, "new")
    monkeypatch.setattr(build, "compiler_command", lambda: (str(script),))
    counts = []
    for new in (False, True, True):
        if new:
            script.write_text(script.read_text().replace("99", "100"))
        build.compiler_version.cache_clear()
        assert build.load_run_function(c(1))(None) == 1
        counts.append(len(list(folder.iterdir())))
    assert counts == [1, 2, 2]


def test_a_compiler_without_half_floats_or_headers_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian 12's clang on x86-64, and ziglang's clang in front of it: gcc is taken."""
    for name, kind in (("clang", "bare"), ("gcc", "old"), ("cc", "new")):
        compiler_script(folder.parent / name, kind)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{folder.parent}:{os.environ['PATH']}")
    assert build.compiler_command.__wrapped__() == (str(folder.parent / "cc"),)


def test_ziglang_alone_compiles_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It names a random file in what it says of itself, and takes `-o -` for a file's name."""
    pytest.importorskip("ziglang")
    here = folder.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    command = build.compiler_command.__wrapped__()
    assert Path(command[0]).name == "zig"
    monkeypatch.setattr(build, "compiler_command", lambda: command)
    for _ in range(2):
        build.compiler_version.cache_clear()
        assert build.load_run_function('#include "machine.h"\n' + c(1))(None) == 1
    assert not capsys.readouterr().err
    assert len(list(folder.iterdir())) == 1 and not list(here.iterdir())


def test_the_folder_does_not_grow_without_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "KEPT", 2)
    assert build.load_run_function(c(1))(None) == 1
    (first,) = folder.iterdir()
    assert build.load_run_function(c(2))(None) == 2
    for n, path in enumerate(folder.iterdir()):
        os.utime(path, (1e9 + n, 1e9 + n))
    assert build.load_run_function(c(1))(None) == 1  # used again
    assert build.load_run_function(c(3))(None) == 3
    assert len(list(folder.iterdir())) == 2 and first.exists()
