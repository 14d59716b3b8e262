"""The C compilers of this machine that may compile kernels."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from pathlib import Path

from .errors import SimError


class NoCompilerError(SimError):
    """Kernels cannot be compiled; the message is one line that says what would help."""


def compiler_commands() -> list[tuple[str, ...]]:
    """The commands that may serve, the best first: $CC alone, else clang, gcc, cc of PATH and the
    clang of PyPI's ziglang. Raises NoCompilerError where there is none."""
    try:
        asked = shlex.split(os.environ.get("CC", ""))
    except ValueError as e:
        raise NoCompilerError(f"CC={os.environ['CC']}: {e}") from None
    if asked:
        if found := shutil.which(asked[0]):
            return [(found, *asked[1:])]
        raise NoCompilerError(
            f"CC={asked[0]} is no program of PATH (clang, gcc and `python -m ziglang cc` serve)"
        )
    names = ("clang", "gcc", "cc")
    known: list[tuple[str, ...]] = [(found,) for name in names if (found := shutil.which(name))]
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is not None and ziglang.submodule_search_locations:
        known.append((str(Path(ziglang.submodule_search_locations[0]) / "zig"), "cc"))
    if not known:
        raise NoCompilerError("no C compiler: install gcc or clang, or `pip install ziglang`")
    return known
