"""The L2 keeps lines of CACHEABLE mappings, and writes back what the GPU has stored in them."""

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
    pages.add_mapping(Mapping(VA, 8192, buf, flags=request.param))
    return pages, buf, bool(request.param)


def lanes(*offsets: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Addresses in the mapping."""
    return np.array(offsets, np.uint64) + np.uint64(VA)


def test_stores_stay_until_they_are_written_back(
    space: tuple[GpuAddressSpace, DmaBuf, bool],
) -> None:
    pages, buf, kept = space
    assert pages.gather(lanes(0, 512), 4).tolist() == [[1] * 4] * 2
    pages.scatter(lanes(512), np.full((1, 4), 3, np.uint8))
    pages.view_bytes(VA, 4, "write")[:] = bytes([4]) * 4
    assert pages.gather(lanes(0, 512), 4).tolist() == [[4] * 4, [3] * 4]
    assert buf.array[[0, 512]].tolist() == ([1, 1] if kept else [4, 3])
    buf.array[[5, 130, 520]] = 9  # the CPU stores into both lines, and between them
    l2.board_l2().flush(invalidate=False)
    assert buf.array[[0, 512]].tolist() == [4, 3]
    assert buf.array[[5, 130, 520]].tolist() == ([1, 9, 1] if kept else [9, 9, 9])
    buf.array[0] = 7  # the line is clean now, and there
    assert pages.view_bytes(VA, 1, "read")[0] == (4 if kept else 7)
    l2.board_l2().flush(invalidate=True)
    assert buf.array[0] == 7 and pages.view_bytes(VA, 1, "read")[0] == 7


def test_lines_belong_to_the_memory_not_to_a_mapping() -> None:
    buf = DmaBuf(16384, "buffer")
    buf.array = np.ones(16384, np.uint8)
    pages = GpuAddressSpace("space")
    pages.add_mapping(Mapping(VA, 16384, buf, flags=l2.CACHEABLE))
    pages.add_mapping(Mapping(VA + 65536, 8192, buf, buf_offset=8192, flags=l2.CACHEABLE))
    pages.scatter(lanes(8192 + 256), np.full((1, 4), 3, np.uint8))
    assert pages.gather(lanes(65536 + 256), 4).tolist() == [[3] * 4]
    assert buf.array[8192 + 256] == 1


def test_evictions_come_from_the_seed() -> None:
    def after(policy: str, seed: int) -> list[int]:
        l2.reset_board_l2(policy, seed)
        buf = DmaBuf(1 << 16, "buffer")
        buf.array = np.ones(1 << 16, np.uint8)
        pages = GpuAddressSpace("space")
        pages.add_mapping(Mapping(VA, 1 << 16, buf, flags=l2.CACHEABLE))
        pages.scatter(lanes(*range(0, 1 << 16, 128)), np.full((512, 4), 3, np.uint8))
        l2.board_l2().on_grid_boundary()
        return [int(n) for n in np.flatnonzero(buf.array[::128] == 3)]

    assert after("keep", 1) == []
    evicted = [after("evict", seed) for seed in range(8)]
    assert after("evict", 3) == evicted[3]
    assert {0, 512} <= {0} | {len(found) for found in evicted}  # one seed evicts all at once
    assert any(0 < len(found) < 64 for found in evicted)  # another one few


def test_a_running_grid_loses_nothing_to_a_flush() -> None:
    l2.reset_board_l2("keep", 0)
    buf = DmaBuf(4096, "buffer")
    buf.array = np.ones(4096, np.uint8)
    pages = GpuAddressSpace("space")
    pages.add_mapping(Mapping(VA, 4096, buf, flags=l2.CACHEABLE))
    held = pages.view_bytes(VA, 4, "write")  # as local memory is
    l2.board_l2().executing += 1
    l2.board_l2().flush(invalidate=True)
    held[:] = bytes([5]) * 4
    l2.board_l2().executing -= 1
    assert pages.view_bytes(VA, 1, "read")[0] == 5
    l2.board_l2().flush(invalidate=True)
    assert buf.array[0] == 5


def test_the_policy_all_keeps_volatile_lines_but_the_hosts_own() -> None:
    l2.reset_board_l2("all", 0)
    try:
        buf = DmaBuf(4096, "buffer")
        buf.array = np.ones(4096, np.uint8)
        pages = GpuAddressSpace("space")
        pages.add_mapping(Mapping(VA, 4096, buf))
        pages.scatter(lanes(0), np.full((1, 4), 3, np.uint8))
        pages.view_bytes(VA + 256, 4, "write", past=True)[:] = bytes([4]) * 4
        assert buf.array[[0, 256]].tolist() == [1, 4]
    finally:
        l2.reset_board_l2("keep", 0)
