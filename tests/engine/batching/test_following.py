"""Steps that begin before the tokens of the one before are read: they change no answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.engine.batching.running import (
    GREEDY,
    SEEDED,
    VOCABULARY,
    Running,
    alone,
    ear,
    job,
    prompt,
    runner,
    wait,
)
from tests.engine.server.live import wait_until

from orinllm.batching.scheduler import SchedulerClosedError
from orinllm.batching.sequence import ScheduledSequence
from orinllm.choose.sampling import Words
from orinllm.gpu.kernels.buffers import PAGE

COUNTED = replace(SEEDED, presence_penalty=1.5, repeat_penalty=1.3, penalty_tokens=8)


class Grammar:
    """Allows half of the tokens, another half behind each, and a number of them."""

    def __init__(self, most: int) -> None:
        self._left, self._last, self.is_complete = most, 0, False

    def allowed_mask(self) -> Words:
        return np.full(VOCABULARY // 32, 0x55555555 << self._last % 2, np.uint32)

    def take_token(self, token: int) -> None:
        self._left, self._last = self._left - 1, token
        self.is_complete = not self._left


def of_every_kind() -> list[ScheduledSequence]:
    """Return requests whose answers end by a count, a token, a text, a grammar, or are counted."""
    ends = job(prompt(2, 70), 60, SEEDED)
    ends.end_ids = frozenset(alone(ends.ids, SEEDED, 20)[19:])
    stopped = job(prompt(3, 30), 60)
    ear(stopped).most = 13
    known = job(prompt(5, 3), 15, top=2)
    held = job(prompt(6, 40), 60, SEEDED, constraint=Grammar(11))
    return [job(prompt(1, 200), 50), ends, stopped, job(prompt(4, 9), 40, COUNTED), known, held]


def answers(under_way: int) -> tuple[list[object], int]:
    """Answer requests of every kind, which come one by one; then who finds what they left."""
    jobs = of_every_kind()
    with Running(runner(slots=3, pages=16)) as it:
        it.runner.most_steps_in_flight = under_way
        for one in jobs:
            it.scheduler.submit([one])
            wait_until(lambda one=one: one.began, "its begin")  # type: ignore[misc]
        wait(*jobs)
        again = [job([*one.ids, 5], 3) for one in jobs]
        for one in again:
            it.answer(one)
        assert it.store.n_used_pages == 0
        return [(ear(one).heard, ear(one).reason) for one in jobs] + [
            (one.n_cached, ear(one).heard) for one in again
        ], it.runner.followed


def test_answers_are_those_of_steps_that_wait() -> None:
    waiting, followed = answers(1)
    assert followed == 0
    ahead, followed = answers(2)
    assert ahead == waiting
    assert followed > 0


@pytest.mark.parametrize(
    ("more", "followed"),
    [
        ({}, 8),  # not the first, nor the one behind the prompt's end; and none begins in vain
        ({"top": 1}, 0),
        ({"constraint": Grammar(10)}, 0),
    ],
)
def test_steps_follow_where_the_host_draws_nothing(more: dict[str, Any], followed: int) -> None:
    one = job(prompt(1, 5), 10, **more)
    with Running(runner()) as it:
        it.answer(one)
    assert (it.runner.steps, it.runner.followed) == (10, followed)


@pytest.mark.parametrize("length", [PAGE - 4, PAGE - 3, PAGE - 2])
def test_a_step_in_vain_leaves_nothing_to_others(length: int) -> None:
    """Behind the token that ends an answer one more is computed, perhaps the last of a page."""
    ids = prompt(7, length)
    end = alone(ids, GREEDY, 4)[3]
    one = job(ids, 50)
    one.end_ids = frozenset([end])
    with Running(runner(slots=1, pages=4)) as it:
        it.answer(one)
        assert (ear(one).heard, ear(one).reason) == (alone(ids, GREEDY, 3), "stop")
        assert (it.runner.steps, it.runner.followed, it.store.n_used_pages) == (5, 3, 0)
        longer = job([*one.ids, end, 3], 9)
        it.answer(longer)
        # The answer's last token was computed, the one that ends it is kept by nobody.
        assert longer.n_cached == len(one.ids)
        assert ear(longer).heard == alone([*one.ids, end, 3], GREEDY, 9)


def test_whoever_ends_costs_others_no_step() -> None:
    ends, stays = job(prompt(1, 5), 50), job(prompt(2, 5), 12)
    ends.end_ids = frozenset(alone(ends.ids, GREEDY, 4)[3:])
    it = Running(runner(slots=2))
    it.scheduler.submit([ends, stays])
    with it:
        wait(ends, stays)
    assert (len(ear(ends).heard), len(ear(stays).heard), it.runner.steps) == (3, 12, 12)


def counted(it: Running, at: int, do: Callable[[], None]) -> None:
    """Do something within the scheduler's `at`-th call of the runner."""
    calls = 0

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                do()
            return call(*given)

        return called

    for name in ("fill_pages", "prefill_and_submit_token", "submit_step", "wait_for_tokens"):
        setattr(it.runner, name, wrap(getattr(it.runner, name)))


@pytest.mark.parametrize("at", [1, 2, 5, 12, 21])
def test_whoever_is_cancelled_at_any_call_frees_pages_and_harms_nobody(at: int) -> None:
    gone, stays, late = job(prompt(1, 100), 10**6), job(prompt(2, 60), 12), job(prompt(3, 90), 9)
    it = Running(runner(slots=2, pages=6))
    counted(it, at, lambda: it.scheduler.cancel([gone]))
    it.scheduler.submit([gone, stays, late])
    with it:
        wait(stays, late)
        wait_until(
            lambda: it.scheduler.n_running + it.scheduler.n_waiting == 0, "an idle scheduler"
        )
        assert it.store.n_used_pages == 0
    assert gone.over and not ear(gone).done.is_set()
    assert ear(gone).heard == alone(gone.ids[:100], GREEDY, len(ear(gone).heard))
    for one, length, most in ((stays, 60, 12), (late, 90, 9)):
        assert ear(one).heard == alone(one.ids[:length], GREEDY, most)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_device_that_fails_at_any_call_tells_everyone(at: int) -> None:
    """So it does in the step that began early, and while the one before it is read."""

    def fault() -> None:
        raise RuntimeError("the device is gone")

    jobs, failures = [job(prompt(i, 5), 9) for i in (1, 2, 3)], list[str]()
    it = Running(runner(slots=2))
    it.scheduler.on_failure = failures.append
    counted(it, at, fault)
    it.scheduler.submit(jobs)
    with it:
        wait(*jobs)
    assert failures == ["the engine failed: RuntimeError: the device is gone"]
    for one in jobs:
        assert (ear(one).reason, ear(one).error) == ("error", failures[0])
        assert ear(one).heard == alone(one.ids[:5], GREEDY, 9)[: len(ear(one).heard)]
    assert isinstance(it.scheduler.failure, RuntimeError)


@pytest.mark.parametrize("at", [1, 3, 8])
def test_a_server_that_is_cut_at_any_call_ends(at: int) -> None:
    jobs = [job(prompt(i, 5), 10**6) for i in (1, 2, 3)]
    it = Running(runner(slots=2))
    counted(it, at, it.scheduler.end_all)
    it.scheduler.submit(jobs)
    with it:
        wait(*jobs)
        with pytest.raises(SchedulerClosedError):
            it.scheduler.submit([job([1], 1)])
    assert it.store.n_used_pages == 0
    for one in jobs:
        assert ear(one).reason == "cut"
        assert ear(one).heard == alone(one.ids[:5], GREEDY, len(ear(one).heard))
    assert ear(jobs[2]).heard == []
