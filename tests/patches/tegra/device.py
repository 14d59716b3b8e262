"""Scripts that run on tinygrad's NV device over the modelled nvgpu, each in a process of its own.

A script starts with the names of :data:`PRELUDE`. What it prints with `say()` comes back as JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PRELUDE = '''\
import ctypes, errno, fcntl, gc, json, os, struct, sys, threading, time, traceback
import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.uop.ops import UOp

def say(**values): print("SAYS " + json.dumps(values), flush=True)

def program(dev, source, name):
    from tinygrad.runtime.ops_nv import NVProgram
    return NVProgram(dev, name, dev.compiler.compile(source))

def release_later(signal, seconds):
    def release(): signal.value = 1
    threading.Timer(seconds, release).start()

class FailAt:
    """Fail system call number `at` from now on, that one alone or with all that follow.

    NVMAP_FREE and AS_UNMAP_BUFFER return 0 whatever happens, so they neither fail nor count.
    """

    def __init__(self, code=errno.EIO):
        from nvgpusim.orin.simulation import Simulation
        self.kernel, self.code, self.at, self.lasting = Simulation.current.kernel, code, 0, False
        self.calls, self.failed, self.kernel.injector.raise_if_due = 0, [], self

    def __call__(self, name):
        if name in ("NVMAP_FREE", "AS_UNMAP_BUFFER"): return
        self.calls += 1
        if self.calls == self.at or self.lasting and 0 < self.at < self.calls:
            self.failed.append(name)
            raise OSError(self.code, os.strerror(self.code))

    def arm(self, at, lasting=False):
        self.calls, self.failed, self.at, self.lasting = 0, [], at, lasting

    def held(self):
        "What is open, mapped and allocated, without the lines that made it."
        gc.collect()
        with self.kernel.lock:
            self.kernel.release_closed_files()
            lines = self.kernel.leak_lines()
            return [line.partition(")")[0].partition(", opened")[0] for line in lines]
'''


@dataclass(frozen=True)
class Run:
    """A finished script: what it said, its stderr, exit status, the model's report, its stdout."""

    said: dict[str, Any]
    stderr: str
    status: int
    report: dict[str, Any]
    stdout: str = ""

    @property
    def notes(self) -> list[str]:
        """The model's remarks."""
        return list(self.report["notes"])

    def calls(self, what: str) -> int:
        """Count of a system call, as the report names it: 'ioctl OPEN_CHANNEL'."""
        return int(self.report["counts"].get(what, 0))


Tegra = Callable[..., Run]
