"""Blocks that an SM of ga10b holds at once, and the split of its L1 that a QMD asks for.

Limits of compute capability 8.7 [CUDA C++ Programming Guide, table of technical specifications]:
48 warps, 16 blocks, 65536 registers in units of 256 a warp and 4 warps, 164 KiB of shared memory
with 1 KiB a block for the system (which SHARED_MEMORY_SIZE includes).
"""

from __future__ import annotations

from functools import lru_cache

WARPS, BLOCKS, REGISTERS = 48, 16, 65536
CARVEOUTS = (0, 8, 16, 32, 64, 100, 132, 164)
"""Shared memory of an SM that can be configured, in KiB; the rest of 192 KiB is L1."""
CONFIGS = {kib // 4 + 1: kib << 10 for kib in CARVEOUTS}
"""Bytes by the value of a QMD's *_SM_CONFIG_SHARED_MEM_SIZE: KiB / 4 + 1."""


def blocks_without_shared_limit(threads: int, registers: int) -> int:
    """Blocks of an SM as warps and registers allow."""
    warps = -(-threads // 32)
    per_warp = -(-32 * registers // 256) * 256
    allocated = -(-warps // 4) * 4
    return min(BLOCKS, WARPS // warps, REGISTERS // (per_warp * allocated))


def blocks_per_sm(threads: int, registers: int, shared: int, config: int) -> int:
    """Blocks of an SM whose L1 is split as `config` says."""
    room = CONFIGS[config] // shared if shared else BLOCKS
    return min(blocks_without_shared_limit(threads, registers), room)


@lru_cache
def best_shared_config(threads: int, registers: int, shared: int) -> int:
    """The smallest configuration with which shared memory is no limit, or else the largest."""
    wanted = blocks_without_shared_limit(threads, registers) * shared
    return next((c for c, size in CONFIGS.items() if size >= wanted), max(CONFIGS))
