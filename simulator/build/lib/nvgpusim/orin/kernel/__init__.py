"""The kernel's half of the model: nvgpu's character devices and nvmap, by their rules."""

from .core import Kernel

__all__ = ["Kernel"]
