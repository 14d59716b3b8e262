"""Allocation of GPU addresses: nvgpu's buddy allocator, and policies that place more cruelly.

A region is cut into descending power-of-two chunks from its base; a request is rounded up to a
power of two of 4 KiB pages, and blocks are aligned to their size relative to the region's base
[K36 common/mm/allocators/buddy_allocator.c]. The policies differ only in which free block is taken
and which half of it; each gives addresses that the real allocator could give too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

PAGE = 4096
WINDOWS = (0xFD00000000, 0xFF00000000)
"""Usual place of the SM's local and shared memory windows, 4 GiB each."""


class BuddyAllocator:
    """A region [base, end) of GPU addresses.

    `policy` is buddy (the kernel's: smallest block, split lowest first), low, high, random,
    windows (into WINDOWS when something there is free) or reuse (the block freed last).
    """

    def __init__(self, base: int, end: int, policy: str = "buddy", seed: int = 0) -> None:
        self.base, self.end, self.policy = base, end, policy
        self._rng = random.Random(f"place {seed} {base}")
        self._chunks: list[tuple[int, int]] = []
        self._free: dict[int, list[int]] = {}
        self._taken: dict[int, int] = {}
        self._fixed: dict[int, list[tuple[int, int]]] = {}
        self._recent: list[tuple[int, int]] = []
        self._checked = False
        at = 0
        while end - base - at >= PAGE:
            order = (end - base - at).bit_length() - 1
            self._chunks.append((at, order))
            self._free.setdefault(order, []).append(at)
            at += 1 << order

    def alloc_if_room(self, size: int) -> int | None:
        """An address for `size` bytes, None when no block is large enough."""
        self._checked = False
        order = max((-(-size // PAGE) * PAGE - 1).bit_length(), PAGE.bit_length() - 1)
        choice = self._choose_free_block(order)
        if choice is None:
            return None
        at, have = choice
        self._free[have].remove(at)
        while have > order:
            have -= 1
            low, high = at, at + (1 << have)
            at, other = (low, high) if self._takes_lower_half(low, high, have) else (high, low)
            self._free.setdefault(have, []).insert(0, other)
        self._taken[at] = order
        return self.base + at

    def alloc_fixed_if_free(self, address: int, size: int) -> bool:
        """Take exactly [address, address + size); False when any of it is not free."""
        self._checked = False
        if address % PAGE or size <= 0 or address < self.base or address + size > self.end:
            return False
        start, end = address - self.base, address - self.base + size
        free = ((at, 1 << order) for order, blocks in self._free.items() for at in blocks)
        covered = sum(max(min(end, at + n) - max(start, at), 0) for at, n in free)
        if covered < end - start:
            return False
        kept: list[tuple[int, int]] = []
        for at, order in _aligned_blocks(start, end):
            self._split_out(at, order)
            kept.insert(0, (at, order))  # the kernel frees the last piece first
        self._fixed[start] = kept
        return True

    def free(self, address: int) -> None:
        """Give back a block that was handed out; raises KeyError for an unknown one."""
        self._checked = False
        at = address - self.base
        if at in self._fixed:
            for piece, order in self._fixed.pop(at):
                self._free_and_merge(piece, order)
        else:
            self._free_and_merge(at, self._taken.pop(at))

    def taken_blocks(self) -> list[tuple[int, int]]:
        """All allocated blocks as (address, size), sorted."""
        blocks = [(self.base + at, 1 << order) for at, order in self._taken.items()]
        for pieces in self._fixed.values():
            blocks += [(self.base + at, 1 << order) for at, order in pieces]
        return sorted(blocks)

    def check_invariants(self) -> None:
        """Free and taken blocks tile the region; raises AssertionError."""
        if self._checked:
            return
        free = [(self.base + at, 1 << o) for o, blocks in self._free.items() for at in blocks]
        at = self.base
        for start, size in sorted(self.taken_blocks() + free):
            assert start == at, f"gap or overlap at {at:#x} (block {start:#x})"
            at = start + size
        assert at == self.base + sum(1 << order for _, order in self._chunks)
        self._checked = True

    def _choose_free_block(self, order: int) -> tuple[int, int] | None:
        fits = [(at, o) for o, blocks in self._free.items() if o >= order for at in blocks]
        if not fits:
            return None
        match self.policy:
            case "low":
                return min(fits)
            case "high":
                return max(fits)
            case "random":
                return self._rng.choice(sorted(fits))
            case "windows":
                inside = [f for f in fits if self._touches_window(f[0], f[1])]
                if inside:
                    return min(inside)
            case "reuse":
                recent = [(at, o) for o, at in self._recent if at in self._free.get(o, ())]
                usable = [f for f in recent if f[1] >= order]
                if usable:
                    return usable[-1]
        smallest = min(o for _, o in fits)
        return self._free[smallest][0], smallest

    def _takes_lower_half(self, low: int, high: int, order: int) -> bool:
        match self.policy:
            case "high":
                return False
            case "random":
                return self._rng.random() < 0.5
            case "windows":
                return self._touches_window(low, order) or not self._touches_window(high, order)
        return True

    def _touches_window(self, at: int, order: int) -> bool:
        start = self.base + at
        return start < WINDOWS[1] and WINDOWS[0] < start + (1 << order)

    def _split_out(self, at: int, order: int) -> None:
        """Cut the block (at, order) out of the free block that holds it."""
        have = order
        while (start := at & -(1 << have)) not in self._free.get(have, ()):
            have += 1
        self._free[have].remove(start)
        while have > order:
            have -= 1
            sibling = (at & -(1 << have)) ^ (1 << have)
            self._free.setdefault(have, []).insert(0, sibling)

    def _free_and_merge(self, at: int, order: int) -> None:
        while True:
            buddy, parent = at ^ (1 << order), at & ~(1 << order)
            blocks = self._free.get(order, [])
            if buddy not in blocks or not self._fits_in_chunk(parent, order + 1):
                break
            blocks.remove(buddy)
            at, order = parent, order + 1
        self._free.setdefault(order, []).insert(0, at)
        self._recent.append((order, at))
        del self._recent[:-64]

    def _fits_in_chunk(self, at: int, order: int) -> bool:
        return any(c <= at and at + (1 << order) <= c + (1 << o) for c, o in self._chunks)


def _aligned_blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """The blocks that the kernel cuts [start, end) into: (offset, order in bytes), ascending.

    The first is no larger than the lowest set bit of start and of the length, so that it may be
    smaller than it could be; each further one is as large as its offset and the rest allow.
    """
    at, order = start, _lowest_set_bit_index(end - start)
    if start:
        order = min(order, _lowest_set_bit_index(start))
    while at < end:
        yield at, order
        at += 1 << order
        order = min(_lowest_set_bit_index(at), (end - at).bit_length() - 1)


def _lowest_set_bit_index(value: int) -> int:
    """Index of the lowest set bit."""
    return (value & -value).bit_length() - 1
