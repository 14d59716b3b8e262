"""The L2 keeps lines of CACHEABLE mappings until it is told to drop them."""

import numpy as np
import pytest

from nvgpusim import l2
from nvgpusim.memory import DmaBuf, GpuAddressSpace, Mapping

VA = 0x100000


@pytest.fixture(params=[0, l2.CACHEABLE])
def space(request: pytest.FixtureRequest) -> tuple[GpuAddressSpace, DmaBuf, bool]:
    """A mapping of 8 KiB of ones, volatile and cacheable."""
    buf = DmaBuf(8192, "buffer")
    buf.array = np.ones(8192, np.uint8)
    pages = GpuAddressSpace("space")
    pages.map(Mapping(VA, 8192, buf, flags=request.param))
    return pages, buf, bool(request.param)


def lanes(*offsets: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Addresses in the mapping."""
    return np.array(offsets, np.uint64) + np.uint64(VA)


def test_reads_keep_lines(space: tuple[GpuAddressSpace, DmaBuf, bool]) -> None:
    pages, buf, kept = space
    assert pages.view(VA + 200, 4, "read").tolist() == [1] * 4
    assert pages.load(lanes(4096, 4104), 4).tolist() == [[1] * 4] * 2
    buf.array[:] = 2
    old = 1 if kept else 2
    assert pages.view(VA + 128, 1, "read")[0] == old  # the line of byte 200
    assert pages.view(VA + 127, 1, "read")[0] == 2
    assert pages.load(lanes(4100), 4).tolist() == [[old] * 4]
    l2.invalidate()
    assert pages.view(VA + 128, 1, "read")[0] == 2
    assert pages.load(lanes(4100), 4).tolist() == [[2] * 4]


def test_the_gpu_reads_what_it_has_written(space: tuple[GpuAddressSpace, DmaBuf, bool]) -> None:
    pages, buf, _ = space
    assert pages.load(lanes(0, 512), 4).tolist() == [[1] * 4] * 2
    pages.store(lanes(512), np.full((1, 4), 3, np.uint8))
    pages.view(VA, 4, "write")[:] = bytes([4]) * 4
    assert pages.load(lanes(0, 512), 4).tolist() == [[4] * 4, [3] * 4]
    assert buf.array[0] == 4 and buf.array[512] == 3


def test_odd_widths_and_places(space: tuple[GpuAddressSpace, DmaBuf, bool]) -> None:
    pages, buf, kept = space
    buf.array[:] = np.arange(8192) % 251
    want = [[(at + i) % 251 for i in range(3)] for at in (5, 127, 8189)]
    assert pages.load(lanes(5, 127, 8189), 3).tolist() == want
    buf.array[:] = 0
    found = pages.load(lanes(5, 127, 8189), 3).tolist()
    assert found == (want if kept else [[0, 0, 0]] * 3)
