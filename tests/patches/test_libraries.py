"""0009: CUDA headers in several folders, libraries by explicit paths."""

import shutil
from pathlib import Path

import pytest
from tests.patches.conftest import COMPILERS, CUDA_HEADER, Python, wheel_file

NO_LIBATOMIC = "import ctypes.util; ctypes.util.find_library = lambda name: None\n"
FENCE = "from tinygrad.runtime.support.system import System; System.memory_barrier()\n"
HALF_KERNEL = """
from tinygrad import Tensor, dtypes
import sys
(Tensor.empty(64, 64, dtype=dtypes.half) @ Tensor.empty(64, 64, dtype=dtypes.half)).realize()
"""


@pytest.fixture
def split_headers(tmp_path: Path) -> list[Path]:
    """The CUDA headers as NixOS has them: in two outputs, neither called include."""
    whole = wheel_file(CUDA_HEADER).parent
    folders = [tmp_path / "cudart-dev", tmp_path / "fp16-dev"]
    for folder in folders:
        folder.mkdir()
    for path in whole.iterdir():
        to = folders["fp16" in path.name] / path.name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, to)
    assert (folders[1] / "cuda_fp16.h").is_file() and (folders[0] / "vector_types.h").is_file()
    return folders


def test_headers_in_several_folders(python: Python, split_headers: list[Path]) -> None:
    settings = {"DEV": "NULL:CUDA:sm_87", "CUDA_PATH": "/nonexistent"}
    done = python("-c", HALF_KERNEL, **settings)
    assert done.returncode == 1 and "cuda_fp16.h" in done.stderr
    for folder in split_headers:  # one alone is not enough
        assert python("-c", HALF_KERNEL, **settings, CUDA_INCLUDE_PATH=str(folder)).returncode == 1
    done = python(
        "-c", HALF_KERNEL, **settings, CUDA_INCLUDE_PATH=":".join(map(str, split_headers))
    )
    assert done.returncode == 0, done.stderr


def find_libatomic() -> Path:
    places = ("/usr/lib", "/lib", "/usr/lib64")
    found = [p for place in places for p in Path(place).rglob("libatomic.so.1")]
    assert found, "this machine has no libatomic"
    return found[0]


def test_libatomic_by_path(python: Python, tmp_path: Path) -> None:
    # Under another name and place, so that nothing but the variable can find it.
    moved = tmp_path / "store" / "atomic-output.so"
    moved.parent.mkdir()
    shutil.copy(find_libatomic(), moved)
    code = NO_LIBATOMIC + FENCE + "print(System.atomic_lib._name)"
    done = python("-c", code, LIBATOMIC_PATH=str(moved))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(moved)


def test_missing_libatomic_says_what_to_set(python: Python) -> None:
    # No folder that tinygrad looks into has a library.
    hidden = (
        "import pathlib; real = pathlib.Path.is_dir\n"
        "pathlib.Path.is_dir = lambda self: 'lib' not in str(self) and real(self)\n"
    )
    done = python("-c", "import tinygrad.runtime.support.system\n" + NO_LIBATOMIC + hidden + FENCE)
    assert done.returncode == 1
    assert "failed to load library libatomic: try setting LIBATOMIC_PATH?" in done.stderr
    assert "undefined symbol" not in done.stderr


@pytest.mark.parametrize("variable", COMPILERS)
def test_compilers_by_path(python: Python, variable: str) -> None:
    """nvrtc and nvJitLink need no patch: a file in <NAME>_PATH is enough, and both compile."""
    target = {"NVRTC_PATH": "NULL:CUDA:sm_87", "NVJITLINK_PATH": "NULL:PTX:sm_87"}[variable]
    assert python("-c", HALF_KERNEL, DEV=target).returncode == 0
    done = python("-c", HALF_KERNEL, DEV=target, **{variable: "/nonexistent.so"})
    assert done.returncode == 1 and f"try setting {variable}?" in done.stderr


def test_libc_by_path(python: Python, tmp_path: Path) -> None:
    """libc neither: LIBC_PATH is what a system without /lib needs."""
    found = next(p for p in Path("/lib").rglob("libc.so.6"))
    code = "from tinygrad.runtime.autogen import libc; print(libc.dll._name)"
    done = python("-c", code, LIBC_PATH=str(found))
    assert done.returncode == 0 and done.stdout.strip() == str(found)
