import os
import subprocess
from pathlib import Path

import pytest

from orinbench.compiler import compiler_hint, compiler_path


def test_a_compiler_that_is_there_is_left_alone(tmp_path: Path) -> None:
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\n")
    clang.chmod(0o755)
    assert compiler_path(tmp_path / "bin", {"PATH": str(tmp_path)}) == {}
    assert compiler_path(tmp_path / "bin", {"PATH": "/nowhere", "CC": "gcc"}) == {}
    assert not (tmp_path / "bin").exists()


def test_without_clang_and_ziglang_nothing_is_pretended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compiler_path(tmp_path, {"PATH": "/nowhere"}) == {}


def test_ziglangs_clang_compiles_as_tinygrad_calls_it(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    variables = compiler_path(tmp_path / "a dir", {"PATH": "/usr/bin:/bin"})
    if not variables:
        pytest.skip("this machine has a clang in /usr/bin")
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


def test_only_a_missing_clang_gets_the_hint() -> None:
    assert "ziglang" in compiler_hint("FileNotFoundError: No such file or directory: 'clang'")
    assert compiler_hint("RuntimeError: clang crashed") == "RuntimeError: clang crashed"
