"""The scheduler and its pages, on a toy that notices every wrong page."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.batching.many_clients import worlds
from tests.engine.batching.running import (
    GREEDY,
    SEEDED,
    Running,
    alone,
    ear,
    job,
    prompt,
    runner,
    wait,
)
from tests.engine.server.live import wait_until

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.scheduler import QueueFullError, Scheduler
from orinllm.batching.sequence import PhaseStopwatch, ScheduledSequence, SchedulerObserver
from orinllm.cpu.executor import CpuRunner
from orinllm.gpu.fused_executor import prompt_tokens_per_step
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.server import choices
from orinllm.server.model_thread import ModelThread, SystemdWatchdog


def test_memory_that_runs_out_preempts_who_came_last() -> None:
    """Answers that need three times the pages all come, as each alone; none fails."""
    jobs = [job(prompt(i, 60), 100, replace(SEEDED, seed=i)) for i in range(6)]
    with Running(runner(slots=6, pages=6)) as it:
        it.answer(*jobs)
        assert it.preemptions > 0
        assert it.runner.widest > 1
        for one in jobs:
            assert ear(one).heard == alone(one.ids[: one.n_prompt], one.sampling, 100)
        assert it.store.n_used_pages == 0
    with Running(runner(slots=6, pages=8), reserve=True) as it:
        jobs = [job(prompt(0, 60 + 70 * (i // 2)), 300) for i in range(4)]
        it.answer(*jobs)
        assert (it.preemptions, it.runner.widest) == (0, 1)
        assert not any(one.n_cached for one in jobs)  # nothing of others is reused


@pytest.mark.parametrize(("pages", "widest"), [(2, 1), (3, 2)])
def test_who_runs_gets_the_next_page_before_who_waits(pages: int, widest: int) -> None:
    """The first needs a second page soon: the other one begins beside it only if there is one."""
    jobs = [job(prompt(1, 60), 20), job(prompt(2, 60), 3)]
    with Running(runner(slots=2, pages=pages)) as it:
        it.answer(*jobs)
        assert (it.preemptions, it.runner.widest) == (0, widest)


def test_who_began_first_is_never_preempted() -> None:
    """Answers of one length end in the order in which they began, before others begin."""
    jobs, ended = [job(prompt(i, 60), 150) for i in range(3)], list[ScheduledSequence]()
    late, before = job(prompt(9, 5), 2), list[int]()
    with Running(runner(slots=3, pages=5)) as it:
        it.watch.on_sequence_end = lambda one, *how: ended.append(one)  # type: ignore[method-assign]
        it.watch.on_sequence_begin = lambda *how: before.append(it.scheduler.n_waiting)  # type: ignore[method-assign]
        it.answer(*jobs, late)
        assert it.preemptions > 0
    ended.remove(late)
    assert ended == jobs
    assert before[-1] == 0  # nobody who was preempted waits when the last one begins


@pytest.mark.parametrize("most", [1, 4, 5])
def test_who_has_enough_while_preempted_is_gone(most: int) -> None:
    """A stop text may come with the very token after which another takes the memory."""
    first, second = job(prompt(1, 60), 100), job(prompt(2, 60), 100)
    ear(second).most = most
    with Running(runner(slots=2, pages=3)) as it:
        it.answer(first, second)
        wait_until(
            lambda: it.scheduler.n_running + it.scheduler.n_waiting == 0, "an idle scheduler"
        )
        assert (it.store.n_used_pages, ear(second).reason) == (0, "stop")
        assert ear(second).heard == alone(prompt(2, 60), GREEDY, most)


def test_a_beginning_that_is_known_is_not_computed_again() -> None:
    system = prompt(1, 200)
    first, second = job([*system, 5, 6, 7], 70), job([*system, 9], 4)
    with Running(runner()) as it:
        it.answer(first)
        assert (first.n_cached, it.runner.computed) == (0, 202)
        it.answer(second)
        assert second.n_cached == 3 * PAGE
        assert it.runner.computed == 202 + 200 - 3 * PAGE
        # A chat that grows finds the answer, too, but for the last token, which was never read.
        longer = job([*first.ids, 11, 12], 4)
        it.answer(longer)
        assert longer.n_cached == 203 + 70 - 1
        assert ear(longer).heard == alone([*first.ids, 11, 12], GREEDY, 4)
        fresh = job([*system, 9], 4, reuse=False)
        it.answer(fresh)
        assert fresh.n_cached == 0
        assert ear(fresh).heard == ear(second).heard


def test_what_is_known_makes_room_the_oldest_first() -> None:
    old, new, large = job(prompt(1, 129), 1), job(prompt(2, 129), 1), job(prompt(3, 350), 1)
    with Running(runner(pages=8)) as it:
        for one in (old, new, large):
            it.answer(one)
        again = [job(prompt(2, 129), 1), job(prompt(1, 129), 1)]
        for one in again:
            it.answer(one)
    assert [one.n_cached for one in again] == [2 * PAGE, 0]


def test_choices_share_their_prompt() -> None:
    ids = prompt(1, 130)
    first = job(ids, 5, replace(SEEDED, seed=1))
    others = [job(ids, 5, replace(SEEDED, seed=s), after=first) for s in (2, 3)]
    with Running(runner()) as it:
        it.answer(first, *others)
        assert it.runner.computed == 129 + 2 * (129 - 128)
        assert it.runner.widest == 3
    for one in (first, *others):
        assert ear(one).heard == alone(ids, one.sampling, 5)


def test_a_cancelled_answer_frees_its_slot_within_a_step() -> None:
    it = Running(runner(slots=1))
    it.runner.step_seconds = 0.02
    endless, waiting = job(prompt(1, 9), 10**6), job(prompt(2, 9), 3)
    fill, begun = it.runner.fill_pages, list[int]()

    def noted(pages: Any, tokens: Any, start: int, end: int) -> None:
        begun.append(it.runner.steps)
        fill(pages, tokens, start, end)

    it.runner.fill_pages = noted  # type: ignore[method-assign]
    with it:
        it.scheduler.submit([endless])
        it.scheduler.submit([waiting])
        wait_until(lambda: len(ear(endless).heard) > 2, "a token")
        it.scheduler.cancel([endless])
        steps = it.runner.steps
        wait(waiting)
        # The step under way, and perhaps one that began while we asked.
        assert begun[-1] - steps <= 2
    assert not ear(endless).done.is_set()
    assert ear(waiting).heard == alone(waiting.ids[:9], GREEDY, 3)


def test_who_is_cancelled_while_waiting_leaves_the_queue() -> None:
    """Its place is another's at once, not when its turn would come."""
    running, gone = job(prompt(1, 5), 1500), job(prompt(2, 5), 3)
    with Running(runner(slots=1)) as it:
        it.runner.step_seconds = 0.005
        it.scheduler.submit([running, gone])
        wait_until(lambda: it.scheduler.n_running == 1, "the first")
        it.scheduler.cancel([gone])
        wait_until(lambda: it.scheduler.n_waiting == 0, "the queue")
        assert not ear(running).done.is_set()
        it.scheduler.cancel([running])
    assert (ear(gone).heard, it.store.n_used_pages) == ([], 0)


def test_a_long_prompt_does_not_stop_others() -> None:
    """Between two pieces of a prompt all that run get a token."""
    talker, long = job(prompt(1, 5), 10**6), job(prompt(2, 128 * 12), 1)
    it = Running(runner(pages=64))
    with it:
        it.scheduler.submit([talker])
        wait_until(lambda: len(ear(talker).heard) > 2, "a token")
        before = len(ear(talker).heard)
        it.answer(long)
        assert len(ear(talker).heard) - before >= 23  # pieces of 64 tokens
        it.scheduler.cancel([talker])


def test_a_turn_computes_few_prompts_and_the_first_token_is_counted_apart() -> None:
    it, turns, firsts = Running(runner(slots=8)), [0], list[bool]()
    fill, launch = it.runner.fill_pages, it.runner.submit_step
    it.watch.on_token = lambda sequence, gap, first: firsts.append(first)  # type: ignore[method-assign]

    def counted(pages: Any, tokens: Any, start: int, end: int) -> None:
        turns[-1] += 1
        fill(pages, tokens, start, end)

    def begins(rows: Any) -> None:
        turns.append(0)
        launch(rows)

    it.runner.fill_pages, it.runner.submit_step = counted, begins  # type: ignore[method-assign]
    jobs = [job(prompt(i, 10), 3) for i in range(8)]
    with it:
        it.answer(*jobs)
    assert (sum(turns), max(turns)) == (8, 4)
    assert (firsts.count(True), firsts.count(False), firsts[0]) == (8, 16, True)


def test_whoever_is_turned_away_waits_a_second_at_least() -> None:
    with Running(runner(slots=1), queue=0) as it:
        for i in range(20):  # the mean of their times is far below a second
            it.scheduler.submit([quick := job(prompt(i, 5), 1)])
            wait(quick)
            wait_until(lambda: it.scheduler.n_running == 0, "its end")
        it.scheduler.submit([talker := job(prompt(0, 5), 10**6)])
        wait_until(lambda: it.scheduler.n_running == 1, "the talker")
        with pytest.raises(QueueFullError) as full:
            it.scheduler.submit([job([1], 1)])
        it.scheduler.cancel([talker])
    assert (full.value.waiting, full.value.seconds) == (0, 1)


def test_the_queue_is_fair_and_ends() -> None:
    it = Running(runner(slots=1), queue=5)
    it.runner.step_seconds = 0.005
    running = job(prompt(0, 5), 10**6)
    greedy = [job(prompt(i, 5), 2, client="many") for i in range(4)]
    modest = job(prompt(9, 5), 2, client="one")
    with it:
        it.scheduler.submit([running])
        wait_until(lambda: running.lease is not None, "the first")
        it.scheduler.submit(greedy)
        it.scheduler.submit([modest])
        with pytest.raises(QueueFullError) as full:
            it.scheduler.submit([job([1], 1)])
        assert (full.value.waiting, full.value.seconds >= 1) == (5, True)
        goes_on = job(prompt(8, 5), 2)
        it.scheduler.submit([goes_on], goes_on=True)
        it.scheduler.cancel([running])
        wait(modest)
        assert sum(ear(one).done.is_set() for one in greedy) <= 2
        wait(*greedy, goes_on)


def test_who_has_its_last_token_is_told_of_a_failure() -> None:
    it, failures = Running(runner(slots=2)), list[str]()
    it.scheduler.on_failure = failures.append
    launch = it.runner.submit_step

    def second_breaks(rows: Any) -> None:
        if it.runner.steps:
            raise OSError("the device is gone")
        launch(rows)

    it.runner.submit_step = second_breaks  # type: ignore[method-assign]
    short, long = job(prompt(1, 5), 1), job(prompt(2, 5), 5)
    with it:
        it.scheduler.submit([short, long])
        wait_until(lambda: bool(failures), "the failure")
    assert (ear(short).reason, ear(long).reason) == ("error", "error")
    assert isinstance(it.scheduler.failure, OSError)


@pytest.mark.parametrize("where", ["take", "end", "everywhere"])
def test_an_answer_that_cannot_be_read_ends_alone(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = job(prompt(1, 5), 3), job(prompt(2, 5), 9)
    end = ear(bad).on_end

    def take(token: int, logprobs: object) -> bool:
        raise RecursionError("too deep")

    def only_errors(reason: str, error: str | None) -> None:
        if error is None:
            raise RecursionError("too deep")
        end(reason, error)

    def deaf(reason: str, error: str | None) -> None:
        end(reason, error)
        raise RecursionError("too deep")

    if where != "end":
        ear(bad).take_token_and_check_done = take  # type: ignore[method-assign]
    if where != "take":
        ear(bad).on_end = only_errors if where == "end" else deaf  # type: ignore[method-assign]
    with Running(runner()) as it:
        it.answer(bad, good)
        assert it.store.n_used_pages == 0
    assert (ear(bad).reason, ear(good).reason) == ("error", "length")
    assert ear(bad).error == "the answer could not be read: RecursionError: too deep"
    assert ear(good).heard == alone(prompt(2, 5), GREEDY, 9)
    assert "too deep" in capsys.readouterr().err


def watched(it: Running) -> dict[int, list[int]]:
    """Return what will have the tokens of each piece of a prompt, by the steps before it."""
    turns: dict[int, list[int]] = {}
    fill = it.runner.fill_pages

    def note(pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        turns.setdefault(it.runner.steps, []).append(end - start)
        fill(pages, tokens, start, end)

    it.runner.fill_pages = note  # type: ignore[method-assign]
    return turns


def test_a_prompt_alone_is_computed_in_the_largest_pieces() -> None:
    it, lone = Running(runner()), job(prompt(2, 128 * 3 + 1), 1)
    turns = watched(it)
    with it:
        it.answer(lone)
    assert turns == {0: [128, 128, 128]}


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [
        # Of a piece of 64 tokens 29 are left behind the first prompt: no part of the next one.
        ((100, 100), [[64], [35], [64], [35]]),
        ((100, 20, 8), [[64], [35, 19, 7]]),
        ((100, 40, 20), [[64], [35, 19], [39]]),
        # The first prompt ends, however many come behind it.
        ((300, *[61] * 3), [*[[64]] * 4, [43], *[[60]] * 3]),
    ],
)
def test_prompts_beside_answers_are_not_cut_into_slivers(
    lengths: tuple[int, ...], pieces: list[list[int]]
) -> None:
    it, first = Running(runner(slots=8)), job(prompt(1, 2), 10**6)
    it.runner.step_seconds = 0.002
    turns = watched(it)
    jobs = [job(prompt(i, n), 2) for i, n in enumerate(lengths, 2)]
    with it:
        it.scheduler.submit([first])
        wait_until(lambda: len(ear(first).heard) > 1, "a token")
        it.answer(*jobs)
        it.scheduler.cancel([first])
    del turns[0]
    assert list(turns.values()) == pieces
    assert list(turns) == list(range(min(turns), min(turns) + len(pieces)))  # a piece every step
    for one in jobs:
        assert ear(one).heard == alone(one.ids[: one.n_prompt], GREEDY, 2)


@pytest.mark.parametrize(
    ("sms", "weights", "tokens"),
    [
        (4, 8e9, 128),
        (16, 1e9, 128),
        (16, 8e9, 128),
        (84, 8e9, 128),
        (132, 1e9, 256),
        (132, 8e9, 64),
    ],
)
def test_the_piece_beside_answers_depends_on_machine_and_model(
    sms: int, weights: float, tokens: int
) -> None:
    assert prompt_tokens_per_step(sms, int(2 * weights)) == tokens


def test_a_prompt_ends_with_its_first_token_where_nobody_answers() -> None:
    """A pass less; where somebody answers, or another prompt ends too, a step is due anyway."""
    ids = prompt(4, 300)
    with Running(runner()) as it:
        first = job(ids, 5, SEEDED)
        it.answer(first)
        assert (it.runner.begun, it.runner.steps) == (1, 5)
        assert ear(first).heard == alone(ids, SEEDED, 5)
        pair = [job(prompt(seed, 30), 5, SEEDED) for seed in (5, 6)]
        it.answer(*pair)
        assert it.runner.begun == 1
        # A prompt that ends while another goes on being read.
        both = [job(prompt(7, 20), 15, SEEDED), job(prompt(8, 400), 5, SEEDED)]
        it.answer(*both)
        assert it.runner.begun == 2
        for one in [*pair, *both]:
            assert ear(one).heard == alone(one.ids[: one.n_prompt], SEEDED, one.most)


def test_a_first_token_is_heard_before_the_second_is_started() -> None:
    """The second step's launches may have to be made."""
    it = Running(runner())
    one, launch = job(prompt(1, 30), 3), it.runner.submit_step
    heard: list[int] = []

    def noted(rows: Any) -> None:
        heard.append(len(ear(one).heard))
        launch(rows)

    it.runner.submit_step = noted  # type: ignore[method-assign]
    it.scheduler.on_first_token = lambda: heard.append(-len(ear(one).heard))
    with it:
        it.answer(one)
    assert heard[:3] == [0, -1, 1]


def test_a_step_waits_until_a_first_token_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the cores from the event loop; one that is busy is not waited for."""
    monkeypatch.setattr(choices, "_MOMENT", 10)
    loop, queue, sent = asyncio.new_event_loop(), asyncio.Queue[choices.ChoiceEvent](), list[int]()
    thread, free = threading.Thread(target=loop.run_forever), threading.Event()

    async def send() -> None:
        sent.append((await queue.get()).token)

    thread.start()
    reader = asyncio.run_coroutine_threadsafe(send(), loop)
    post = choices.EventBridge(loop)
    post.wait_until_sent()
    post.hold_until_flush(queue, choices.ChoiceEvent(0, token=7))
    post.flush()
    post.wait_until_sent()
    assert sent == [7]
    loop.call_soon_threadsafe(free.wait)
    monkeypatch.setattr(choices, "_MOMENT", 0.001)
    post.wait_until_sent()
    free.set()
    reader.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    post.wait_until_sent()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_only_steps_on_a_cpu_wait_for_the_event_loop(on_cpu: bool) -> None:
    has = CpuRunner.__new__(CpuRunner) if on_cpu else runner()
    scheduler = Scheduler(has, SharedPageStore(4), SchedulerObserver(), 1)
    engine: Any = SimpleNamespace(scheduler=scheduler)

    async def started() -> ModelThread:
        model_thread, ready = ModelThread(lambda watch: engine, SystemdWatchdog()), asyncio.Event()
        model_thread.on_loaded = lambda engine: ready.set()
        model_thread.start()
        await ready.wait()
        return model_thread

    model_thread = asyncio.run(started())
    assert (scheduler.on_first_token == model_thread.event_bridge.wait_until_sent) == on_cpu
    assert model_thread.ends_within(60)


def test_a_cancelled_prompt_leaves_no_step_behind() -> None:
    """Its end was started, and nobody collects it."""
    it = Running(runner())
    gone, next_ = job(prompt(1, 30), 3), job(prompt(2, 40), 6, SEEDED)
    begin = it.runner.prefill_and_submit_token

    def cancelled(row: Any, start: int) -> None:
        begin(row, start)
        if row.draw.before is gone.ids:
            it.scheduler.cancel([gone])

    it.runner.prefill_and_submit_token = cancelled  # type: ignore[method-assign]
    with it:
        it.scheduler.submit([gone])
        wait_until(lambda: gone.over, "the end")
        it.answer(next_)
    assert ear(gone).heard == []
    assert ear(next_).heard == alone(next_.ids[:40], SEEDED, 6)
    assert it.store.n_used_pages == 0


def test_tokens_of_random_clients() -> None:
    """As many_clients.py draws them: each answer is that of the model alone, whoever else asks."""
    happened = worlds(200_000)
    assert happened["preemptions"] >= 200
    assert min(happened[what] for what in ("guessed", "steps ahead", "reused", "cancelled")) > 200


def test_time_of_prompts_is_told_from_that_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step took 1 s, then 2: 1.1 s on average, so 3 s with a prompt are 1.9 s of the prompt."""
    told, clock = dict[str, list[float]](), iter([10.0, 11.0, 13.0, 16.0, 17.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    watch = SchedulerObserver()
    monkeypatch.setattr(
        watch, "on_phase_work", lambda what, took: told.setdefault(what, []).append(took)
    )
    stopwatch = PhaseStopwatch(watch)
    stopwatch.restart()
    for filled, stepped in ((False, True), (False, True), (True, True), (True, False)):
        stopwatch.filled = filled
        stopwatch.count_elapsed(stepped)
    assert told["decode"] == pytest.approx([1, 2, 1.1, 0])
    assert told["prefill"] == pytest.approx([0, 0, 1.9, 1])
