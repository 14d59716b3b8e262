"""Tokens that the host reads: what is freed with them, and a device that answers no more."""

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
from tinygrad.runtime.autogen import cuda

from orinllm.gpu import host_tokens


class _Buffer:
    """A buffer that is its options."""

    def __init__(self, device: str, size: int, dtype: Any, options: Any) -> None:
        self.options = options

    def allocate(self) -> "_Buffer":
        return self


def test_pinned_memory_is_freed_with_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs keep the buffer; the memory that they write to is there as long as it is."""
    memory, log = (ctypes.c_int32 * 4)(7, 8, 9, 10), list[Any]()
    pointer = ctypes.c_void_p(ctypes.addressof(memory))
    allocator = SimpleNamespace(
        alloc=lambda size, spec: pointer, free=lambda *freed: log.append(freed)
    )
    device = SimpleNamespace(allocator=allocator, context="context")
    monkeypatch.setattr(host_tokens, "Device", {"CUDA": device})
    monkeypatch.setattr(host_tokens, "Buffer", _Buffer)
    for name in ("cuCtxSetCurrent", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"):
        monkeypatch.setattr(cuda, name, lambda *given: 0)
    monkeypatch.setattr(cuda, "cuEventDestroy_v2", lambda event: log.append("event"))
    made = host_tokens.CudaHostTokens("CUDA", 2)
    assert made.make_token_reader()() == [7, 8, 9, 10]
    kept = made.buffer
    del made
    gc.collect()
    assert log == []
    del kept
    gc.collect()
    assert log[:2] == ["event", "event"]
    ((freed, size, spec),) = log[2:]
    assert (freed, size, spec.host) == (pointer, 16, True)


def test_a_hang_of_nv_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, hung = [], RuntimeError("MMU fault")

    def wait(value: int) -> None:
        waits.append(value)
        raise RuntimeError("Wait timeout: 30000 ms!")

    def tell() -> None:
        raise hung

    device = SimpleNamespace(
        timeline_signal=SimpleNamespace(wait=wait),
        timeline_value=12,
        error_state=None,
        on_device_hang=tell,
        synchronize=lambda: wait(11),
    )
    monkeypatch.setattr(host_tokens, "Device", {"NV": device})
    monkeypatch.setattr(host_tokens, "Buffer", _Buffer)
    arrived = host_tokens.NvHostTokens("NV", 1).make_token_reader()
    with pytest.raises(RuntimeError) as caught:
        arrived()
    assert caught.value is hung and waits == [11]
    assert "Wait timeout" in str(device.error_state)
