"""nvcc for the simulator: CUDA sources to programs on the stand-ins, or to PTX."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import SimError
from ..options import cache_directory
from .program_runner import build_stand_in, cuda_include_folder

GENERATED = ("-no-compress", "-gencode", "arch=compute_87,code=compute_87", "-lineinfo")


def nvcc_path() -> Path:
    """nvcc of CUDA_PATH, of PATH, or of NVIDIA's wheels. Raises SimError."""
    given = os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc")
    places = [Path(given, "bin/nvcc")] if given else []
    places += [Path(found)] if found else []
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        places.append(Path(place, "cu13/bin/nvcc"))
    for path in places:
        if path.is_file():
            return path
    raise SimError("nvcc is missing: pip install 'nvgpusim[cuda]', or set CUDA_PATH")


def _run_nvcc(command: Sequence[str | Path], what: str) -> None:
    try:
        done = subprocess.run(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, check=False
        )
    except OSError as error:
        raise SimError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise SimError(f"{what} does not compile:\n{done.stderr.rstrip()}")


def compile_program(source: Path, goal: Path, options: Sequence[str] = ()) -> None:
    """Compile a CUDA source with a main to a program for `nvgpusim cuda`. Raises SimError."""
    if not source.is_file():
        raise SimError(f"{source}: No such file")
    library = build_stand_in(cuda_include_folder(), cache_directory())
    command: list[str | Path] = [nvcc_path(), *GENERATED, "-g", "-cudart", "none", *options, source]
    _run_nvcc([*command, f"-L{library}", "-lcudart", "-lcuda", "-o", goal], str(source))


def compile_to_ptx(source: Path, goal: Path, options: Sequence[str] = ()) -> None:
    """Compile a CUDA source to PTX. Raises SimError."""
    if not source.is_file():
        raise SimError(f"{source}: No such file")
    command: list[str | Path] = [nvcc_path(), "-ptx", "-arch=compute_87", "-lineinfo", *options]
    _run_nvcc([*command, source, "-o", goal], str(source))
