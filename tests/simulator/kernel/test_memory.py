"""The page table as the execution side sees it, and the allocator behind the addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvgpusim.memory import (
    DmaBuf,
    GpuAddressSpace,
    Mapping,
    MmuFault,
    fill_present_pages,
    map_shared_pages,
)
from nvgpusim.options import PLACES
from nvgpusim.orin.kernel.allocator import PAGE, BuddyAllocator


def buffer(size: int, name: str = "buf") -> DmaBuf:
    """An allocated buffer of its own memfd."""
    made = DmaBuf(size, name, line="test.py:1")
    fd = os.memfd_create(name)
    made.map_memfd(fd)
    os.close(fd)
    return made


@pytest.fixture
def vm() -> Iterator[GpuAddressSpace]:
    """Two buffers side by side, a third apart and read-only."""
    space = GpuAddressSpace("space")
    space.add_mapping(Mapping(0x10000, 8192, buffer(8192, "one")))
    space.add_mapping(Mapping(0x12000, 4096, buffer(4096, "two")))
    space.add_mapping(Mapping(0x40000, 4096, buffer(8192, "three"), 4096, read_only=True))
    yield space


def lanes(*va: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Lane addresses."""
    return np.array(va, np.uint64)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16])
def test_lanes_read_what_lanes_wrote(vm: GpuAddressSpace, width: int) -> None:
    rng = np.random.default_rng(width)
    va = np.uint64(0x10000) + rng.permutation(12288 // 16)[:200].astype(np.uint64) * np.uint64(16)
    for shift in (0, 1):
        at = va + np.uint64(shift) if width <= 8 else va
        data = rng.integers(0, 256, (200, width)).astype(np.uint8)
        vm.scatter(at, data)
        assert np.array_equal(vm.gather(at, width), data)
    one = vm.view_bytes(int(at[0]), width, "read")
    assert bytes(one) == data[0].tobytes() and one.readonly


def test_later_lanes_win(vm: GpuAddressSpace) -> None:
    vm.scatter(lanes(0x10000, 0x10000, 0x12000), np.array([[1], [2], [3]], np.uint8))
    assert vm.gather(lanes(0x10000, 0x12000), 1).tolist() == [[2], [3]]


def test_no_lane_no_access(vm: GpuAddressSpace) -> None:
    assert vm.gather(lanes(), 4).shape == (0, 4)
    vm.scatter(lanes(), np.zeros((0, 4), np.uint8))


def test_faults_name_the_lane(vm: GpuAddressSpace) -> None:
    with pytest.raises(MmuFault) as fault:
        vm.gather(lanes(0x10000, 0x30000, 0x50000), 4)
    assert (fault.value.lane, fault.value.va, fault.value.kind) == (1, 0x30000, "unmapped")
    with pytest.raises(MmuFault) as fault:
        vm.scatter(lanes(0x10000, 0x40000), np.full((2, 4), 7, np.uint8))
    assert (fault.value.lane, fault.value.kind) == (1, "read-only")
    assert not vm.gather(lanes(0x10000), 4).any(), "nothing is written when a lane faults"
    with pytest.raises(MmuFault) as fault:
        vm.gather(lanes(0x40FFC, 0x40FFE), 4)
    assert fault.value.va == 0x41000
    with pytest.raises(MmuFault, match="read-only"):
        vm.scatter(lanes(0x40000), np.zeros((1, 1), np.uint8))
    with pytest.raises(MmuFault, match="it is empty"):
        GpuAddressSpace("new").gather(lanes(5), 1)


def test_views_stay_inside_a_mapping(vm: GpuAddressSpace) -> None:
    vm.view_bytes(0x10000, 8192, "write")[8191] = 5
    with pytest.raises(MmuFault):
        vm.view_bytes(0x11000, 8192, "read")
    with pytest.raises(MmuFault, match="read-only"):
        vm.view_bytes(0x40000, 4, "atomic")


def test_descriptions(vm: GpuAddressSpace) -> None:
    assert "+0x10 in one" in vm.describe_address(0x10010) and "read-only" in vm.describe_address(
        0x40000
    )
    assert "0x1000 after the end of two" in vm.describe_address(0x14000)
    assert "0x2c000 before three" in vm.describe_address(0x14000)
    assert "CPU pointer" in vm.describe_address(1 << 46)
    mapping = vm.mapping_at(0x12000)
    assert mapping is not None
    vm.remove_mapping(mapping, "there")
    assert "was +0x4 in two" in vm.describe_address(
        0x12004
    ) and "unmapped by there" in vm.describe_address(0x12004)


def test_poison_touches_only_what_exists() -> None:
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, 64 << 20)
    pages = map_shared_pages(fd, 64 << 20)
    pages[5 * PAGE] = 1
    fill_present_pages(pages, 0xDB)
    assert pages[5 * PAGE : 6 * PAGE].tolist() == [0xDB] * PAGE
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    os.close(fd)
    with pytest.raises(OSError, match="Bad file"):
        map_shared_pages(fd, 4096)


def test_reuse_gives_the_block_freed_last() -> None:
    buddy = BuddyAllocator(1 << 21, 1 << 32, "reuse")
    blocks = [buddy.alloc_if_room(PAGE) for _ in range(8)]
    for at in (blocks[2], blocks[5]):
        assert at is not None
        buddy.free(at)
    assert buddy.alloc_if_room(PAGE) == blocks[5] and buddy.alloc_if_room(PAGE) == blocks[2]
    with pytest.raises(KeyError):
        buddy.free(12345)


SIZES = st.sampled_from([1, 4096, 4097, 1 << 16, 3 << 20, 1 << 28, 4 << 30])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PLACES),
    st.sampled_from([(0x200000, 0xFFFFE00000), (1 << 21, 0xFC00000000), (1 << 26, 1 << 37)]),
    st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1 << 40)), max_size=60),
)
def test_nothing_overlaps(
    place: str, region: tuple[int, int], acts: list[tuple[bool, int, int]]
) -> None:
    buddy = BuddyAllocator(*region, place, seed=1)
    held: dict[int, int] = {}
    for fixed, size, at in acts:
        if at % 3 == 0 and held:
            victim = sorted(held)[at % len(held)]
            buddy.free(victim)
            del held[victim]
        elif fixed:
            va, whole = at // PAGE * PAGE, -(-size // PAGE) * PAGE
            free = not any(a < va + whole and va < a + s for a, s in buddy.taken_blocks())
            inside = region[0] <= va and va + whole <= region[1]
            if buddy.alloc_fixed_if_free(va, whole):
                assert free and inside
                held[va] = whole
            else:
                assert not (free and inside)
        else:
            got = buddy.alloc_if_room(size)
            if got is not None:
                rounded = 1 << max(size - 1, PAGE - 1).bit_length()
                assert (got - region[0]) % rounded == 0
                assert not any(a < got + size and got < a + s for a, s in held.items())
                held[got] = size
        buddy.check_invariants()
    for va in held:
        buddy.free(va)
    buddy.check_invariants()
    assert buddy.taken_blocks() == []
