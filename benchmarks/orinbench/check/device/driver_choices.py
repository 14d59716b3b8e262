"""Choices of the driver that a device check tries where no variable makes them."""

from typing import Any


def patch_driver(choice: str) -> None:
    """Make the driver of this process as a choice has it, where no variable does; opens nothing."""
    if choice == "wait_for_idle":
        from tinygrad.runtime.support.nv.tegra import TegraIface

        TegraIface._share_the_gpu = lambda self, channel: None
    elif choice == "write_combined":
        from tinygrad.runtime.autogen import nvgpu
        from tinygrad.runtime.support.nv.tegra import TegraIface

        real = TegraIface._new_channel_buffer

        def write_combined(self: Any, size: int) -> Any:
            cached = nvgpu.NVMAP_HANDLE_INNER_CACHEABLE
            nvgpu.NVMAP_HANDLE_INNER_CACHEABLE = nvgpu.NVMAP_HANDLE_WRITE_COMBINE
            try:
                return real(self, size)
            finally:
                nvgpu.NVMAP_HANDLE_INNER_CACHEABLE = cached

        TegraIface._new_channel_buffer = write_combined
