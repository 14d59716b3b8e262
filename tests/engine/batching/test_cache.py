"""Pages: who has them, and what a prompt finds in them."""

from tests.engine.batching.running import prompt

from orinllm.batching.cache import Lease, SharedPageStore, SlotStore
from orinllm.batching.state_checkpoints import StateSlots
from orinllm.gpu.kernels.buffers import PAGE


def test_the_last_page_is_kept_for_who_goes_on_behind_all_of_it() -> None:
    store, ids = SharedPageStore(3), prompt(1, PAGE + 9)

    def begin(tokens: list[int], room: int = 2 * PAGE) -> Lease | None:
        return store.try_begin_lease(tokens, room)

    def known(tokens: list[int], done: int = 0) -> int:
        lease = begin(tokens)
        assert lease is not None
        if done:
            store.commit_tokens(lease, tokens, done)
        store.end_lease(lease)
        return lease.cached

    assert known(ids, PAGE + 5) == 0
    assert known(ids[: PAGE + 5]) == PAGE  # the last token of a prompt is always computed
    # Who guesses some of it does not hear how many were right.
    assert known([*ids[: PAGE + 4], -1, -1]) == PAGE
    assert begin(ids, 4 * PAGE) is None  # and that costs nobody anything
    first = begin(ids)
    assert first is not None and first.cached == PAGE + 5
    # It has one user; another one gets a page of its own.
    second = begin(ids)
    assert second is not None and second.cached == PAGE and second.pages[1] != first.pages[1]
    store.commit_tokens(first, ids, PAGE + 6)
    store.commit_tokens(second, ids, PAGE + 8)
    store.end_lease(first)
    store.end_lease(second)
    assert known(ids) == PAGE + 8  # the one that ended last is found
    other = begin(prompt(2, 5), 3 * PAGE)
    assert other is not None and store.n_free_pages == 0
    store.end_lease(other)
    assert known(ids) == 0


def test_one_sequence_keeps_what_it_held() -> None:
    store, asked = SlotStore(1, 4 * PAGE), prompt(1, PAGE + 20)
    said = [*asked, *prompt(2, PAGE)]

    def known(ids: list[int], computed: int = 0) -> int:
        lease = store.try_begin_lease(ids, len(ids))
        assert lease is not None and store.try_begin_lease([1], 1) is None
        if computed:
            store.commit_tokens(lease, ids, computed)
        store.end_lease(lease)
        return lease.cached

    assert known(asked) == 0
    lease = store.try_begin_lease(asked, len(asked))
    assert lease is not None
    store.commit_tokens(lease, said, len(said))
    store.end_lease(lease)
    assert known([*said, 5], len(said) + 1) == len(said)  # a chat goes on behind all of it
    assert known([*said, 5]) == len(said)  # asked again
    # Overwritten pages are forgotten, even if the request never ran.
    assert known([*said, 6]) == len(said)
    # Who guesses some of it does not hear how many were right.
    for right in (PAGE, PAGE + 1, PAGE + 19, len(said) - 1):
        known([*said, 5], len(said) + 1)
        assert known([*said[:right], -1, -1]) == right // PAGE * PAGE
    recurrent = SlotStore(1, 100, resumable=False)
    lease = recurrent.try_begin_lease([1, 2], 2)
    assert lease is not None
    recurrent.commit_tokens(lease, [1, 2, 3], 3)
    recurrent.end_lease(lease)
    longer = recurrent.try_begin_lease([1, 2, 3, 4], 4)
    assert longer is not None and longer.cached == 3
    recurrent.end_lease(longer)
    other = recurrent.try_begin_lease([1, 2, 5], 3)
    assert other is not None and other.cached == 0


def test_states_of_a_prompt_that_was_cancelled_are_nobodys() -> None:
    """It ended before its checkpoint was copied: its slot still has another text's states."""
    store, ids = SharedPageStore(8, StateSlots(2, 1)), prompt(1, PAGE + 1)
    first = store.try_begin_lease(ids, len(ids))
    assert first is not None
    first.started = PAGE
    store.commit_tokens(first, ids, PAGE)
    assert store.claim_save_checkpoint(first) == 0
    first.started = PAGE + 1  # a step was started whose token nobody knows
    store.end_lease(first)
    cancelled = store.try_begin_lease(ids, len(ids))
    assert cancelled is not None and (cancelled.cached, cancelled.resumes) == (PAGE, 0)
    store.end_lease(cancelled)
    again = store.try_begin_lease(ids, len(ids))
    assert again is not None and (again.cached, again.resumes) == (PAGE, 0)
    # What somebody begins with stays until it is copied, and goes then.
    other = store.try_begin_lease(prompt(2, PAGE + 1), PAGE + 1)
    assert other is not None and other.cached == 0
    store.commit_tokens(other, prompt(2, PAGE + 1), PAGE)
    assert store.claim_save_checkpoint(other) is None
    assert store.pop_restore_checkpoint(again) == 0
    assert store.claim_save_checkpoint(other) == 0
    store.commit_tokens(other, prompt(2, PAGE + 1), PAGE + 1)
    assert store.claim_save_checkpoint(other) is None  # it is not at a border


def test_a_slot_that_is_taken_has_no_texts_states() -> None:
    slots = StateSlots(2, 0)
    assert (slots.take_slot(None), slots.take_slot(None)) == (0, 1)
    slots.give_back_slot(0, "a")
    slots.give_back_slot(1, None)
    assert slots.take_slot(None) == 1  # of two that are free, the one without a text
    assert slots.has_states_of_text("a") and slots.take_slot("b") == 0
    assert not slots.has_states_of_text("a")
    slots.give_back_slot(0, "a")
    slots.give_back_slot(1, None)
    assert slots.take_slot("a") == 0 and not slots.has_states_of_text("a")


def test_each_slot_has_a_context_of_pages() -> None:
    store = SlotStore(3, PAGE + 1)
    lease = store.try_begin_lease([1, 2], 2)
    assert lease is not None and (store.total, store.n_used_pages, store.n_free_pages) == (6, 2, 4)
    assert store.try_begin_lease([1], PAGE + 2) is None
    store.end_lease(lease)
    assert (store.n_used_pages, store.n_free_pages) == (0, 6)
