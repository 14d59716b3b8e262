"""A `clang` for tinygrad's CPU device: the machine's own, or the one inside PyPI's ziglang."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def compiler_path(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let tinygrad find a C compiler; empty if it finds one already.

    tinygrad 0.13.0 runs `$CC`, or else `clang` from PATH (runtime/support/compiler_cpu.py).
    Where neither is there and PyPI's ziglang is, its clang is put in front of PATH.
    """
    search = environment.get("PATH", os.defpath)
    if "CC" in environment or shutil.which("clang", path=search):
        return {}
    return {"PATH": f"{directory}{os.pathsep}{search}"} if write_clang(directory) else {}


def write_clang(directory: Path) -> bool:
    """Write a script `clang` that runs ziglang's into `directory`; False without ziglang."""
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is None or not ziglang.submodule_search_locations:
        return False
    # Not `python -m ziglang`: an interpreter costs as much as the compilation of a kernel.
    zig = Path(ziglang.submodule_search_locations[0]) / "zig"
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "clang"
    script.write_text(f'#!/bin/sh\nexec "{zig}" clang "$@"\n')
    script.chmod(0o755)
    return True


def compiler_hint(error: str) -> str:
    """Add to an error about a missing clang how to get one."""
    if "FileNotFoundError" in error and "clang" in error:
        return "no C compiler: install clang, or `pip install ziglang`, which carries one"
    return error
