"""A simulated board in this process: the seam goes in before a test and out after it."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nvgpusim.options import Options
from nvgpusim.orin.gpu_api import ChannelPort
from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.simulation import Simulation


class Recorder:
    """An execution side that executes nothing: it notes what the kernel side tells it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.ports: dict[int, ChannelPort] = {}
        self.rings: list[int] = []
        self.log: list[str] = []

    def attach_channel(self, port: ChannelPort) -> None:
        self.ports[port.id] = port
        self.log.append(f"attach {port.id}")

    def detach_channel(self, channel_id: int) -> None:
        self.ports.pop(channel_id, None)
        self.log.append(f"detach {channel_id}")

    def ring_doorbell(self, token: int) -> None:
        self.rings.append(token)

    def on_barrier(self) -> None:
        self.log.append("barrier")

    def is_idle(self) -> bool:
        return True

    def wait_until_idle(self, timeout: float) -> None:
        return None

    def stop_threads(self) -> None:
        self.log.append("shutdown")

    def statistics(self) -> dict[str, int]:
        return {"launches": 0}


@contextmanager
def simulated(execute: bool = False, **options: Any) -> Iterator[Kernel]:
    """A kernel behind an installed seam; without `execute` nothing runs on its GPU."""
    simulation = Simulation(Options(**options))
    if not execute:
        simulation.kernel.make_executor = Recorder
    simulation.start()
    try:
        yield simulation.kernel
    finally:
        kernel = simulation.kernel
        own = {handle.fd for handle in kernel.nvmap.handles.values()}
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in own and kernel.find_device_or_dmabuf(fd) is not None:
                os.close(fd)
        simulation.uninstall()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """The default board: r36, AGX Orin 64 GB."""
    with simulated() as kernel:
        yield kernel


def fork_status(child: Callable[[], object]) -> int:
    """The wait status of a child that runs `child`: exit code 1 for an exception in it."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            child()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]
