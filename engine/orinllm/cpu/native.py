"""The CPU path's C as machine code of this process, and the threads that run it together.

tinygrad's CPU device does the same. Its imports take half a second of a start, and LLVM's library
as much memory as a small model's weights: it is asked once, to compile, and its answer is kept.
"""

import ctypes
import hashlib
import mmap
import os
import platform
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from orinllm.errors import BadInput
from orinllm.gpu.host_compiler import provide_compiler, user_cache_folder

#: The program's sources, in the order of their one text.
SOURCES = tuple(
    Path(__file__).parent / f"{name}.c"
    for name in ("packed", "rows", "recurrent", "encoder", "decoder")
)
# What "native" depends on: a home folder may be that of several machines (/proc/cpuinfo).
_MODEL = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
_DIGEST = hashlib.sha256().digest_size


def compute_thread_count() -> int:
    """Return how many threads compute: CPU_COUNT's, or those that this process may run on."""
    asked = os.environ.get("CPU_COUNT")
    if asked is None:
        return len(os.sched_getaffinity(0))
    if not asked.isdecimal() or int(asked) < 1:
        raise BadInput(f"CPU_COUNT={asked}: a number of threads, 1 or more, was expected")
    return int(asked)


class NativeCode:
    """Machine code that begins with decoder.c's only function. One call runs at a time."""

    def __init__(self, image: bytes) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, len(image), flags, rights)
        self._memory.write(image)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if platform.machine() == "aarch64":  # whose instruction cache does not see writes
            clear = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
            clear(ctypes.c_void_p(address), ctypes.c_void_p(address + len(image)))
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int)(address)
        self._lock, self._ended = threading.Lock(), threading.Semaphore(0)
        self._helpers: list[SimpleQueue[int]] = []  # of each thread but the caller's: what to run

    def run_operations(self, state: int, cores: int) -> None:
        """Run the list of operations at an address of a `RunStruct` on so many cores, and wait."""
        with self._lock:
            while len(self._helpers) < cores - 1:
                self._start_helper_thread(SimpleQueue())
            for helper in self._helpers[: cores - 1]:
                helper.put(state)
            interrupted = False
            try:
                self._call(state, 0)
            except KeyboardInterrupt:  # the helpers do what is left
                interrupted = True
            for _ in range(cores - 1):
                while True:
                    with suppress(KeyboardInterrupt):
                        self._ended.acquire()
                        break
                    interrupted = True
            if interrupted:
                raise KeyboardInterrupt

    def _start_helper_thread(self, states: SimpleQueue[int]) -> None:
        self._helpers.append(states)
        core = len(self._helpers)

        def work() -> None:
            while True:
                self._call(states.get(), core)
                self._ended.release()

        threading.Thread(target=work, name=f"cpu-{core}", daemon=True).start()


@cache
def load_native_code() -> NativeCode:
    """Return the program; raises BadInput where it has to be compiled and no compiler is here."""
    source = "".join(path.read_text() for path in SOURCES)
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(name := platform.machine().lower(), name)
    key = "\n".join((machine, _cpu_description(), os.environ.get("CC", ""), source))
    # Beside tinygrad's cache, where one is asked for: an empty one is a cold start.
    kept = Path(asked).parent if (asked := os.environ.get("CACHEDB")) else user_cache_folder()
    path = kept / "cpu" / hashlib.sha256(key.encode()).hexdigest()
    if (image := _read_cached_code(path)) is None:
        from tinygrad.runtime.support.compiler_cpu import ClangJITCompiler

        provide_compiler()
        image = bytes(ClangJITCompiler([machine, "native"]).compile(source))
        with suppress(OSError):  # it is compiled again
            _write_cached_code(path, image)
    return NativeCode(image)


def _cpu_description() -> str:
    """Return what the kernel says that the first core is."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return ""
    return "\n".join(line for line in first.splitlines() if line.startswith(_MODEL))


def _read_cached_code(path: Path) -> bytes | None:
    """Return machine code that was kept; None where there is none, or not all of it."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, image = data[:_DIGEST], data[_DIGEST:]
    return image if hashlib.sha256(image).digest() == digest else None


def _write_cached_code(path: Path, image: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
        new.write(hashlib.sha256(image).digest() + image)
    os.replace(new.name, path)
