"""A bounded set of recurrent states, each of a text's tokens up to a page's border.

A recurrent state does not go back, as keys and values do. A prompt that begins like what a slot
holds goes on from the last checkpoint before they part.
"""

from collections import OrderedDict
from collections.abc import Hashable

from orinllm.gpu.kernels.buffers import PAGE

# Pages between two checkpoints of a prompt, at least.
_SPACING = 8


class StateCheckpoints:
    """At most `total` of them; where there is no room, the one that was used longest ago goes.

    Owners are slots, or names of texts (cache.py).
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._of: OrderedDict[int, tuple[Hashable, int]] = OrderedDict()  # owner, and tokens
        self._pinned: list[int] = []

    def length_and_checkpoint_of_owner(self, owner: Hashable, most: int) -> tuple[int, int | None]:
        """Return the most tokens up to `most` that an owner's checkpoint has, and which it is."""
        of_owner = ((n, i) for i, (of, n) in self._of.items() if of == owner and n <= most)
        return max(of_owner, default=(0, None))

    def pin(self, checkpoint: int) -> None:
        """Keep a checkpoint until it is unpinned: somebody begins with it."""
        self._of.move_to_end(checkpoint)
        self._pinned.append(checkpoint)

    def unpin(self, checkpoint: int) -> None:
        """Let a checkpoint go again."""
        self._pinned.remove(checkpoint)

    def forget_after(self, owner: Hashable, tokens: int) -> None:
        """Forget an owner's checkpoints behind so many tokens: others come there."""
        for checkpoint in [i for i, (of, n) in self._of.items() if of == owner and n > tokens]:
            del self._of[checkpoint]
            self._free.append(checkpoint)

    def claim_checkpoint(self, owner: Hashable, tokens: int) -> int | None:
        """Return the checkpoint for an owner's first tokens; None: it has one, or there is none."""
        if (owner, tokens) in self._of.values():
            return None
        if not self._free:
            oldest = next((i for i in self._of if i not in self._pinned), None)
            if oldest is None:
                return None
            del self._of[oldest]
            self._free.append(oldest)
        checkpoint = self._free.pop()
        self._of[checkpoint] = owner, tokens
        return checkpoint

    def prompt_piece_end(self, start: int, end: int, prompt: int) -> int:
        """Return where between them a piece of a prompt of so many tokens stops to be kept.

        That is at its last page's border, where a chat's next prompt parts from this one, and at
        equal distances before; a prompt takes half of the checkpoints at most.
        """
        pages = max(_SPACING, -(-prompt // PAGE) // max(1, self.total // 2 - 1))
        step = pages * PAGE
        places = ((prompt - 1) // PAGE * PAGE, (start // step + 1) * step)
        return min((place for place in places if start < place < end), default=end)


class StateSlots:
    """The places of running sequences' recurrent states, and what those that ended left there."""

    def __init__(self, slots: int, checkpoints: int) -> None:
        self.checkpoints = StateCheckpoints(checkpoints)
        self._free = list(range(slots))  # the one that was used longest ago is first
        self._left: dict[Hashable, int] = {}  # free slots with the states behind a text

    def has_states_of_text(self, text: Hashable) -> bool:
        """Say whether a free slot has the states behind a text."""
        return text in self._left

    def take_slot(self, text: Hashable) -> int:
        """Return the slot with the states behind a text, or else another one.

        A running sequence has a slot of its own, so there is one.
        """
        if (slot := self._left.pop(text, None)) is None:
            left = set(self._left.values())
            slot = next((free for free in self._free if free not in left), self._free[0])
            self._left = {name: of for name, of in self._left.items() if of != slot}
        self._free.remove(slot)
        return slot

    def give_back_slot(self, slot: int, text: Hashable | None) -> None:
        """Give a slot back; `text` is what its states are behind, None: nobody knows."""
        self._free.append(slot)
        if text is not None:
            self._left[text] = slot
