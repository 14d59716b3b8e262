"""Memory left on the board, and the answer of a release when it is not enough.

nvmap up to 36.4.3 compares a request with total RAM only and takes its pages one by one by
GFP_KERNEL [nvmap_dev.c:598-633 is_nvmap_memory_available, nvmap_alloc.c; linux-nv-oot at
l4t-r36.4]: a request that does not fit meets the OOM killer, and the process that asks is its
largest. JetPack 7's compares with MemAvailable less CmaFree less 0.1 % and answers ENOMEM
[nvmap_heap.c system_heap_free_mem; CMA pages are no use to nvmap].

Since October 2025 (r35.6.3, r36.4.7, for CVE-2025-33177 and CVE-2025-33182) the older ones answer
ENOMEM too, sooner: boards refuse 4 GiB with 5.36 of 7.44 GiB reported free while the page cache is
full, grant 3 GiB, and grant the same bytes in pieces. The source of that condition is not public.
The model refuses what exceeds free memory and three eighths of the page cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ga10b import JETPACK7

if TYPE_CHECKING:
    from .core import Kernel

MEMINFO = "/proc/meminfo"
SYSTEM = 512 << 20
"""Bytes given to kernel and services of the modelled board."""
CMA = 256 << 20
"""Bytes reserved for contiguous allocations, all free; an Orin has 256 to 512 MB."""


def available_bytes(kernel: Kernel) -> int:
    """MemAvailable of the board, in bytes; CMA pages and the page cache count."""
    return max(kernel.options.ram_bytes - SYSTEM - kernel.journal.in_use, 0)


def nvmap_available_bytes(kernel: Kernel) -> int:
    """Bytes that nvmap can have: those that are no CMA pages."""
    return max(available_bytes(kernel) - CMA, 0)


def page_cache_bytes(kernel: Kernel) -> int:
    """Bytes of files in the page cache, which gives way to whoever needs memory."""
    asked = kernel.options.page_cache
    full = kernel.options.ram_bytes * 3 // 4 if asked < 0 else asked << 20
    return min(max(full - sum(kernel.journal.given_up.values()), 0), nvmap_available_bytes(kernel))


def meminfo_text(kernel: Kernel) -> str:
    """The lines of /proc/meminfo that are about the whole of memory."""
    lines = {
        "MemTotal": kernel.options.ram_bytes,
        "MemFree": available_bytes(kernel) - page_cache_bytes(kernel),
        "MemAvailable": available_bytes(kernel),
        "Cached": page_cache_bytes(kernel),
        "CmaTotal": CMA,
        "CmaFree": min(CMA, available_bytes(kernel)),
    }
    return "".join(f"{name + ':':15} {size >> 10:8} kB\n" for name, size in lines.items())


def nvmap_request_limit(kernel: Kernel) -> int:
    """Bytes that nvmap compares a request with."""
    if kernel.options.memory_end == "refuse":
        return nvmap_available_bytes(kernel) - page_cache_bytes(kernel) * 5 // 8
    left = nvmap_available_bytes(kernel)
    return left - left // 1000 if kernel.abi.profile in JETPACK7 else kernel.options.ram_bytes


def oom_kill_if_out_of_memory(kernel: Kernel, size: int) -> None:
    """The OOM killer ends a process whose request nvmap let pass, and that has no pages."""
    left = nvmap_available_bytes(kernel)
    if size > left:
        kernel.journal.add_note(
            f"the OOM killer ends this process: {size:#x} bytes asked of nvmap, {left:#x} "
            "available; this release has no ENOMEM for it"
        )
        kernel.oom_kill()
