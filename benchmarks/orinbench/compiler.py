"""A `clang` for tinygrad's CPU device: the machine's own, or the one inside PyPI's ziglang."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path


def compiler_path(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let tinygrad find a C compiler; empty if it finds one already.

    tinygrad 0.13.0 runs `$CC`, or else `clang` from PATH (runtime/support/compiler_cpu.py).
    Where neither is there and the module ziglang can be imported, a script `clang` that runs its
    clang is written into `directory` and put in front of PATH.
    """
    search = environment.get("PATH", os.defpath)
    if "CC" in environment or shutil.which("clang", path=search):
        return {}
    if importlib.util.find_spec("ziglang") is None:
        return {}
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / "clang"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang clang "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}{search}"}


def compiler_hint(error: str) -> str:
    """Add to an error about a missing clang how to get one."""
    if "FileNotFoundError" in error and "clang" in error:
        return "no C compiler: install clang, or `pip install ziglang`, which carries one"
    return error
