"""Print what a shell needs to try the examples: eval "$(.venv/bin/python docs/examples/env.py)".

This Python's folder and a `clang` (the machine's, or the one inside PyPI's ziglang) go to the front
of PATH; NVIDIA's compilers, from the wheels of the extra cuda-tools, are named by variables. With
these, tinygrad's CPU device runs, and kernels for an Orin compile on any machine.
"""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from orinllm.gpu.host_compiler import compiler_environment

WHEELS = {
    "NVRTC_PATH": "cuda_nvrtc/lib/libnvrtc.so.*",
    "NVJITLINK_PATH": "nvjitlink/lib/libnvJitLink.so.*",
    "CUDA_PATH": "cuda_runtime",
}


def print_exports() -> None:
    """Print one export a line; a wheel that is not installed is left out."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tinygrad-orin"
    found = compiler_environment(cache / "clang", os.environ)
    folders = [str(Path(sys.executable).parent), found.get("PATH", os.environ["PATH"])]
    variables = {"PATH": os.pathsep.join(folders)}
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        for name, pattern in WHEELS.items():
            for path in sorted(Path(folder).glob(pattern)):
                variables[name] = str(path)
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    print_exports()
