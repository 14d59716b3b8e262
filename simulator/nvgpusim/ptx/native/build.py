"""C to machine code: the machine's compiler, and a folder of what it has made.

A kernel is compiled at once, quickly (-O0), and once more, well (-O2), when it has run for long.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import signal
import stat
import struct
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...compilers import NoCompilerError, compiler_commands
from ...options import cache_directory

HEADERS = sorted((Path(__file__).parent / "c").glob("*.h"))
FLAGS = (
    "-std=gnu11", "-fPIC", "-shared", "-march=native", "-fwrapv", "-ffp-contract=off",
    "-fno-math-errno", "-fno-strict-aliasing", "-falign-jumps=32", "-w",
)  # fmt: skip
"""No -ffast-math: what is fused or reordered is written so. Jumps: a matmul takes 12 % longer
where gcc happens to lay its loop across a line (EPYC, gcc 12.2)."""
PROBE = "".join(f"#include <{h}.h>\n" for h in ("fenv", "math", "stdint", "string"))
PROBE += "_Float16 half;\n"
"""The C that numbers.h needs: a compiler that refuses it is passed over."""
SECONDS = 120
"""A compiler that takes longer is ended."""
KEPT = 4096
"""Libraries in the folder, of 16 to 50 KiB; those that were used last stay."""

QUICK, WELL = "-O0", "-O2"
HOT = 1000
"""Thread instructions for each byte of a kernel's C after which it is compiled well. What has run
by then took about as long as that does: 10 to 20 us a byte, 10 to 50 ns an instruction (gcc 12.2,
EPYC)."""


@lru_cache
def compiler_command() -> tuple[str, ...]:
    """The C compiler's command: of compiler_commands() the first that knows the C that is written
    here; one command alone is not asked. Raises NoCompilerError."""
    known = compiler_commands()
    for command in known if len(known) > 1 else ():
        with suppress(subprocess.SubprocessError, OSError):
            compiler_version(command)
            return command
    return known[0]


@lru_cache
def compiler_version(command: tuple[str, ...]) -> str:
    """The version that a compiler says it is. Raises CalledProcessError: it has no _Float16, as
    clang 14 on x86-64, or no headers, as `zig clang`."""
    # Not -fsyntax-only: zig 0.17 fails for want of an object file. Not -o -: it writes a file `-`.
    with tempfile.TemporaryDirectory() as folder:
        assembly = str(Path(folder, "probe.s"))
        said = _run_compiler(
            [*command, *FLAGS, QUICK, "-v", "-S", "-x", "c", "-", "-o", assembly], PROBE
        )
    # A line with -o is a command; it names a file that is another each time.
    return "\n".join(x for x in said.splitlines() if "version" in x and " -o " not in x)


@lru_cache
def _machine_fingerprint() -> bytes:
    """The machine as -march=native sees it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return repr((platform.machine(), platform.processor(), known)).encode()


class KernelLibrary:
    """The compiled function `run` of a C file. Raises NoCompilerError."""

    def __init__(self, text: str) -> None:
        self.text, self.spent = text, 0
        self.run: Any = None
        for level in (WELL, QUICK):
            if self.run is None:
                self.run = load_run_function(text, level, level == QUICK)
                self.well = level == WELL

    def recompile_when_hot(self, instructions: int) -> None:
        """Note what has run; compile the file well once that is worth it."""
        self.spent += instructions
        if self.spent > HOT * len(self.text) and not self.well:
            self.well = True
            with suppress(NoCompilerError):  # it runs on as it is
                self.run = load_run_function(self.text, WELL, True)


def load_run_function(text: str, level: str = QUICK, compile_it: bool = True) -> Any:
    """The function `run` of a C file, found in the folder or, if asked, compiled now; else None.

    Raises NoCompilerError.
    """
    command = compiler_command()
    directory = cache_directory() / "native"
    try:
        made = repr((command, FLAGS, level, compiler_version(command))).encode()
        parts = [text.encode(), *(h.read_bytes() for h in HEADERS), made, _machine_fingerprint()]
        library = directory / f"{hashlib.sha256(b'|'.join(parts)).hexdigest()[:32]}.so"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _only_we_can_write(directory, directory.stat()):
            raise NoCompilerError(
                f"{directory}: others may write there (it must be yours, mode 0700)"
            )
        run = _load_kept_function(library)
        if run is None and not compile_it:
            return None
        if run is None:
            _compile_library([*command, *FLAGS, level], text, library)
            run = ctypes.PyDLL(str(library)).run
            _prune_library_folder(directory)
    except subprocess.CalledProcessError as e:
        said = e.stderr.decode(errors="replace").splitlines()
        error = next((n for n in said if "error:" in n or "failed:" in n), "no message")
        raise NoCompilerError(f"{command[0]} cannot compile a kernel ({error})") from None
    except subprocess.TimeoutExpired:
        what = f"{command[0]} was ended: it had not compiled a kernel in {SECONDS} s"
        raise NoCompilerError(what) from None
    except (OSError, AttributeError) as e:
        raise NoCompilerError(f"{directory}: {e}") from None
    run.argtypes, run.restype = [ctypes.c_void_p], ctypes.c_int
    return run


def _only_we_can_write(path: Path, found: os.stat_result) -> bool:
    """True if nobody but this user may have written there."""
    kind = stat.S_ISDIR if path.suffix != ".so" else stat.S_ISREG
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_complete_elf(library: Path) -> bool:
    """True if an ELF file's last part is there, its section headers; without it, a SIGBUS."""
    with library.open("rb") as file:
        at, size, count = struct.unpack_from("<Q10x2H", file.read(64), 40)
        return bool(at + size * count <= os.fstat(file.fileno()).st_size)


def _load_kept_function(library: Path) -> Any:
    """The function of a library of the folder; None if there is none to be trusted."""
    try:
        if not _only_we_can_write(library, library.lstat()) or not _is_complete_elf(library):
            return None
        run = ctypes.PyDLL(str(library)).run
        os.utime(library)
    except (OSError, AttributeError, struct.error):  # none, a part of one, or none of ours
        return None
    return run


def _compile_library(command: list[str], text: str, library: Path) -> None:
    """Compile beside and move, so that nobody loads a part of a file."""
    handle, name = tempfile.mkstemp(".so", dir=library.parent)
    os.close(handle)
    try:
        _run_compiler([*command, f"-I{HEADERS[0].parent}", "-x", "c", "-", "-o", name, "-lm"], text)
        os.chmod(name, 0o600)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _run_compiler(line: list[str], text: str) -> str:
    """Return what the compiler says on stderr. Raises CalledProcessError and TimeoutExpired."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(text.encode(), SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):  # with what it has started itself
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line, stderr=said)
    return said.decode(errors="replace")


def _prune_library_folder(directory: Path) -> None:
    """Delete what was used longest ago, where there is more than `KEPT`."""
    names = os.listdir(directory)
    if len(names) <= KEPT:
        return
    used = []
    for name in names:
        with suppress(OSError):  # another process has deleted it
            used.append((os.stat(directory / name).st_mtime, name))
    for _, name in sorted(used)[:-KEPT]:
        (directory / name).unlink(missing_ok=True)
