"""The sizes and lives of a client's buffers: tinygrad's allocator tells `allocated_pieces`.

nvgpu sees pages, and tinygrad keeps freed buffers for the next of their size. What a sanitizer
needs are the bytes that were asked for, and when the client gave them back.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...allocated_pieces import ALLOCATED_PIECES
from ...memory import client_call_text

DEVICE, HCQ = "tinygrad.device", "tinygrad.runtime.support.hcq"


def hook_allocator(module: ModuleType) -> None:
    """Buffers with a GPU address are entered when handed out, and taken out when freed."""
    allocator = module.LRUAllocator
    alloc, free = allocator.alloc, allocator.free

    def alloc_and_tell(self: Any, size: int, options: Any = None) -> Any:
        buffer = alloc(self, size, options)
        va = getattr(buffer, "va_addr", None)
        if isinstance(va, int) and getattr(options, "external_ptr", None) is None:
            ALLOCATED_PIECES.add_piece(va, size, "buffer", client_call_text())
        return buffer

    def free_and_tell(self: Any, opaque: Any, size: int, options: Any = None) -> Any:
        va = getattr(opaque, "va_addr", None)
        if isinstance(va, int):
            ALLOCATED_PIECES.end_piece(va, client_call_text())
        return free(self, opaque, size, options)

    allocator.alloc, allocator.free = alloc_and_tell, free_and_tell


def hook_host_access(module: ModuleType) -> None:
    """Whoever copies into a buffer or takes its bytes for the CPU may have written all of it."""
    allocator, buffer = module.HCQAllocator, module.HCQBuffer
    copyin, view = allocator._copyin, buffer.cpu_view

    def copyin_and_tell(self: Any, dest: Any, src: memoryview) -> Any:
        ALLOCATED_PIECES.note_non_kernel_write(int(dest.va_addr), src.nbytes)
        return copyin(self, dest, src)

    def view_and_tell(self: Any) -> Any:
        ALLOCATED_PIECES.note_non_kernel_write(int(self.va_addr), self.size)
        return view(self)

    allocator._copyin, buffer.cpu_view = copyin_and_tell, view_and_tell


def hook_ring_submit(module: ModuleType) -> None:
    """A doorbell is noticed late: what a launch sees are the buffers of the moment before it."""
    queue = module.NVCommandQueue
    submit = queue._submit_to_gpfifo

    def submit_and_tell(self: Any, dev: Any, gpfifo: Any) -> Any:
        ALLOCATED_PIECES.on_submission(int(gpfifo.token))
        return submit(self, dev, gpfifo)

    queue._submit_to_gpfifo = submit_and_tell


def hook_nv_runtime(module: ModuleType) -> None:
    """Submissions, and zero-copy views of unified memory."""
    hook_ring_submit(module)
    allocator = getattr(module, "NVUnifiedAllocator", None)
    if allocator is None:
        return
    as_buffer = allocator._as_buffer

    def as_buffer_and_tell(self: Any, src: Any) -> Any:
        ALLOCATED_PIECES.note_non_kernel_write(int(src.va_addr), src.size)
        return as_buffer(self, src)

    allocator._as_buffer = as_buffer_and_tell
