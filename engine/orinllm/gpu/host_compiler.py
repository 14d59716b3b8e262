"""A `clang` for tinygrad's CPU device, and files of CUDA: the machine's, or wheels'."""

import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from orinllm.errors import BadInput

# What tinygrad's kernels ask of a compiler: half precision, bfloat16 there and back, vectors.
# clang 14 knows __bf16 as a name and cannot convert it.
PROBE = b"""
typedef float float4 __attribute__((aligned(16), ext_vector_type(4)));
void probe(__bf16 *restrict b, _Float16 *restrict h, float4 *restrict f) {
  for (int i = 0; i < 4; i++) {
    float x = (float)b[i] + (float)h[i] + f[0][i];
    b[i] = (__bf16)x; h[i] = (_Float16)x; f[0][i] = x;
  }
}
"""
PROBE_SECONDS = 60
# As tinygrad 0.13.0 calls it (runtime/support/compiler_cpu.py).
FLAGS = ("-c", "-x", "c", "-O2", "-fPIC", "-ffreestanding", "-fno-math-errno", "-nostdlib")
ARCHITECTURES = {
    "x86_64": ("--target=x86_64-none-unknown-elf", "-march=native"),
    "aarch64": ("--target=arm64-none-unknown-elf", "-ffixed-x18", "-mcpu=native"),
}


def compiler_environment(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let tinygrad find a C compiler; empty if it finds one already.

    tinygrad 0.13.0 runs `$CC`, or else `clang` from PATH (runtime/support/compiler_cpu.py). Where
    the latter is missing or cannot do what tinygrad needs, and PyPI's ziglang is there, its clang
    is put in front of PATH. A `$CC` was asked for and is left alone.
    """
    search = environment.get("PATH", os.defpath)
    if "CC" in environment:
        return {}
    found = shutil.which("clang", path=search)
    if found is not None and Path(found).parent == directory and try_write_clang_script(directory):
        return {}
    if found is not None and can_compile(found):
        return {}
    return {"PATH": f"{directory}{os.pathsep}{search}"} if try_write_clang_script(directory) else {}


def user_cache_folder() -> Path:
    """Return the folder of what can be made again."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "tinygrad-orin"


def provide_compiler() -> None:
    """Let tinygrad's CPU device of this process find a C compiler, as `compiler_environment` says.

    Raises BadInput, one line, where there is none.
    """
    directory = user_cache_folder() / "clang"
    try:
        os.environ.update(compiler_environment(directory, os.environ))
    except OSError as error:
        raise BadInput(
            f"{directory}: cannot be written: {error.strerror}; ziglang's clang is run from there"
        ) from None
    asked = os.environ.get("CC")
    if shutil.which(asked or "clang") is not None:
        return
    if asked:
        raise BadInput(f"CC={asked}: no such compiler; leave CC out, or name a clang")
    raise BadInput(
        "the CPU needs a C compiler: install clang, or `pip install ziglang`, which carries one"
    )


@lru_cache
def can_compile(clang: str) -> bool:
    """Say if a clang compiles what tinygrad needs, for this machine."""
    flags = (*FLAGS, *ARCHITECTURES.get(platform.machine(), ()))
    try:
        done = subprocess.run(
            [clang, *flags, "-", "-o", "-"],
            input=PROBE,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout[:4] == b"\x7fELF"


def reason_clang_skipped(environment: Mapping[str, str]) -> str | None:
    """Say that the machine's clang is passed over, and why; None where it is not."""
    found = shutil.which("clang", path=environment.get("PATH", os.defpath))
    if "CC" in environment or found is None or can_compile(found):
        return None
    missing = f"{found} compiles no bfloat16 for this CPU, which tinygrad needs"
    if _find_zig() is None:
        return f"{missing}: install clang 15 or newer, or `pip install ziglang`"
    return f"{missing}: ziglang's clang is used; CC=clang takes it all the same"


def _find_zig() -> Path | None:
    ziglang = importlib.util.find_spec("ziglang")
    if ziglang is None or not ziglang.submodule_search_locations:
        return None
    return Path(ziglang.submodule_search_locations[0]) / "zig"


def try_write_clang_script(directory: Path) -> bool:
    """Write a script `clang` that runs ziglang's into `directory`; False without ziglang."""
    # Not `python -m ziglang`: an interpreter costs as much as the compilation of a kernel.
    if (zig := _find_zig()) is None:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    script, text = directory / "clang", f'#!/bin/sh\nexec "{zig}" clang "$@"\n'
    if not script.exists() or script.read_text() != text:
        # Another process may be running the old one, and another thread may write it too.
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as new:
            new.write(text)
        os.chmod(new.name, 0o755)
        os.replace(new.name, script)
    return True


def find_cuda_wheel_file(pattern: str) -> Path | None:
    """Return the first file of an installed CUDA wheel that a pattern means, None if there is none.

    Patterns are such as `lib/libnvrtc.so.12` or `bin/ptxas`.
    """
    for package in ("nvidia", "triton"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            if found := sorted(Path(place).rglob(pattern)):
                return found[0]
    return None


def error_or_clang_hint(error: str) -> str:
    """Add to an error about a missing clang how to get one."""
    if "FileNotFoundError" in error and "clang" in error:
        return "no C compiler: install clang, or `pip install ziglang`, which carries one"
    return error
