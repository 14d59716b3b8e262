"""Cubins and the PTX that they came from.

The GPU runs machine code; the simulator interprets the PTX behind it. A cubin is registered with
its PTX (:meth:`ProgramStore.register_pair`), by hand or by the compiler hook: NVRTC is asked
for the PTX of the very program whose cubin a client takes, nvJitLink's PTX input is kept
until its cubin is taken, and nvcc is started once more. Later a launch finds the program by the
bytes at its address, the sites of relocations left out. Pairs also go to a directory, so that
compile caches and worker processes of the client lose nothing: $NVGPUSIM_CACHE, else
$XDG_CACHE_HOME/nvgpusim, else ~/.cache/nvgpusim.

Different sources can have equal code: `x / nan` never loads x and is a fill with NaN, but its PTX
loads x. :func:`best_program` takes the source whose parameters are as long as the launch's bank 0
says, and of several the one that reads least: what equal code reads, every source of it reads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.abc
import importlib.machinery
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import SimError
from ...locks import GcPausingLock
from ...options import cache_directory
from ...ptx import KernelCode, PtxError, parse, translate_kernel
from . import buffer_hooks

R_64, R_LO, R_HI = 2, 0x38, 0x39
"""R_CUDA_64, R_CUDA_ABS32_LO_20, R_CUDA_ABS32_HI_20: what sm_8x cubins of nvcc and NVRTC use."""
EIATTR_MIN_STACK, EIATTR_REGCOUNT = 0x12, 0x2F
SHT_RELA, SHT_REL, SHT_SYMTAB, SHT_NOBITS = 4, 9, 2, 8
HEAD = 128
"""Bytes by which code is looked up first: .text sections of sm_8x are multiples of 128."""


@dataclass(frozen=True)
class Relocation:
    """A place in a section that holds the address of a symbol."""

    section: str
    offset: int
    kind: int
    symbol: str
    addend: int


@dataclass
class Program:
    """One kernel of a cubin; its PTX is compiled when first asked for.

    `holes`: offsets of relocated words in `text`. `registers` per thread, `min_stack`, `shared` and
    `bank0` (.nv.constant0: driver's words and parameters) in bytes.
    """

    name: str
    text: bytes
    holes: tuple[int, ...]
    ptx: str
    registers: int
    min_stack: int
    shared: int
    bank0: int = 0
    relocations: list[Relocation] = field(default_factory=list)
    constants: dict[str, int] = field(default_factory=dict)
    _codes: dict[tuple[bool, bool], KernelCode] = field(default_factory=dict)

    def compiled_code(self, *, fine: bool = False, turns: bool = False) -> KernelCode:
        """The kernel ready to run: fine for the sanitizer, with turns for drawn orders, too. Raises
        PtxError for PTX that is not known."""
        if (fine, turns) not in self._codes:
            module = _parsed(self.ptx)
            if self.name not in module.kernels:
                raise SimError(f"the PTX kept for kernel {self.name} has no such entry")
            self._codes[fine, turns] = translate_kernel(
                module, module.kernels[self.name], fine, turns
            )
        return self._codes[fine, turns]

    @property
    def load_instruction_count(self) -> int:
        """Loads in the PTX, parameters left out; PTX that cannot be parsed reads most."""
        try:
            kernel = _parsed(self.ptx).kernels.get(self.name)
        except PtxError:
            kernel = None
        if kernel is None or kernel.refusal:
            return sys.maxsize
        return sum(i.op == "ld" and "param" not in i.mods for i in kernel.instrs)

    def matches_image(self, image: bytes) -> bool:
        """True if the bytes are this program's, relocated words aside."""
        return (
            len(image) >= len(self.text)
            and _zero_holes(image[: len(self.text)], self.holes) == self.text
        )


def best_program(programs: Sequence[Program], bank0: int) -> Program:
    """The program of a launch among those with its code; `bank0`: the QMD's size field of bank 0,
    units of 16 bytes, or bytes from clients that take it for such."""

    def rank(program: Program) -> tuple[bool, int]:
        return bank0 not in (program.bank0, -(-program.bank0 // 16)), program.load_instruction_count

    return programs[0] if len(programs) == 1 else min(programs, key=rank)


_parsed = functools.cache(parse)


def _zero_holes(text: bytes, holes: Sequence[int]) -> bytes:
    if not holes:
        return text
    out = bytearray(text)
    for at in holes:
        out[at : at + 4] = bytes(4)
    return bytes(out)


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    size: int
    link: int
    info: int


def _elf_sections(cubin: bytes) -> list[_Section]:
    """Sections of a 64-bit little-endian ELF file (System V ABI, "Sections")."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise SimError("this is no cubin: a 64-bit little-endian ELF file is expected")
    (shoff,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, shoff + i * size) for i in range(count)]
    table = cubin[raw[names][4] : raw[names][4] + raw[names][5]]
    out = []
    for name, kind, _, _, offset, length, link, info, _, _ in raw:
        end = table.index(b"\0", name)
        data = b"" if kind == SHT_NOBITS else cubin[offset : offset + length]
        out.append(_Section(table[name:end].decode(), kind, data, length, link, info))
    return out


def _elf_symbols(sections: list[_Section]) -> list[tuple[str, int, int]]:
    """(name, section index, value) of every symbol."""
    for s in sections:
        if s.kind == SHT_SYMTAB:
            strings = sections[s.link].data
            out = []
            for at in range(0, len(s.data), 24):
                name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", s.data, at)
                out.append((strings[name : strings.index(b"\0", name)].decode(), index, value))
            return out
    return []


def _info_attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section."""
    out, at = [], 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            out.append((attribute, data[at : at + size]))
            at += size
    return out


def read_cubin(cubin: bytes, ptx: str) -> list[Program]:
    """The kernels of a cubin. Raises SimError for a file that is none."""
    sections = _elf_sections(cubin)
    symbols = _elf_symbols(sections)
    relocations = []
    for s in sections:
        if s.kind not in (SHT_RELA, SHT_REL):
            continue
        step = 24 if s.kind == SHT_RELA else 16
        for at in range(0, len(s.data), step):
            offset, info = struct.unpack_from("<QQ", s.data, at)
            addend = struct.unpack_from("<q", s.data, at + 16)[0] if step == 24 else 0
            name = sections[s.info].name
            relocations.append(
                Relocation(name, offset, info & 0xFFFFFFFF, symbols[info >> 32][0], addend)
            )
    constants = {
        name: value
        for name, index, value in symbols
        if name and 0 < index < len(sections) and sections[index].name.startswith(".nv.constant3")
    }
    counts: dict[tuple[int, str], int] = {}
    for s in sections:
        if s.name == ".nv.info":
            for attribute, payload in _info_attributes(s.data):
                if attribute in (EIATTR_MIN_STACK, EIATTR_REGCOUNT):
                    index, value = struct.unpack_from("<II", payload)
                    counts[attribute, symbols[index][0]] = value
    out = []
    for s in sections:
        if not s.name.startswith(".text."):
            continue
        name = s.name[6:]
        own = [r for r in relocations if r.section == s.name]
        holes = tuple(sorted(r.offset + (4 if r.kind in (R_LO, R_HI) else 0) for r in own))
        sizes = {x.name: x.size for x in sections}
        out.append(
            Program(
                name,
                _zero_holes(s.data, holes),
                holes,
                ptx,
                counts.get((EIATTR_REGCOUNT, name), 0),
                counts.get((EIATTR_MIN_STACK, name), 0),
                sizes.get(f".nv.shared.{name}", 0),
                sizes.get(f".nv.constant0.{name}", 0),
                [r for r in relocations if r.section in (s.name, ".nv.constant4")],
                constants,
            )
        )
    if not out:
        raise SimError("this cubin holds no kernel (no .text section)")
    return out


def _sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class ProgramStore:
    """All programs known to this process and, through the directory, to others."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._lock = GcPausingLock()
        self._by_text: dict[bytes, list[Program]] = {}
        self._lengths: dict[bytes, list[int]] = {}
        self._looked: set[bytes] = set()
        self._loose: list[Program] = []
        self._seen: set[str] = set()
        self._read: set[str] = set()

    @property
    def directory(self) -> Path:
        """The directory of the pairs."""
        return self._directory or cache_directory()

    def register_pair(self, cubin: bytes, ptx: str | bytes, *, keep: bool = True) -> list[Program]:
        """Know `cubin` by its PTX; `keep`: write the pair to the directory."""
        text = (ptx.decode() if isinstance(ptx, bytes) else ptx).rstrip("\0")
        key = _sha256_hex(cubin + text.encode())
        with self._lock:
            if key in self._seen:
                return []
            self._seen.add(key)
        programs = read_cubin(cubin, text)
        with self._lock:
            for program in programs:
                if program.holes:
                    self._loose.append(program)
                else:
                    self._by_text.setdefault(program.text, []).append(program)
                    lengths = self._lengths.setdefault(program.text[:HEAD], [])
                    if len(program.text) not in lengths:
                        lengths.append(len(program.text))
                        lengths.sort(reverse=True)
        if keep:
            for program in programs:
                self._write_pair(program, key, cubin, text)
        return programs

    def _write_pair(self, program: Program, key: str, cubin: bytes, ptx: str) -> None:
        """Keep a pair as HEAD/LENGTH-CODE-PAIR: hashes of the code's head, of the code, of both
        files. HEAD is "holes" for code with relocations."""
        place = self.directory / ("holes" if program.holes else _sha256_hex(program.text[:HEAD]))
        name = f"{len(program.text)}-{_sha256_hex(program.text)}-{key[:16]}"
        if (place / f"{name}.ptx").exists():
            return
        try:
            place.mkdir(parents=True, exist_ok=True)
            for suffix, data in ((".cubin", cubin), (".ptx", ptx.encode())):
                with tempfile.NamedTemporaryFile(dir=place, delete=False) as out:
                    out.write(data)
                os.replace(out.name, place / f"{name}{suffix}")
        except OSError as e:
            print(f"nvgpusim: cannot keep PTX in {place}: {e}", file=sys.stderr)

    def find_by_code(self, image: bytes) -> list[Program]:
        """The programs whose code `image` begins with: the longest such code, none if unknown."""
        found = self._known_by_code(image)
        if not found or found[0].text not in self._looked:
            self._load_pairs(image)
            found = self._known_by_code(image)
            self._looked.update(p.text for p in found)
        return found

    def _known_by_code(self, image: bytes) -> list[Program]:
        with self._lock:
            for length in self._lengths.get(image[:HEAD], ()):
                if same := self._by_text.get(image[:length]):
                    return same
            loose = [p for p in self._loose if p.matches_image(image)]
            return [p for p in loose if p.text == loose[0].text]

    def _load_pairs(self, image: bytes) -> None:
        """Read the pairs for this code that other processes have written."""
        for place in (self.directory / _sha256_hex(image[:HEAD]), self.directory / "holes"):
            for path in sorted(place.glob("*.ptx")):
                length, code, _ = path.stem.split("-")
                fits = place.name == "holes" or _sha256_hex(image[: int(length)]) == code
                cubin = path.with_suffix(".cubin")
                if fits and str(path) not in self._read and cubin.exists():
                    self._read.add(str(path))
                    self.register_pair(cubin.read_bytes(), path.read_bytes(), keep=False)


PROGRAMS = ProgramStore()
"""The process's programs; the compiler hook registers here."""


def register_cubin_and_ptx(cubin: Path, ptx: Path) -> list[Program]:
    """Keep two files of one compilation by nvcc or ptxas, for this process and later ones.

    Raises SimError with the file that is wrong: unreadable, no cubin, not its PTX.
    """
    try:
        code, source = cubin.read_bytes(), ptx.read_text()
        programs = read_cubin(code, source)
        for program in programs:
            program.compiled_code()
        PROGRAMS.register_pair(code, source)
        return programs
    except OSError as e:
        raise SimError(f"{e.filename}: {e.strerror}; expected a file") from e
    except PtxError as e:
        raise SimError(f"{ptx}: {e}") from e
    except UnicodeDecodeError as e:
        raise SimError(f"{ptx}: not PTX: expected text") from e
    except SimError as e:
        raise SimError(f"{cubin}: {e}") from e


# The compiler hook: tinygrad reaches NVRTC and nvJitLink through two modules of ctypes functions,
# and starts nvcc, where there is no NVRTC, from a class.

_NVRTC, _JITLINK = "tinygrad.runtime.autogen.nvrtc", "tinygrad.runtime.autogen.nvjitlink"
_NVCC = "tinygrad.runtime.support.compiler_cuda"
_INPUT_PTX = 2
"""NVJITLINK_INPUT_PTX."""


def _register_or_warn(cubin: Any, ptx: bytes) -> None:
    try:
        PROGRAMS.register_pair(bytes(cubin), ptx)
    except (SimError, UnicodeDecodeError) as e:
        print(f"nvgpusim: PTX of a compiled program not kept: {e}", file=sys.stderr)


def hook_nvrtc(module: ModuleType) -> None:
    """Whoever takes a cubin leaves us the PTX of the same program."""
    get: Callable[..., int] = module.nvrtcGetCUBIN

    def nvrtc_get_cubin(prog: Any, out: Any) -> int:
        status = get(prog, out)
        size = ctypes.c_size_t()
        if status == 0 and module.nvrtcGetPTXSize(prog, ctypes.byref(size)) == 0 and size.value > 1:
            text = ctypes.create_string_buffer(size.value)
            if module.nvrtcGetPTX(prog, text) == 0:
                _register_or_warn(out, text.value)
        return status

    module.nvrtcGetCUBIN = nvrtc_get_cubin  # type: ignore[attr-defined]


def hook_jitlink(module: ModuleType) -> None:
    """The PTX added to a link belongs to the cubin that comes out of it."""
    add: Callable[..., int] = module.nvJitLinkAddData
    get: Callable[..., int] = module.nvJitLinkGetLinkedCubin
    given: dict[int, bytes] = {}

    def key(handle: Any) -> int:
        return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)

    def add_data(handle: Any, kind: Any, data: Any, size: Any, name: Any) -> int:
        number = getattr(kind, "value", kind)
        if int(number) == _INPUT_PTX and isinstance(data, bytes):
            given[key(handle)] = data
        return add(handle, kind, data, size, name)

    def get_cubin(handle: Any, out: Any) -> int:
        status = get(handle, out)
        if status == 0 and key(handle) in given:
            _register_or_warn(out, given.pop(key(handle)))
        return status

    module.nvJitLinkAddData = add_data  # type: ignore[attr-defined]
    module.nvJitLinkGetLinkedCubin = get_cubin  # type: ignore[attr-defined]


def hook_nvcc(module: ModuleType) -> None:
    """nvcc is started once more, for the PTX of the cubin that it has made."""
    compiler = module.NVCCCompiler
    compile_: Callable[[Any, str], bytes] = compiler.compile

    def compile_and_keep(self: Any, src: str) -> bytes:
        code = compile_(self, src)
        if not self.ptx:
            _register_or_warn(
                code, compile_(compiler(self.arch, ptx=True, extra_options=self.extra_options), src)
            )
        return code

    compiler.compile = compile_and_keep


_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    _NVRTC: hook_nvrtc,
    _JITLINK: hook_jitlink,
    _NVCC: hook_nvcc,
    buffer_hooks.DEVICE: buffer_hooks.hook_allocator,
    buffer_hooks.HCQ: buffer_hooks.hook_host_access,
    "tinygrad.runtime.ops_nv": buffer_hooks.hook_nv_runtime,
}


class _HookingFinder(importlib.abc.MetaPathFinder):
    """Hooks the modules right after their own code has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _HOOKS[name](module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install_hooks() -> None:
    """Hook compilers and allocators of this process, now or when imported. Idempotent."""
    if any(isinstance(f, _HookingFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _HookingFinder())
    for name, hook in _HOOKS.items():
        if name in sys.modules:
            hook(sys.modules[name])
