"""Tokens that the host reads while the device computes the ones behind them."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tinygrad import Device, dtypes
from tinygrad.device import Buffer, BufferSpec

# Of a sequence: the token at an even position, and at an odd one.
_EACH = 2
# Memory of the host that a CUDA device sees.
_PINNED = BufferSpec(host=True)


class HostTokens:
    """Two ints a sequence that launches write; here, launches have ended when they return."""

    def __init__(self, device: str, sequences: int) -> None:
        self.buffer = Buffer(device, _EACH * sequences, dtypes.int32).allocate()

    def make_token_reader(self) -> Callable[[], list[int]]:
        """Note what was started; return what waits for it, and for nothing later, and reads."""
        return lambda: _to_ints(self.buffer.copyout(memoryview(bytearray(self.buffer.nbytes))))


def _to_ints(raw: memoryview) -> list[int]:
    found: list[int] = np.frombuffer(raw, np.int32).tolist()
    return found


class CudaHostTokens(HostTokens):
    """Ints in the host's memory, which a CUDA device writes to at its address there."""

    # cuda.h: CU_EVENT_DISABLE_TIMING.
    _NO_TIMING = 2

    def __init__(self, device: str, sequences: int) -> None:
        from tinygrad.runtime.autogen import cuda
        from tinygrad.runtime.ops_cuda import check

        self._cuda, self._check = cuda, check
        self._device = Device[device]
        ints = ctypes.c_int32 * (_EACH * sequences)
        memory = self._device.allocator.alloc(ctypes.sizeof(ints), _PINNED)
        address = int(memory.value)
        self._ints = ints.from_address(address)
        spec = BufferSpec(external_ptr=address)
        self.buffer = Buffer(device, len(self._ints), dtypes.int32, options=spec).allocate()
        self._events = [cuda.CUevent() for _ in range(2)]  # of two steps under way
        check(cuda.cuCtxSetCurrent(self._device.context))  # another thread may have opened it
        for event in self._events:
            check(cuda.cuEventCreate(ctypes.byref(event), self._NO_TIMING))
        # Graphs keep the buffer that they write to, and with it the memory.
        size = ctypes.sizeof(ints)
        freed = weakref.finalize(
            self.buffer, _free_buffer_and_events, self._device, memory, size, self._events
        )
        freed.atexit = False

    def make_token_reader(self) -> Callable[[], list[int]]:
        """See `HostTokens`."""
        self._events.reverse()
        event = self._events[0]
        self._check(self._cuda.cuCtxSetCurrent(self._device.context))
        self._check(self._cuda.cuEventRecord(event, None))

        def wait() -> list[int]:
            self._check(self._cuda.cuEventSynchronize(event))
            return list(self._ints)

        return wait


def _free_buffer_and_events(device: Any, memory: Any, size: int, events: Sequence[Any]) -> None:
    from tinygrad.runtime.autogen import cuda

    cuda.cuCtxSetCurrent(device.context)
    for event in events:
        cuda.cuEventDestroy_v2(event)
    device.allocator.free(memory, size, _PINNED)


class NvHostTokens(HostTokens):
    """Ints in memory of an NV device that the host sees too."""

    def __init__(self, device: str, sequences: int) -> None:
        self._device = Device[device]
        spec = BufferSpec(cpu_access=True)
        self.buffer = Buffer(device, _EACH * sequences, dtypes.int32, options=spec).allocate()

    def make_token_reader(self) -> Callable[[], list[int]]:
        """See `HostTokens`."""
        signal, value = self._device.timeline_signal, self._device.timeline_value - 1

        def wait() -> list[int]:
            try:
                signal.wait(value)
            except RuntimeError as error:
                # As the device's own wait does, which would wait as long once more.
                self._device.error_state = error
                self._device.on_device_hang()  # raises what went wrong
                raise
            return _to_ints(self.buffer._buf.cpu_view()[: self.buffer.nbytes])

        return wait
