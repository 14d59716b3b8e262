"""CUDA programs, compiled by nvcc from sources that know nothing of the simulator, run on it."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patches.conftest import wheel_file
from tests.simulator.ptx.machine import kernel

from nvgpusim.allocated_pieces import AllocatedPieces
from nvgpusim.cuda.fatbin import MAGIC, NoPtxError, ptx_of
from nvgpusim.cuda.heap import DeviceHeap
from nvgpusim.cuda.program_runner import build_stand_in, cuda_include_folder
from nvgpusim.cuda.server import (
    BAD_SIZE,
    BASE,
    INVALID,
    LIMIT,
    NO_IMAGE,
    NO_KERNEL,
    SIZE,
    STREAMS,
    CudaServer,
)
from nvgpusim.errors import SimError

SOURCES = Path(__file__).parent
PROGRAMS = sorted(path.stem for path in (SOURCES / "programs").glob("*.cu"))
WATCHED = "race,init,sync,bounds,calls"
FLAGS = ("-no-compress", "-gencode", "arch=compute_87,code=compute_87", "-std=c++17")


@pytest.fixture(scope="module")
def cuda() -> Path:
    """CUDA's folder: nvcc, headers."""
    return wheel_file("cu13/bin/nvcc").parents[1]


@pytest.fixture(scope="module")
def programs(cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All programs in one executable: nvcc reads CUDA's headers once."""
    folder = tmp_path_factory.mktemp("cuda")
    library = build_stand_in(cuda / "include", folder)
    command: list[str | Path] = [cuda / "bin/nvcc", *FLAGS, "-cudart", "none", f"-I{SOURCES}"]
    command += [SOURCES / "programs.cu", f"-L{library}", "-lcudart", "-lcuda"]
    command += ["-o", folder / "all"]
    subprocess.run(list(map(str, command)), check=True)
    return folder / "all"


def run(cuda: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nvgpusim", "cuda", *map(str, arguments)]
    environment = os.environ | {"CUDA_PATH": str(cuda)} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_dozen_programs_run_unchanged(cuda: Path, programs: Path) -> None:
    assert len(PROGRAMS) > 12
    done = run(cuda, "--sanitize", WATCHED, "--warps", "1", programs, *PROGRAMS)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line.split(":")[0] for line in done.stdout.splitlines() if ": passed" in line]
    assert passed == PROGRAMS
    assert "thread 0 of say, 1.00\nthread 1 of say, 1.00\nsays: passed" in done.stdout
    assert re.fullmatch(
        r"nvgpusim: \d\d launches, \d+ thread instructions, 0 findings\n", done.stderr
    )


def test_errors_are_cudas_own(cuda: Path, programs: Path) -> None:
    done = run(cuda, programs, "errors")
    assert (done.returncode, done.stdout) == (0, "errors: passed\n"), done.stderr
    assert "MMU fault: write of" in done.stderr
    assert "after the end of buffer" in done.stderr


def test_a_finding_is_an_exit_status(cuda: Path, programs: Path) -> None:
    assert run(cuda, "--sanitize", "bounds", programs, "errors").returncode == 3


def test_a_program_alone_says_how_it_is_started(cuda: Path, programs: Path) -> None:
    folder = str(build_stand_in(cuda / "include", programs.parent))
    done = subprocess.run(
        [programs, "reduce"],
        env={"LD_LIBRARY_PATH": folder},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 125
    assert done.stderr == "nvgpusim: start this program by `nvgpusim cuda`\n"


def test_a_program_with_cudas_own_runtime_says_how_it_is_built(cuda: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "own.c", tmp_path / "own"
    source.write_text("#include <cuda_runtime_api.h>\nint main() { return cudaFree(0); }\n")
    command = [os.environ.get("CC", "cc"), source, f"-I{cuda}/include", "-o", program]
    command += [f"-L{cuda}/lib", "-lcudart_static", "-lstdc++", "-ldl", "-lrt", "-lpthread"]
    subprocess.run(list(map(str, command)), check=True)
    done = run(cuda, program)
    assert done.returncode == 2
    assert done.stderr.startswith("nvgpusim: error: the program holds CUDA's own libcudart")
    assert "nvcc -cudart shared" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (("./none",), {}, "./none: No such file or directory"),
        (
            ("--sanitize", "heap", "./none"),
            {},
            "--sanitize heap: expected some of race,init,sync,bounds,calls,leaks, or all",
        ),
    ],
)
def test_bad_use_is_one_line(
    cuda: Path, arguments: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    done = run(cuda, *arguments, **variables)
    assert (done.returncode, done.stderr) == (2, f"nvgpusim: error: {said}\n")


def test_a_wheel_without_all_headers_is_passed_over(
    cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(cuda / "bin"))
    assert cuda_include_folder() == cuda / "include"
    monkeypatch.setenv("PATH", "")
    assert cuda_include_folder() == cuda / "include"  # of the wheel
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SimError, match="set CUDA_PATH to the folder of the CUDA that compiled"):
        cuda_include_folder()


def fat_binary(kind: int, packed: int, content: bytes) -> bytes:
    image = struct.pack("<HHIQI", kind, 1, 64, len(content), packed).ljust(64, b"\0") + content
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(image)) + image


def test_ptx_of_images() -> None:
    assert ptx_of(fat_binary(1, 0, b".version 8.0\0\0\0")) == ".version 8.0"
    assert ptx_of(b"// a comment\n.version 8.0\n\0") == "// a comment\n.version 8.0\n"
    for image, said in (
        (fat_binary(1, 9, b"xxxx"), "compressed: compile with nvcc -no-compress"),
        (fat_binary(2, 0, b"\x7fELF"), "no PTX among its 1 images: compile with nvcc -gencode"),
        (b"\x7fELF and more than that", "neither a fat binary nor PTX"),
        (fat_binary(1, 0, b".version 8.0")[:-9], "a damaged fat binary: its image 0 goes past"),
    ):
        with pytest.raises(NoPtxError, match=re.escape(said)):
            ptx_of(image)


def test_damaged_modules_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """400 mutants of a fat binary, of its headers above all: each is loaded, or told of."""
    draw, server, loaded = random.Random(1), CudaServer(), 0
    whole = fat_binary(1, 0, (SOURCES.parent / "ptx/recorded/kernels/tensor.ptx").read_bytes())
    for _ in range(400):
        image = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            image[draw.randrange(90 if draw.random() < 0.6 else len(image))] = draw.randrange(256)
        error, _ = server.load_module(
            bytes(image[: draw.randrange(len(image))] if draw.random() < 0.3 else image)
        )
        assert error in (0, NO_IMAGE)
        loaded += error == 0
    assert 50 < loaded < 350
    assert (
        server.load_module(b".version 8.0\n.target sm_87\n.global .u64 p = nobody;")[0] == NO_IMAGE
    )
    assert "p holds the address of nobody" in capsys.readouterr().err


KERNEL = b"""
.version 8.0
.target sm_87
.address_size 64
.visible .entry k(.param .u64 p, .param .u8 c) .maxntid 64, 1, 1 { .shared .b8 s[40]; ret; }
.extern .shared .align 16 .b8 more[];
.visible .entry grows(.param .u64 p) {
  .reg .u32 %r<2>; mov.u32 %r0, more; st.shared.u32 [%r0], %r1; ret; }
.visible .entry odd(.param .u64 p) { .reg .u64 %d<2>; no.such.thing %d0, %d1; ret; }
"""


def test_the_server_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    server = CudaServer()
    assert server.load_module(KERNEL) == (0, struct.pack("<I", 0))
    assert server.load_module(b".version 8.0\n.address_size 32\n")[0] == NO_IMAGE
    assert server.describe_kernel(0, "none") == (NO_KERNEL, b"")
    assert server.describe_kernel(1, "k") == (NO_KERNEL, b"")
    error, data = server.describe_kernel(0, "k")
    words = struct.unpack("<518I", data)
    assert (error, words[:2], words[2:6]) == (0, (0, 2), (40, 0, 64, 9))
    assert (words[6:8], words[262:264]) == ((0, 8), (8, 1))
    assert server.describe_kernel(0, "odd")[0] == 801
    assert server.describe_kernel(0, "grows")[0] == 0
    assert "a gap of the simulator" in capsys.readouterr().err
    one, clock = 1 << 32 | 1, bytes(4 * STREAMS)
    most = 163 << 42
    assert server.run_launch((0, one, one, one, 0), bytes(9) + clock) == 0
    assert server.run_launch((0, one, 65 << 32 | 1, one, 0), bytes(9) + clock) == BAD_SIZE
    assert server.run_launch((0, 1 << 32, one, one, 0), bytes(9) + clock) == BAD_SIZE
    assert server.run_launch((1 | most, one, one, one, 163 << 10), bytes(8) + clock) == 0
    assert server.run_launch((1, one, one, one, 4), bytes(8) + clock) == INVALID
    assert server.run_launch((7, one, one, one, 0), b"") == NO_KERNEL


def test_memory_comes_back() -> None:
    server = CudaServer()
    first, second, third = (server.malloc(n) for n in (1, 5000, 4096))
    assert (first, second, third) == (BASE, BASE + 8192, BASE + 8192 + 12288)
    assert server.free(second + 4) == INVALID
    assert server.free(second) == 0
    assert server.free(first) == 0
    rest = SIZE - (third + 8192 - BASE)
    assert server.malloc(rest - 4096) == third + 8192
    assert server.malloc(12000) == BASE  # both places in one
    assert server.malloc(SIZE) == 0
    assert server.vm.mapping_at(third) is not None
    assert server.vm.mapping_at(third + 4096) is None  # a page that belongs to nobody


def test_small_buffers_leave_room_for_large_ones() -> None:
    """9,000 come and go, every thousandth stays."""
    server = CudaServer()
    for n in range(9000):
        at = server.malloc(500 << 10)
        assert at and (n % 1000 == 0 or server.free(at) == 0)
    assert server.malloc(1 << 30) and server.malloc(1 << 30)
    taken = [server.malloc(500 << 10) for _ in range(3000)]  # beyond the quarter, too
    assert all(taken) and len({*taken}) == 3000


def test_a_piece_of_kernels_heap_keeps_its_room() -> None:
    heap = DeviceHeap(4096, 4160, AllocatedPieces())
    for size in (40, 8, 40):
        assert heap.malloc(size, "") == 4096
        assert heap.malloc(8, "") == 0
        assert heap.free_or_explain(4096, "") == ""


def test_the_heap_has_the_size_that_it_had_when_a_kernel_used_it() -> None:
    server = CudaServer()
    assert server.answer_request(LIMIT, (1 << 20,), b"")[0] == 0
    server._make_heap_once()
    assert server.answer_request(LIMIT, (1 << 21,), b"")[0] == INVALID
    assert server.answer_request(LIMIT, (0,), b"") == (0, struct.pack("<Q", 1 << 20))


def test_kernels_of_one_name_are_told_apart() -> None:
    """Two modules, each with a kernel `k` that writes past the end at its own line."""
    server = CudaServer(frozenset({"bounds"}))
    at = server.malloc(64)
    for number, lines in enumerate(("", "\n\n")):
        text = lines + kernel("st.global.u32 [%o+64], 1;")
        assert server.load_module(text.encode())[0] == 0
        error, data = server.describe_kernel(number, "k")
        assert error == 0
        (handle,) = struct.unpack_from("<I", data)
        a = handle | 163 << 42, 1 | 1 << 32, 1 | 1 << 32, 1 | 1 << 32, 0
        for _ in range(2):
            server.run_launch(a, struct.pack("<3Q", at, at, 0) + bytes(4 * STREAMS))
    assert len(server.findings) == 2, server.findings
