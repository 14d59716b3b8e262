import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orinllm.errors import BadInput
from orinllm.gpu.host_compiler import (
    PROBE,
    can_compile,
    compiler_environment,
    provide_compiler,
    reason_clang_skipped,
    try_write_clang_script,
)


def clang_in(folder: Path, script: str) -> Path:
    """A clang on a PATH of its own."""
    folder.mkdir(exist_ok=True)
    clang = folder / "clang"
    clang.write_text(f"#!/bin/sh\n{script}\n")
    clang.chmod(0o755)
    return clang


def test_a_compiler_that_can_is_left_alone(tmp_path: Path) -> None:
    clang_in(tmp_path, "cat > /dev/null; printf '\\177ELF'")
    assert compiler_environment(tmp_path / "bin", {"PATH": str(tmp_path)}) == {}
    assert reason_clang_skipped({"PATH": str(tmp_path)}) is None
    assert compiler_environment(tmp_path / "bin", {"PATH": "/nowhere", "CC": "gcc"}) == {}
    assert not (tmp_path / "bin").exists()


@pytest.mark.parametrize(
    "script",
    ["cat > /dev/null; echo \"error: '__bf16'\" >&2; exit 1", "cat > /dev/null; echo no ELF"],
)
def test_a_compiler_that_cannot_is_passed_over_and_told(tmp_path: Path, script: str) -> None:
    pytest.importorskip("ziglang")
    clang = clang_in(tmp_path / "old", script)
    variables = compiler_environment(tmp_path / "bin", {"PATH": str(clang.parent)})
    assert variables["PATH"].split(os.pathsep)[0] == str(tmp_path / "bin")
    note = reason_clang_skipped({"PATH": str(clang.parent)})
    assert note is not None and note.startswith(f"{clang} compiles no bfloat16 for this CPU")
    assert "ziglang's clang is used" in note
    assert compiler_environment(tmp_path / "bin", {"PATH": str(clang.parent), "CC": "clang"}) == {}


def test_what_the_probe_asks_for_ziglangs_clang_can(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    compiler_environment(tmp_path, {"PATH": "/nowhere"})
    assert can_compile(str(tmp_path / "clang"))
    assert b"__bf16" in PROBE


def test_debians_clang_14_cannot() -> None:
    old = Path("/usr/lib/llvm-14/bin/clang")
    if not old.exists():
        pytest.skip("no clang 14 here: apt-get install clang-14")
    assert not can_compile(str(old))


def test_ziglangs_clang_compiles_as_tinygrad_calls_it(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    variables = compiler_environment(tmp_path / "a dir", {"PATH": "/nowhere"})
    variables["PATH"] += f"{os.pathsep}/usr/bin:/bin"
    assert variables["PATH"].startswith(f"{tmp_path / 'a dir'}{os.pathsep}")
    done = subprocess.run(
        ["clang", "-c", "-x", "c", "-O2", "-ffreestanding", "-nostdlib", "-", "-o", "-"],
        input=b"float half(float x) { return x / 2; }",
        env={**os.environ, **variables},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout[:4] == b"\x7fELF"
    assert "ziglang/zig" in (tmp_path / "a dir" / "clang").read_text()


@pytest.mark.parametrize("system", ["an old clang", "none"])
def test_bf16_runs_on_the_cpu_whatever_clang_is_there(tmp_path: Path, system: str) -> None:
    """The two ways in which a fresh machine comes."""
    pytest.importorskip("ziglang")
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not Path(f, "clang").exists()]
    if system == "an old clang":
        clang_in(tmp_path / "old", "cat > /dev/null; echo 'error: __bf16' >&2; exit 1")
        folders.insert(0, str(tmp_path / "old"))
    place = {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "orinbench", "suite", "--select", "matmul bf16 64x*",
         "--device", "CPU", "-r", "1", "--no-roofline"],
        env=os.environ | place | {"PATH": os.pathsep.join(folders)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bf16 64x64x64" in done.stdout
    assert ("ziglang's clang is used" in done.stderr) == (system == "an old clang")


def test_a_process_gets_a_compiler_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    provide_compiler()
    clang = tmp_path / "tinygrad-orin" / "clang"
    assert os.environ["PATH"] == f"{clang}{os.pathsep}/nowhere"
    written = (clang / "clang").stat()
    provide_compiler()
    assert os.environ["PATH"] == f"{clang}{os.pathsep}/nowhere"
    assert (clang / "clang").stat().st_ino == written.st_ino
    # One of another installation is written anew, and not while it runs.
    (clang / "clang").write_text("#!/bin/sh\nexec /gone/zig clang")
    provide_compiler()
    assert "/gone" not in (clang / "clang").read_text()
    assert os.access(clang / "clang", os.X_OK)
    assert [path.name for path in clang.iterdir()] == ["clang"]


def test_no_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc-of-nobody")
    with pytest.raises(BadInput, match="CC=cc-of-nobody: no such compiler"):
        provide_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="needs a C compiler: install clang, or"):
        provide_compiler()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BadInput, match="clang: cannot be written: Not a directory"):
        provide_compiler()


def test_threads_may_write_the_same_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a name of its own for what it has not finished, however their steps interleave."""
    together, chmod = threading.Barrier(4), os.chmod

    def late(path: str | Path, mode: int, **how: bool) -> None:
        chmod(path, mode, **how)
        together.wait(30)  # all have written, none has moved its own

    monkeypatch.setattr("os.chmod", late)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(try_write_clang_script, [tmp_path] * 4))
    assert [path.name for path in tmp_path.iterdir()] == ["clang"]
