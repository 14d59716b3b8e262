"""Cubins and their PTX: recognition by content, the compiler hook, the directory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.simulator.gpu.rig import CUBIN, EQUAL, EQUAL_PTX, PTX, SECTIONS, Rig, launch, u64

from nvgpusim import cli, options
from nvgpusim.errors import SimError
from nvgpusim.orin.gpu import bench, programs

SIMULATOR = Path(programs.__file__).resolve().parents[3]
TEXT = SECTIONS[".text.k_set"].data


def test_found_by_content_in_another_process(tmp_path: Path) -> None:
    first = programs.ProgramStore(tmp_path)
    assert len(first.register_pair(CUBIN.read_bytes(), PTX.read_bytes())) == 10
    assert first.register_pair(CUBIN.read_bytes(), PTX.read_bytes()) == [], "known already"
    second = programs.ProgramStore(tmp_path)
    (found,) = second.find_by_code(TEXT + bytes(100))
    assert found.name == "k_set"
    assert found.registers > 0
    assert second.find_by_code(bytes(512)) == []
    assert second.find_by_code(TEXT[:128] + bytes(len(TEXT))) == [], "same beginning, other code"


def test_equal_code_of_several_sources(tmp_path: Path) -> None:
    programs.ProgramStore(tmp_path).register_pair(EQUAL.read_bytes(), EQUAL_PTX.read_bytes())
    found = programs.ProgramStore(tmp_path).find_by_code(SECTIONS[".text.k_fill"].data)
    names = {p.name: p for p in found}
    assert set(names) == {"k_fill", "k_fill_drops", "k_fill_ignores"}
    assert [names[n].load_instruction_count for n in sorted(names)] == [0, 1, 0]
    drops = names["k_fill_drops"]
    one, two = names["k_fill"].bank0, drops.bank0
    assert (one, two) == (0x160 + 8, 0x160 + 16)
    for order in ([drops, *found], [*found, drops]):
        assert programs.best_program(order, one).name == "k_fill"
        assert programs.best_program(order, two).name == "k_fill_ignores"
        assert programs.best_program(order, two // 16).load_instruction_count == 0
        assert programs.best_program(order, 1).load_instruction_count == 0, "a size of nobody's"
    assert programs.best_program([drops], one) is drops


@pytest.mark.parametrize("shift", [0, 4], ids=["bytes", "units of 16"])
@pytest.mark.parametrize("parameters", [(), (4,), (0,)], ids=["one", "two", "null"])
def test_a_dropped_load_is_not_run(parameters: tuple[int, ...], shift: int) -> None:
    rig = Rig()
    rig.setup()
    out = rig.alloc(4096)
    size = -(-(0x160 + 8 + 8 * len(parameters)) // (1 << shift))
    qmd = rig.qmd("k_fill", u64(out, *parameters), b1087_1075=size)
    rig.submit(launch(qmd))
    rig.done()
    rig.close()
    assert (rig.at(out, 32) == 77).all() and not rig.at(out, 64)[32:].any()


def test_relocated_words_do_not_count() -> None:
    program = programs.Program("k", b"\1" * 4 + bytes(4) + b"\2" * 120, (4,), "", 1, 0, 0)
    assert program.matches_image(b"\1" * 4 + b"\xff" * 4 + b"\2" * 120 + b"more")
    assert not program.matches_image(b"\1" * 3 + b"\0" + b"\xff" * 4 + b"\2" * 120)
    assert not program.matches_image(b"\1")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(SimError, match="no cubin"):
        programs.ProgramStore(tmp_path).register_pair(b"not ELF", "")
    known = programs.ProgramStore(tmp_path)
    for program in known.register_pair(CUBIN.read_bytes(), ".version 8.0\n.target sm_87\n"):
        with pytest.raises(SimError, match="has no such entry"):
            program.compiled_code()


def test_unwritable_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    known = programs.ProgramStore(tmp_path / "file")
    assert known.register_pair(CUBIN.read_bytes(), PTX.read_bytes())
    assert "cannot keep PTX" in capsys.readouterr().err


def test_directory_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVGPUSIM_CACHE", "/somewhere")
    assert options.cache_directory() == Path("/somewhere")
    monkeypatch.delenv("NVGPUSIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert options.cache_directory() == Path("/xdg/nvgpusim")


def test_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", programs.ProgramStore(tmp_path / "kept"))
    assert cli.main(["programs", str(CUBIN), str(PTX)]) == 0
    assert "k_add: " in capsys.readouterr().out
    kept = len(list(tmp_path.glob("kept/*/*.ptx")))
    assert kept == 10
    other = tmp_path / "other.ptx"
    other.write_text(".version 8.0\n.target sm_87\n")
    for arguments, words in (
        ([CUBIN], "Missing argument 'PTX'"),
        ([PTX, PTX], f"{PTX}: this is no cubin"),
        ([CUBIN, CUBIN], f"{CUBIN}: not PTX"),
        ([CUBIN, tmp_path / "none"], f"{tmp_path / 'none'}: No such file"),
        ([CUBIN, other], "the PTX kept for kernel"),
    ):
        assert cli.main(["programs", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert len(list(tmp_path.glob("kept/*/*"))) == 2 * kept, "what is wrong is not kept"


class _Library(ModuleType):
    """NVRTC and nvJitLink as far as the hook knows them."""

    def __init__(self, ptx: bytes) -> None:
        super().__init__("library")
        self.ptx = ptx
        self.nvrtcGetCUBIN = self.give
        self.nvJitLinkGetLinkedCubin = self.give
        self.nvJitLinkAddData = self.add
        self.added: list[Any] = []

    @staticmethod
    def give(handle: Any, out: Any) -> int:
        ctypes.memmove(out, CUBIN.read_bytes(), ctypes.sizeof(out))
        return 0

    def add(self, handle: Any, kind: Any, data: Any, size: Any, name: Any) -> int:
        self.added.append(data)
        return 0

    def nvrtcGetPTXSize(self, prog: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = len(self.ptx) + 1
        return 0

    def nvrtcGetPTX(self, prog: Any, out: Any) -> int:  # noqa: N802
        out.raw = self.ptx + b"\0"
        return 0


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> programs.ProgramStore:
    fresh = programs.ProgramStore(tmp_path)
    monkeypatch.setattr(programs, "PROGRAMS", fresh)
    return fresh


def test_nvrtc_hook(known: programs.ProgramStore) -> None:
    library = _Library(PTX.read_bytes())
    programs.hook_nvrtc(library)
    out = ctypes.create_string_buffer(CUBIN.stat().st_size)
    assert library.nvrtcGetCUBIN(None, out) == 0
    assert known.find_by_code(TEXT)


def test_jitlink_hook(known: programs.ProgramStore) -> None:
    library = _Library(b"")
    programs.hook_jitlink(library)
    out = ctypes.create_string_buffer(CUBIN.stat().st_size)
    handle = ctypes.c_void_p(0x1234)
    assert library.nvJitLinkAddData(handle, 2, PTX.read_bytes(), 1, b"") == 0
    assert library.nvJitLinkGetLinkedCubin(handle, out) == 0
    assert known.find_by_code(TEXT)
    assert len(library.added) == 1


class _Nvcc:
    """tinygrad's NVCCCompiler, with kept files in place of the program."""

    def __init__(self, arch: str, ptx: bool = True, extra_options: Sequence[str] = ()) -> None:
        self.arch, self.ptx, self.extra_options = arch, ptx, extra_options

    def compile(self, src: str) -> bytes:
        assert (self.arch, src, self.extra_options) == ("sm_87", "source", ["-O3"])
        return (PTX if self.ptx else CUBIN).read_bytes()


def test_nvcc_hook(known: programs.ProgramStore) -> None:
    module = ModuleType("compilers")
    module.NVCCCompiler = type("NVCCCompiler", (_Nvcc,), {})  # type: ignore[attr-defined]
    programs.hook_nvcc(module)
    assert module.NVCCCompiler("sm_87", True, ["-O3"]).compile("source") == PTX.read_bytes()
    assert not known.find_by_code(TEXT), "PTX alone"
    assert module.NVCCCompiler("sm_87", False, ["-O3"]).compile("source") == CUBIN.read_bytes()
    assert known.find_by_code(TEXT)


def test_hook_survives_what_it_cannot_read(
    known: programs.ProgramStore,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    library = _Library(b"ptx")
    monkeypatch.setattr(library, "nvrtcGetCUBIN", lambda prog, out: 0)
    programs.hook_nvrtc(library)
    assert library.nvrtcGetCUBIN(None, ctypes.create_string_buffer(64)) == 0
    assert "not kept" in capsys.readouterr().err


def test_install_hooks_modules_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fakegrad"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nvrtc.py").write_text("seen = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(programs, "_HOOKS", {"fakegrad.nvrtc": lambda m: m.seen.append("hooked")})
    for finder in [f for f in sys.meta_path if isinstance(f, programs._HookingFinder)]:
        sys.meta_path.remove(finder)
    programs.install_hooks()
    programs.install_hooks()
    import fakegrad.nvrtc  # type: ignore[import-not-found]

    assert fakegrad.nvrtc.seen == ["hooked"]


def test_benchmark_measures_and_checks() -> None:
    result = bench.measure_speed(3)
    assert 0 < float(result["matmul, CPU seconds (median)"]) < 2
    assert float(result["matmul 256x256x256 fp32, seconds (median)"]) > 0
    assert int(result["empty launches per CPU second"]) > 10


COMPILE = """
from nvgpusim import cli, options
from nvgpusim.orin.gpu import programs
programs.install_hooks()
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler, NVPTXCompiler
import sys
c = 'extern "C" __global__ void from_c(int *x) { x[threadIdx.x] += 3; }'
p = '.version VERSION\\n.target TARGET\\n.address_size 64\\n'
p += '.visible .entry from_ptx(.param .u64 x)\\n{ ret; }'
for cubin in (NVRTCCompiler("sm_87", ptx=False).compile(c), NVPTXCompiler("sm_87").compile(p)):
    for s in programs._elf_sections(cubin):
        if s.name.startswith(".text."):
            print(programs.PROGRAMS.find_by_code(s.data)[0].compiled_code().kernel.name)
"""


def test_tinygrads_compilers_leave_their_ptx(tmp_path: Path) -> None:
    """The real NVRTC 12.6 and nvJitLink 12.6, reached as tinygrad reaches them."""
    pytest.importorskip("tinygrad")
    nvidia = pytest.importorskip("nvidia")
    root = Path(next(iter(nvidia.__path__)))
    nvrtc = root / "cuda_nvrtc/lib/libnvrtc.so.12"
    jitlink = root / "nvjitlink/lib/libnvJitLink.so.12"
    if not nvrtc.exists() or not jitlink.exists():
        pytest.skip("the wheels of the extra cuda-tools are not installed")
    env = os.environ | {
        "NVGPUSIM_CACHE": str(tmp_path), "PYTHONPATH": str(SIMULATOR), "NVRTC_PATH": str(nvrtc),
        "NVJITLINK_PATH": str(jitlink), "LD_LIBRARY_PATH": f"{nvrtc.parent}:{jitlink.parent}",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["from_c", "from_ptx"]
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2
