"""`nvgpusim cuda`: build the stand-ins once, start the program with them, serve it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import SimError
from ..options import cache_directory
from ..ptx.native.build import compiler_command as c_compiler
from .server import BASE, SIZE, CudaServer

HERE = Path(__file__).parent
SOURCES = ("standin.c", "pending.c", "cudart.c", "cudart_memory.c", "cuda.c")
HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")
LIBRARY = "libnvgpusim-cuda.so"
NAMES = ("libcudart.so", "libcudart.so.12", "libcudart.so.13", "libcuda.so", "libcuda.so.1")
"""Names that programs ask for; one library, as both interfaces share a connection."""


def cuda_include_folder() -> Path:
    """CUDA's include folder: of CUDA_PATH, of the nvcc on PATH, of a wheel. Raises SimError."""
    nvcc, given = shutil.which("nvcc"), os.environ.get("CUDA_PATH")
    places = [Path(given)] if given else []
    places += [Path(nvcc).resolve().parents[1]] if nvcc else []
    spec = importlib.util.find_spec("nvidia")
    places += [Path(p, "cu13") for p in spec.submodule_search_locations or ()] if spec else []
    for place in places:
        for include in (Path(place, "include"), Path(place, "targets/x86_64-linux/include")):
            # One of PyPI's wheels has the first file without the second, which it includes.
            if all((include / name).is_file() for name in HEADERS):
                return include
    raise SimError(
        "CUDA's headers are missing: set CUDA_PATH to the folder of the CUDA that compiled the "
        f"program, which has include/{HEADERS[1]}"
    )


def build_stand_in(include: Path, cache: Path) -> Path:
    """The folder with the stand-in, made with $CC (cc) where it is not there yet."""
    sources = [(HERE / name).read_bytes() for name in ("standin.h", "cudart.h", *SOURCES)]
    version = (include / "cuda.h").read_bytes()
    key = hashlib.sha256(b"\0".join((*sources, version, str(include).encode()))).hexdigest()[:16]
    folder = cache / f"cuda-{key}"
    if folder.is_dir():
        return folder
    compiler = c_compiler()
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache))
    try:
        major = next(
            x.split()[2] for x in version.splitlines() if x.startswith(b"#define CUDA_VERSION")
        )
        script = scratch / "versions"
        script.write_text(f"libcudart.so.{int(major) // 1000} {{ global: *; }};\n")
        command = [*compiler, "-shared", "-fPIC", "-O1", "-w", "-fvisibility=hidden"]
        command += ["-D_GNU_SOURCE", f"-I{include}", f"-Wl,-soname,{LIBRARY},--no-undefined"]
        command += [f"-Wl,--version-script={script}"]
        command += [*(str(HERE / s) for s in SOURCES), "-o", str(scratch / LIBRARY), "-lpthread"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SimError(f"{compiler[0]}: {error.strerror}: set CC to a C compiler") from error
        if done.returncode:
            line = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr)
            raise SimError(f"{compiler[0]}: the stand-ins do not compile: {line}")
        for name in NAMES:
            (scratch / name).symlink_to(LIBRARY)
        try:
            scratch.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def run_program(argv: Sequence[str], server: CudaServer, environment: Mapping[str, str]) -> int:
    """Start a program with the stand-ins and serve it; returns its exit status."""
    folder = build_stand_in(cuda_include_folder(), cache_directory())
    mine, its = socket.socketpair()
    paths = os.pathsep.join(filter(None, (str(folder), environment.get("LD_LIBRARY_PATH"))))
    given = {
        "LD_LIBRARY_PATH": paths,
        "NVGPUSIM_CUDA": f"{its.fileno()} {server.fd} {BASE:x} {SIZE:x} {int(server.late)}",
    }
    with mine, its:
        fds = (its.fileno(), server.fd)
        try:
            process = subprocess.Popen(argv, env={**environment, **given}, pass_fds=fds)
        except OSError as error:
            raise SimError(f"{argv[0]}: {error.strerror}") from error
        its.close()
        server.lines.program = os.path.realpath(shutil.which(argv[0]) or argv[0])
        thread = threading.Thread(target=server.serve_requests, args=(mine,), daemon=True)
        thread.start()
        status = process.wait()
        thread.join()
        if status >= 0:
            server.report_leaks()
    return status if status >= 0 else 128 - status
