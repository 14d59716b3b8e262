"""`--order`: what a GPU may see when stores are not ordered by barriers.

Stores to ring, GPPut and doorbell are different memory types on the board and may arrive in any
order unless a barrier stands between. Stores cannot be observed one by one here, barriers can: at
each one the ring's next entries and GPPut are noted. At a doorbell,

- an entry that was not in the ring at a barrier before GPPut moved is not visible: the GPU reads
  what the slot held before;
- a GPPut that no barrier followed is not visible: the doorbell finds nothing, the work waits for
  the next one.

Pushbuffer and QMD are written before the ring entry and share its barrier. The seam sees barriers:
calls through ctypes of the functions that it names. A doorbell that was rung before a barrier is
served before the barrier returns, so that it is judged by what it announced.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pbdma import Channel

AHEAD = 64
"""Ring entries after GPPut that are noted at a barrier."""
_KEPT = 16


class RingVisibility:
    """The view of rings under --order; without it everything is visible at once."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._seen: dict[int, deque[tuple[int, dict[int, int]]]] = {}
        self._stale: dict[tuple[int, int], int] = {}
        self._put: dict[int, int] = {}

    def on_barrier(self, channels: Iterable[Channel]) -> None:
        """A barrier was executed: note GPPut and the entries that follow the known ones."""
        for channel in channels:
            seen = self._seen.setdefault(channel.port.id, deque(maxlen=_KEPT))
            n, ring = channel.port.entries, channel.port.ring
            slots = [(channel.known_put + k) % n for k in range(min(AHEAD, n))]
            entries = {i: struct.unpack_from("<Q", ring, 8 * i)[0] for i in slots}
            seen.append((int(channel.userd[0x8C // 4]), entries))

    def on_doorbell(self, channel: Channel, first: int, put: int) -> None:
        """Decide what of entries [first, put) the GPU sees."""
        if not self.on:
            return
        seen = list(self._seen.get(channel.port.id, ()))
        before = [window for old, window in seen if old != put]
        published = any(old == put for old, _ in seen)
        number = channel.port.id
        if put == first and number not in self._put:
            return  # nothing new
        if not published:
            channel.gpu.note_finding(
                f"no barrier between GPPut and doorbell of channel {number}: the doorbell may "
                f"arrive first and find nothing; {channel.port.submit_line}"
            )
            self._put[number] = first
        else:
            self._put.pop(number, None)
        index = first
        while index != put:
            now = struct.unpack_from("<Q", channel.port.ring, 8 * index)[0]
            if not before or before[-1].get(index, now) != now:
                channel.gpu.note_finding(
                    f"no barrier between entry {index} and GPPut of channel {number}: the GPU may "
                    f"read what the slot held before; {channel.port.submit_line}"
                )
                self._stale[number, index] = before[-1].get(index, 0) if before else 0
            index = (index + 1) % channel.port.entries
        self._seen[number] = deque(maxlen=_KEPT)

    def stale_gpput(self, channel: Channel) -> int | None:
        """GPPut as the GPU sees it, None for as it is."""
        return self._put.get(channel.port.id) if self.on else None

    def take_stale_entry(self, channel: Channel, index: int) -> int | None:
        """A ring entry that is not visible yet, None for as it is."""
        return self._stale.pop((channel.port.id, index), None) if self.on else None
