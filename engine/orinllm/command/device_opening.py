"""A device that opens while modules are imported: nothing here takes long to import itself."""

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

# Name of the thread that opens the device.
_OPENING = "open-device"


def open_device_in_background(device: str | None) -> Future[str]:
    """Begin to open a device, as `open_and_name_device`; what comes next is imported meanwhile."""
    pool = ThreadPoolExecutor(1, _OPENING)
    if (device or os.environ.get("DEV", "")).upper().startswith("CUDA"):
        pool.submit(_start_cuda)
    from orinllm.gpu.device import gpu_may_open, open_and_name_device

    opened = pool.submit(open_and_name_device, device)
    pool.shutdown(wait=False)
    if (device or os.environ.get("DEV", "")).upper() != "CPU" and gpu_may_open():
        import orinllm.batching.fused_runner  # noqa: F401
    return opened


def _start_cuda() -> None:
    """Let CUDA begin, 0.2 s of its own, before tinygrad is there, which says what goes wrong."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def is_device_opening() -> bool:
    """Say whether a device is being opened: its driver may hang, and nobody waits for it."""
    return any(thread.name.startswith(_OPENING) for thread in threading.enumerate())
