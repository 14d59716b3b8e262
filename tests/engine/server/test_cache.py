"""Pages: who has them, and what a prompt finds in them."""

from tests.engine.server.test_scheduler import prompt

from orinllm.cache import OneStore, PagedStore
from orinllm.launches.buffers import PAGE


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Its logits are wanted, even where its page is known and full."""
    store, ids = PagedStore(4), prompt(1, 2 * PAGE)
    first = store.begin(ids, len(ids))
    assert first is not None
    store.commit(first, ids, len(ids))
    store.end(first)
    second = store.begin(ids, len(ids))
    assert second is not None and second.cached == PAGE


def test_the_end_of_a_text_is_forgotten_before_its_beginning() -> None:
    store, ids = PagedStore(4), prompt(1, 3 * PAGE + 1)
    lease = store.begin(ids, len(ids))
    assert lease is not None
    store.commit(lease, ids, 3 * PAGE)
    store.end(lease)
    other = store.begin(prompt(2, PAGE + 1), PAGE + 1)  # one free page, and one that is known
    assert other is not None
    store.end(other)
    again = store.begin(ids, len(ids))
    assert again is not None
    assert again.cached == 2 * PAGE


def test_a_page_is_known_by_its_tokens_and_all_before_them() -> None:
    store = PagedStore(16)
    a, b, c, d = (prompt(i, PAGE) for i in range(4))
    for ids, steps in (([*a, *b, 1], (PAGE, 2 * PAGE)), ([*c, *d, 1], (2 * PAGE,))):
        lease = store.begin(ids, len(ids))
        assert lease is not None and lease.cached == 0
        for done in steps:
            store.commit(lease, ids, done)
        store.end(lease)
    for ids, cached in (([*a, *b], 2), ([*c, *d], 2), ([*c, *b], 1), ([*b, *a], 0), ([*d], 0)):
        lease = store.begin([*ids, 1], len(ids) + 1)
        assert lease is not None and lease.cached == cached * PAGE
        store.end(lease)
    # Two that began together have pages of their own, of which one is found, and both can go.
    store, ids = PagedStore(4), [*a, 1]
    pair = [store.begin(ids, len(ids)) for _ in range(2)]
    for lease in pair:
        assert lease is not None
        store.commit(lease, ids, PAGE)
    for lease in pair:
        assert lease is not None
        store.end(lease)
    assert store.begin([*b, *c, *d, 1], 4 * PAGE) is not None
    assert store.used == 4


def test_one_sequence_keeps_what_it_held() -> None:
    store = OneStore(100)
    first = store.begin([1, 2, 3, 4], 4)
    assert first is not None and first.cached == 0
    assert store.begin([1], 1) is None
    store.commit(first, [1, 2, 3, 4, 5], 5)
    store.end(first)
    second = store.begin([1, 2, 3, 9], 4)
    assert second is not None and second.cached == 3
    store.end(second)
    # Overwritten pages are forgotten, even if the request never ran.
    third = store.begin([1, 2, 3, 4, 5], 5)
    assert third is not None and third.cached == 3
    store.end(third)
    fourth = store.begin([1, 2, 3], 3)  # the last token is computed again
    assert fourth is not None and fourth.cached == 2
    recurrent = OneStore(100, resumable=False)
    lease = recurrent.begin([1, 2], 2)
    assert lease is not None
    recurrent.commit(lease, [1, 2, 3], 3)
    recurrent.end(lease)
    longer = recurrent.begin([1, 2, 3, 4], 4)
    assert longer is not None and longer.cached == 3
    recurrent.end(longer)
    other = recurrent.begin([1, 2, 5], 3)
    assert other is not None and other.cached == 0
