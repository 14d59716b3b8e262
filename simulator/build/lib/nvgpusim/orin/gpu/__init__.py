"""Execution: rings, pushbuffers, semaphores, launches and copies of an SM 8.7 GPU."""

from .scheduler import Gpu

__all__ = ["Gpu"]
