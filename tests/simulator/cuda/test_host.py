"""Mistakes of the host side: each is a finding with its line, its right form is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.patches.conftest import wheel_file
from tests.simulator.cuda.test_cuda import FLAGS, run

from nvgpusim.cuda.program_runner import build_stand_in
from nvgpusim.cuda.server import SIZE, CudaServer
from nvgpusim.cuda.source_lines import SourceLines

SOURCE = Path(__file__).parent / "host.cu"
FAULTS = {
    "copy_too_much": "a copy or memset writes 65540 bytes: 4 bytes past the end of buffer (65536",
    "copy_after_free": "a copy or memset reads 65536 bytes: 0x1000004000 is +0 in buffer",
    "memset_too_much": "a copy or memset writes 101 bytes: 1 bytes past the end of buffer (100",
    "host_reads": "the host touches device memory: buffer (65536 bytes",
    "block_too_big": "kernel _Z4fillPiii is launched with a block of (2048, 1, 1)",
    "grid_too_big": "kernel _Z4fillPiii is launched with a grid of (1, 70000, 1)",
    "grid_of_none": "kernel _Z4fillPiii is launched with a grid of (0, 1, 1)",
    "shared_without_asking": "65536 bytes of dynamic shared memory: at most 49152 without",
    "leak": "1 buffers of 65536 bytes are never freed",
    "leak_pinned": "1 pinned buffers of 65536 bytes are never freed",
    "copied_unwritten": "init: read (",
    "free_twice": "cudaFree of what is no buffer: 0x1000004000 is +0 in buffer",
    "managed_freed": "the host touches device memory: 0x1000004000 is +0 in buffer (65536 bytes",
    "managed_early": "while work on it may be under way",
    "pinned_early": "pinned memory while work on it may be under way",
    "source_changed": "pinned memory while work on it may be under way",
    "streams_race": "race: kernel _Z3sumPKiPii reads",
    "heap_late_read": "free: read (",
    "heap_overflow": "is 0 bytes after the end of malloc (10 bytes",
    "heap_unwritten": "init: read (",
    "heap_free_twice": "in malloc (8 bytes",
    "heap_leak": "16 pieces of kernels' heap of 384 bytes are never freed",
}
RIGHT = (
    "shared_with_asking", "managed_late", "pinned_late", "streams_event", "streams_wait",
    "streams_halves", "memory_falls", "polling", "in_order", "pinned_again", "volumes",
    "hints", "heap",
)  # fmt: skip


@pytest.fixture(scope="module")
def cuda() -> Path:
    return wheel_file("cu13/bin/nvcc").parents[1]


@pytest.fixture(scope="module")
def program(cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host")
    library = build_stand_in(cuda / "include", folder)
    command: list[str | Path] = [cuda / "bin/nvcc", *FLAGS, "-g", "-cudart", "none", SOURCE]
    command += [f"-L{library}", "-lcudart", "-lcuda", "-o", folder / "host"]
    subprocess.run(list(map(str, command)), check=True)
    return folder / "host"


def line(name: str) -> int:
    """The line of a function's fault, or of the function that it calls with an argument."""
    text = SOURCE.read_text().splitlines()
    at = next(n for n, row in enumerate(text) if row.startswith(f"static int {name}("))
    if "return" in text[at]:
        return line(text[at].split("return ")[1].split("(")[0])
    return next(n for n in range(at, len(text)) if "FAULT" in text[n]) + 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_mistake_is_a_finding_with_its_line(cuda: Path, program: Path, name: str) -> None:
    done = run(cuda, "--sanitize", "all", program, name)
    assert FAULTS[name] in done.stderr
    assert "1 findings" in done.stderr
    if name not in ("streams_race", "copied_unwritten") and "heap" not in name:
        # those name kernels, whose lines this program has not
        assert f"host.cu:{line(name)}" in done.stderr
    assert done.returncode == (139 if name in ("host_reads", "managed_freed") else 3)


def test_several_mistakes_of_one_program(cuda: Path, program: Path) -> None:
    done = run(cuda, "--sanitize", "all", program, "several")
    told = [x.removeprefix("nvgpusim: note: ") for x in done.stderr.splitlines() if "note" in x]
    words = {
        "KIND": "calls: a copy from device to host is said to be from host to device",
        "SYMBOL": "calls: a copy of 40 bytes at offset 0 of a variable that has 32",
        "ROWS": "calls: rows of 20 bytes do not fit pitches of 16 and 16",
        "OVERLAP": "calls: a copy of 128 bytes from 0x1000004000 to 0x1000004040 overlaps itself",
        "TOGETHER": "calls: a cooperative launch of 1024 blocks: at most 96 are resident",
    }
    later = {
        "DEVICE": "calls: cudaFreeHost of 0x1000004000, which cudaMalloc has given",
        "HOST": "calls: a memset of the host's own memory",
        "PAGEABLE": "calls: cudaFreeHost of 0x",
        "RECORDED": "calls: cudaEventElapsedTime of an event that was never recorded",
        "EVENT": "calls: an event is used after its cudaEventDestroy",
        "STREAM": "calls: a stream is used after its cudaStreamDestroy",
    }
    rows = SOURCE.read_text().splitlines()
    both = [*zip(words.items(), told, strict=False), *zip(later.items(), told[7:], strict=True)]
    for (word, text), got in both:
        at = next(n for n, row in enumerate(rows, 1) if row.endswith(f"// {word}"))
        assert got.startswith(text) and ", at " in got and got.endswith(f"host.cu:{at}")
    assert "race: kernel _Z4fillPiii writes 0x1000004000 in stream 1, which a copy" in told[5]
    assert "race: cudaFreeAsync writes" in told[6] and "in stream 2" in told[6]
    assert done.returncode == 3


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_form_is_none(cuda: Path, program: Path, name: str) -> None:
    done = run(cuda, "--sanitize", "all", program, name)
    assert (done.returncode, done.stderr.count("note")) == (0, 0), done.stderr


def test_without_checks_the_program_does_as_it_likes(cuda: Path, program: Path) -> None:
    assert run(cuda, program, "managed_early").stderr.endswith(" 0 findings\n")
    assert run(cuda, program, "leak").returncode == 0


def test_a_template_has_its_callers_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc 13.0 gives the code of templates its own file, as addr2line says."""
    tool = tmp_path / "addr2line"
    tool.write_text("#!/bin/sh\nprintf 'made\\n/tmp/tmpxft_1-6_x.cudafe1.cpp:10\\n%s' \"$ADDED\"\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("ADDED", "main\nx.cu:47\n")
    assert SourceLines("program").source_line((1, 2)) == "x.cu:47"
    monkeypatch.setenv("ADDED", "_start\n??:?\n")
    assert SourceLines("program").source_line((1, 2)) == "/tmp/tmpxft_1-6_x.cudafe1.cpp:10"


def test_a_freed_address_comes_again_late() -> None:
    """A kernel that uses a freed pointer must not find the next buffer there."""
    server = CudaServer()
    first = server.malloc(4000)
    server.arena[:4000] = 7
    assert server.free(first) == 0 and not server.arena[:4000].any()
    assert server.malloc(4000) > first
    large = server.malloc(SIZE // 2)
    assert server.free(large) == 0 and server.malloc(SIZE // 2) in (first, large)
    assert not any(server.free(server.malloc(1 << 19)) for _ in range(SIZE >> 19))
