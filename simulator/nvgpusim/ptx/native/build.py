"""C to machine code: the machine's compiler, and a folder of what it has made."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...options import cache_directory

HEADER = Path(__file__).with_name("machine.h")
FLAGS = (
    "-std=gnu11", "-O2", "-fPIC", "-shared", "-march=native", "-fwrapv", "-ffp-contract=off",
    "-fno-math-errno", "-fno-strict-aliasing", "-w",
)  # fmt: skip
"""No -ffast-math: what is fused or reordered is written so."""
SECONDS = 120
"""A compiler that takes longer is ended."""

_told: set[str] = set()


def tell(line: str) -> None:
    """Say on stderr, once, why kernels are not compiled."""
    if line not in _told:
        _told.add(line)
        print(f"nvgpusim: {line}; kernels run on numpy alone, slower", file=sys.stderr)


@lru_cache
def compiler() -> tuple[str, ...]:
    """The C compiler's command: $CC, clang, gcc or cc of PATH, ziglang's clang; () for none."""
    asked = os.environ.get("CC")
    for name in (asked,) if asked else ("clang", "gcc", "cc"):
        if name and (found := shutil.which(name)):
            return (found,)
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is None or not ziglang.submodule_search_locations:
        return ()
    return str(Path(ziglang.submodule_search_locations[0]) / "zig"), "cc"


@lru_cache
def _machine() -> bytes:
    """The machine as -march=native sees it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return repr((platform.machine(), platform.processor(), known)).encode()


def load(text: str) -> Any:
    """The function `run` of a C file, compiled now or found in the folder; None if it cannot be."""
    command = compiler()
    if not command:
        tell("no C compiler (install clang or gcc, or `pip install ziglang`)")
        return None
    key = hashlib.sha256(b"\0".join([
        text.encode(), HEADER.read_bytes(), repr((command, FLAGS)).encode(), _machine(),
    ])).hexdigest()  # fmt: skip
    directory = cache_directory() / "native"
    library = directory / f"{key[:32]}.so"
    try:
        if not library.exists():
            directory.mkdir(parents=True, exist_ok=True)
            _compile(command, text, library)
        run = ctypes.PyDLL(str(library)).run
    except subprocess.CalledProcessError as e:
        said = e.stderr.decode(errors="replace").splitlines()
        error = next((line for line in said if "error" in line), "no message")
        tell(f"{command[0]} cannot compile a kernel ({error})")
        return None
    except (OSError, subprocess.TimeoutExpired) as e:
        tell(f"{directory}: {e}")
        return None
    run.argtypes, run.restype = [ctypes.c_void_p], ctypes.c_int
    return run


def _compile(command: tuple[str, ...], text: str, library: Path) -> None:
    """Compile beside and move, so that nobody loads a part of a file."""
    handle, name = tempfile.mkstemp(".so", dir=library.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, *FLAGS, f"-I{HEADER.parent}", "-x", "c", "-", "-o", name, "-lm"],
            input=text.encode(), capture_output=True, check=True, timeout=SECONDS,
        )  # fmt: skip
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)
