"""QMD version 3.0: fields by bit ranges (clc7c0qmd.h), and SKED's checks of them."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .faults import GpuFault, class_fault, sked_fault
from .occupancy import CONFIGS, best_shared_config, blocks_per_sm

SIZE = 256
FIELDS: dict[str, tuple[int, int]] = {
    "QMD_GROUP_ID": (133, 128),
    "SM_GLOBAL_CACHING_ENABLE": (134, 134),
    "INVALIDATE_TEXTURE_HEADER_CACHE": (186, 186),
    "INVALIDATE_TEXTURE_SAMPLER_CACHE": (187, 187),
    "INVALIDATE_TEXTURE_DATA_CACHE": (188, 188),
    "INVALIDATE_SHADER_DATA_CACHE": (189, 189),
    "INVALIDATE_INSTRUCTION_CACHE": (190, 190),
    "INVALIDATE_SHADER_CONSTANT_CACHE": (191, 191),
    "PROGRAM_PREFETCH_ADDR_LOWER_SHIFTED": (287, 256),
    "CWD_MEMBAR_TYPE": (369, 368),
    "API_VISIBLE_CALL_LIMIT": (378, 378),
    "SAMPLER_INDEX": (382, 382),
    "CTA_RASTER_WIDTH": (415, 384),
    "CTA_RASTER_HEIGHT": (431, 416),
    "CTA_RASTER_DEPTH": (463, 448),
    "DEPENDENT_QMD0_POINTER": (511, 480),
    "DEPENDENT_QMD0_ENABLE": (512, 512),
    "DEPENDENT_QMD0_ACTION": (515, 513),
    "DEPENDENT_QMD0_PREFETCH": (516, 516),
    "SHARED_MEMORY_SIZE": (561, 544),
    "MIN_SM_CONFIG_SHARED_MEM_SIZE": (567, 562),
    "MAX_SM_CONFIG_SHARED_MEM_SIZE": (574, 569),
    "QMD_VERSION": (579, 576),
    "QMD_MAJOR_VERSION": (583, 580),
    "CTA_THREAD_DIMENSION0": (607, 592),
    "CTA_THREAD_DIMENSION1": (623, 608),
    "CTA_THREAD_DIMENSION2": (639, 624),
    "REGISTER_COUNT_V": (656, 648),
    "TARGET_SM_CONFIG_SHARED_MEM_SIZE": (662, 657),
    "SHADER_LOCAL_MEMORY_LOW_SIZE": (759, 736),
    "BARRIER_COUNT": (767, 763),
    "PROGRAM_ADDRESS_LOWER": (1567, 1536),
    "PROGRAM_ADDRESS_UPPER": (1584, 1568),
    "SHADER_LOCAL_MEMORY_HIGH_SIZE": (1623, 1600),
    "PROGRAM_PREFETCH_ADDR_UPPER_SHIFTED": (1640, 1632),
    "PROGRAM_PREFETCH_SIZE": (1649, 1641),
    "PROGRAM_PREFETCH_TYPE": (1651, 1650),
    "SASS_VERSION": (1663, 1656),
}
for _i, _base in enumerate((768, 896)):
    FIELDS |= {
        f"RELEASE{_i}_ADDRESS_LOWER": (_base + 31, _base),
        f"RELEASE{_i}_ADDRESS_UPPER": (_base + 39, _base + 32),
        f"RELEASE{_i}_MEMBAR_TYPE": (_base + 51, _base + 51),
        f"RELEASE{_i}_ENABLE": (_base + 55, _base + 55),
        f"RELEASE{_i}_REDUCTION_ENABLE": (_base + 58, _base + 58),
        f"RELEASE{_i}_PAYLOAD64B": (_base + 61, _base + 61),
        f"RELEASE{_i}_STRUCTURE_SIZE": (_base + 63, _base + 62),
        f"RELEASE{_i}_PAYLOAD_LOWER": (_base + 95, _base + 64),
        f"RELEASE{_i}_PAYLOAD_UPPER": (_base + 127, _base + 96),
    }
for _i in range(8):
    FIELDS |= {
        f"CONSTANT_BUFFER_VALID_{_i}": (640 + _i, 640 + _i),
        f"CONSTANT_BUFFER_ADDR_LOWER_{_i}": (1055 + 64 * _i, 1024 + 64 * _i),
        f"CONSTANT_BUFFER_ADDR_UPPER_{_i}": (1072 + 64 * _i, 1056 + 64 * _i),
        f"CONSTANT_BUFFER_INVALIDATE_{_i}": (1074 + 64 * _i, 1074 + 64 * _i),
        f"CONSTANT_BUFFER_SIZE_SHIFTED4_{_i}": (1087 + 64 * _i, 1075 + 64 * _i),
    }
_KNOWN = sum(((1 << hi - lo + 1) - 1) << lo for hi, lo in FIELDS.values())
_PLACES = {name: (lo // 32, lo % 32, (1 << hi - lo + 1) - 1) for name, (hi, lo) in FIELDS.items()}
"""Word, shift and mask of each field: none crosses a word."""
_WORDS = struct.Struct("<64I")
_VALID, _BANKS = 640 // 32, 1024 // 32
"""Words of CONSTANT_BUFFER_VALID_0 and CONSTANT_BUFFER_ADDR_LOWER_0."""

SASS_87 = 0x87
REGISTER_FILE, MAX_THREADS, WARPS_PER_SM = 65536, 1024, 48
SHARED_LIMIT = 164 << 10
"""Shared memory of an SM 8.7; a block gets 163 KiB and the system's 1 KiB."""
LOCAL_SPAN = 1 << 24
CONSTANT_LIMIT = 1 << 16


@dataclass(frozen=True)
class Qmd:
    """One QMD as the scheduler caches it: 256 bytes and where they came from."""

    va: int
    data: bytes

    @staticmethod
    @lru_cache(256)
    def from_bytes(va: int, data: bytes) -> Qmd:
        """From its 256 bytes; of those read last each is decoded once."""
        return Qmd(va, data)

    @cached_property
    def words(self) -> tuple[int, ...]:
        """Its 64 words."""
        return _WORDS.unpack(self.data)

    def __getitem__(self, name: str) -> int:
        word, shift, mask = _PLACES[name]
        return self.words[word] >> shift & mask

    def wide_field(self, name: str) -> int:
        """A 64-bit value from NAME_LOWER and NAME_UPPER."""
        return self[f"{name}_UPPER"] << 32 | self[f"{name}_LOWER"]

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y, z."""
        return self["CTA_RASTER_WIDTH"], self["CTA_RASTER_HEIGHT"], self["CTA_RASTER_DEPTH"]

    @cached_property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block in x, y, z."""
        x, y, z = (self[f"CTA_THREAD_DIMENSION{i}"] for i in range(3))
        return x, y, z

    @property
    def program_va(self) -> int:
        """Entry point."""
        return self.wide_field("PROGRAM_ADDRESS")

    def blocks_per_sm(self) -> int:
        """Blocks that an SM holds at once, split as TARGET says."""
        threads, registers = math.prod(self.block), self["REGISTER_COUNT_V"]
        target = self["TARGET_SM_CONFIG_SHARED_MEM_SIZE"]
        return blocks_per_sm(threads, registers, self["SHARED_MEMORY_SIZE"], target)

    def best_target_config(self) -> int:
        """The smallest TARGET with which shared memory limits the blocks of an SM no further."""
        threads, registers = math.prod(self.block), self["REGISTER_COUNT_V"]
        return best_shared_config(threads, registers, self["SHARED_MEMORY_SIZE"])

    @cached_property
    def valid_banks(self) -> list[tuple[int, int, int, bool]]:
        """(number, address, bytes as the hardware sees them, invalidate) of the valid banks."""
        out, words = [], self.words
        for i in range(8):
            if words[_VALID] >> i & 1:
                low, rest = words[_BANKS + 2 * i : _BANKS + 2 * i + 2]
                va, size = (rest & 0x1FFFF) << 32 | low, rest >> 19 << 4
                out.append((i, va, size, bool(rest >> 18 & 1)))
        return out

    def difference_text(self, other: Qmd) -> str:
        """Fields that differ, as text."""
        names = [n for n in FIELDS if self[n] != other[n]]
        shown = ", ".join(f"{n} {self[n]:#x} -> {other[n]:#x}" for n in names[:4])
        return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "unknown bits"


@dataclass(frozen=True)
class LaunchLimits:
    """Channel state that a launch is checked against."""

    shared_window: int | None
    local_window: int | None
    local_bytes_per_tpc: int
    tpcs: int


def windows_unset_or_overlap(shared: int | None, local: int | None) -> bool:
    """True if the windows are unset (a register that is 0 is a window at 0) or overlap."""
    if not shared or not local:
        return True
    return abs(shared - local) < 1 << 32


@lru_cache(256)
def check_qmd(qmd: Qmd, limits: LaunchLimits) -> None:
    """Raise what SKED raises for this QMD."""
    at = {"QMD": f"{qmd.va:#x}"}

    def bad(bit: int, what: str) -> GpuFault:
        return sked_fault(bit, what, **at)

    if (qmd["QMD_MAJOR_VERSION"], qmd["QMD_VERSION"]) != (3, 0):
        version = f"{qmd['QMD_MAJOR_VERSION']}.{qmd['QMD_VERSION']}"
        what = f"QMD_MAJOR_VERSION.QMD_VERSION is {version}, class 0xC7C0 takes 3.0"
        raise class_fault(what, **at)
    unknown = int.from_bytes(qmd.data, "little") & ~_KNOWN
    if unknown:
        bits = [n for n in range(SIZE * 8) if unknown >> n & 1]
        raise class_fault(f"QMD bits that this model does not know are set: {bits[:16]}", **at)
    if windows_unset_or_overlap(limits.shared_window, limits.local_window):
        raise bad(
            24,
            f"shared window {limits.shared_window or 0:#x} and local window "
            f"{limits.local_window or 0:#x} are unset or overlap (4 GiB each)",
        )
    x, y, z = qmd.block
    if 0 in (x, y, z):
        raise bad(23, f"CTA_THREAD_DIMENSION is {x} x {y} x {z}")
    threads = x * y * z
    if threads > MAX_THREADS or x > 1024 or y > 1024 or z > 64:
        raise bad(18, f"CTA_THREAD_DIMENSION {x} x {y} x {z} is {threads} threads")
    registers = qmd["REGISTER_COUNT_V"]
    if not 0 < registers <= 255:
        raise bad(13, f"REGISTER_COUNT_V is {registers}")
    per_warp = -(-32 * registers // 256) * 256
    warps = -(-threads // 128) * 4
    if per_warp * warps > REGISTER_FILE:
        raise bad(26, f"{threads} threads of {registers} registers need more than 65536")
    if qmd.program_va % 16:
        raise bad(20, f"PROGRAM_ADDRESS {qmd.program_va:#x} is not 16-byte aligned")
    shared = qmd["SHARED_MEMORY_SIZE"]
    if shared % 128 or shared > SHARED_LIMIT:
        raise bad(21, f"SHARED_MEMORY_SIZE {shared:#x}: a multiple of 128 up to 164 KiB is needed")
    low, target, high = (qmd[f"{n}_SM_CONFIG_SHARED_MEM_SIZE"] for n in ("MIN", "TARGET", "MAX"))
    if shared > max(0, high - 1) * 4096 or not low <= target <= high:
        raise bad(
            25,
            f"SHARED_MEMORY_SIZE {shared:#x} with SM_CONFIG min {low}, target {target}, max {high}",
        )
    if target not in CONFIGS or low not in CONFIGS or high not in CONFIGS:
        raise bad(
            25,
            f"SM_CONFIG min {low}, target {target}, max {high}: an SM 8.7 has {sorted(CONFIGS)} "
            "(KiB of shared memory / 4 + 1)",
        )
    if shared > CONFIGS[low]:
        raise bad(25, f"SHARED_MEMORY_SIZE {shared:#x} with SM_CONFIG min {low}")
    for i, va, size, _ in qmd.valid_banks:
        if size > CONSTANT_LIMIT:
            raise bad(7, f"CONSTANT_BUFFER_SIZE_SHIFTED4({i}) means {size} bytes")
        if va % 64:
            raise class_fault(f"CONSTANT_BUFFER_ADDR({i}) {va:#x} is not aligned", **at)
    _check_local_memory(qmd, limits)
    _check_sass_version_and_releases(qmd, at)


def _check_local_memory(qmd: Qmd, limits: LaunchLimits) -> None:
    low, high = qmd["SHADER_LOCAL_MEMORY_LOW_SIZE"], qmd["SHADER_LOCAL_MEMORY_HIGH_SIZE"]
    at = {"QMD": f"{qmd.va:#x}"}
    if low % 16 or low > LOCAL_SPAN:
        raise sked_fault(9, f"SHADER_LOCAL_MEMORY_LOW_SIZE is {low:#x}", **at)
    if high % 16 or high > LOCAL_SPAN:
        raise sked_fault(10, f"SHADER_LOCAL_MEMORY_HIGH_SIZE is {high:#x}", **at)
    need = (low + high) * 32 * WARPS_PER_SM * 2
    if need > limits.local_bytes_per_tpc:
        raise sked_fault(
            12,
            f"{low + high:#x} bytes a thread need {need:#x} per TPC, "
            f"SET_SHADER_LOCAL_MEMORY_NON_THROTTLED gave {limits.local_bytes_per_tpc:#x}",
            **at,
        )


def _check_sass_version_and_releases(qmd: Qmd, at: dict[str, str]) -> None:
    if qmd["SASS_VERSION"] != SASS_87:
        raise class_fault(f"SASS_VERSION is {qmd['SASS_VERSION']:#x}, this SM is 0x87", **at)
    if qmd["DEPENDENT_QMD0_ENABLE"] and qmd["DEPENDENT_QMD0_ACTION"] != 1:
        raise class_fault(
            f"DEPENDENT_QMD0_ACTION {qmd['DEPENDENT_QMD0_ACTION']} is not modelled", **at
        )
    for i in range(2):
        if not qmd[f"RELEASE{i}_ENABLE"]:
            continue
        va, size = qmd.wide_field(f"RELEASE{i}_ADDRESS"), qmd[f"RELEASE{i}_STRUCTURE_SIZE"]
        if qmd[f"RELEASE{i}_REDUCTION_ENABLE"] or size == 3:
            raise class_fault(f"RELEASE{i} with a reduction or structure size {size}", **at)
        align = {0: 16, 1: 4, 2: 8}[size]
        if va % align:
            raise class_fault(f"RELEASE{i}_ADDRESS {va:#x} is not {align}-byte aligned", **at)
