"""A bounded set of recurrent states, each of a slot's tokens up to a page's border.

A recurrent state does not go back, as keys and values do. A prompt that begins like what a slot
holds goes on from the last checkpoint before they part.
"""

from collections import OrderedDict

from orinllm.gpu.kernels.buffers import PAGE

# Pages between two checkpoints of a prompt, at least.
_SPACING = 8


class Checkpoints:
    """At most `total` of them; where there is no room, the one that was used longest ago goes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._of: OrderedDict[int, tuple[int, int]] = OrderedDict()  # slot, and tokens
        self._pinned: list[int] = []

    def best(self, slot: int, most: int) -> tuple[int, int | None]:
        """Return the most tokens up to `most` that a checkpoint of a slot has, and which it is."""
        of_slot = ((n, i) for i, (of, n) in self._of.items() if of == slot and n <= most)
        return max(of_slot, default=(0, None))

    def pin(self, checkpoint: int) -> None:
        """Keep a checkpoint until it is unpinned: somebody begins with it."""
        self._of.move_to_end(checkpoint)
        self._pinned.append(checkpoint)

    def unpin(self, checkpoint: int) -> None:
        """Let a checkpoint go again."""
        self._pinned.remove(checkpoint)

    def cut(self, slot: int, tokens: int) -> None:
        """Forget a slot's checkpoints behind so many tokens: others come there."""
        for checkpoint in [i for i, (of, n) in self._of.items() if of == slot and n > tokens]:
            del self._of[checkpoint]
            self._free.append(checkpoint)

    def take(self, slot: int, tokens: int) -> int | None:
        """Return the checkpoint for a slot's first tokens; None: it has one, or there is none."""
        if (slot, tokens) in self._of.values():
            return None
        if not self._free:
            oldest = next((i for i in self._of if i not in self._pinned), None)
            if oldest is None:
                return None
            del self._of[oldest]
            self._free.append(oldest)
        checkpoint = self._free.pop()
        self._of[checkpoint] = slot, tokens
        return checkpoint

    def stop(self, start: int, end: int, prompt: int) -> int:
        """Return where between them a piece of a prompt of so many tokens stops to be kept.

        That is at its last page's border, where a chat's next prompt parts from this one, and at
        equal distances before; a prompt takes half of the checkpoints at most.
        """
        pages = max(_SPACING, -(-prompt // PAGE) // max(1, self.total // 2 - 1))
        step = pages * PAGE
        places = ((prompt - 1) // PAGE * PAGE, (start // step + 1) * step)
        return min((place for place in places if start < place < end), default=end)
