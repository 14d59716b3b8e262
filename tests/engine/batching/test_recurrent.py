"""Random requests of a model with recurrent states: each answer is what it would be alone.

They begin alike, go on behind one another's answers, are forks of one prompt, end anywhere and are
cancelled anywhere, in so little memory that some are preempted.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from tests.engine.batching.running import VOCABULARY, Ear
from tests.engine.server.toy import ToyRunner, toy_logits

from orinllm.batching.cache import SequencePages, SharedPageStore
from orinllm.batching.runner import StepRow
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.batching.state_checkpoints import StateSlots
from orinllm.choose.sampling import DrawnTokens, Sampling
from orinllm.gpu.kernels.buffers import PAGE

GREEDY = Sampling(temperature=0)
SLOTS, CHECKPOINTS, PAGES, REQUESTS = 3, 3, 8, 14


class RecurrentToy(ToyRunner):
    """The toy, whose state is all tokens that were put through a slot: it never goes back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state: list[list[int]] = [[-2] for _ in range(self.slots)]
        self.copies: list[list[int]] = [[-3] for _ in range(CHECKPOINTS)]
        self.preemptions = self.resumed = 0

    def _put(self, pages: Sequence[int], tokens: Sequence[int], start: int) -> list[int]:
        assert isinstance(pages, SequencePages)
        before = self.state[pages.slot] if start else []
        self.state[pages.slot] = [*before, *tokens]
        return self.state[pages.slot]

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        super().fill_pages(pages, tokens, start, end)
        self._put(pages, tokens[start:end], start)

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        assert isinstance(pages, SequencePages)
        self.copies[checkpoint] = list(self.state[pages.slot])

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        assert isinstance(pages, SequencePages)
        self.state[pages.slot] = list(self.copies[checkpoint])
        self.resumed += 1

    def _token(self, row: StepRow, token: int) -> DrawnTokens:
        """Draw from the state where it is that of the pages, else from what no text has."""
        state = self._put(row.pages, [token], row.position)
        self._cells[row.pages[row.position // PAGE], row.position % PAGE] = token
        held = self._held(row.pages, row.position + 1)
        return DrawnTokens(int(toy_logits(state if state == held else [-9], VOCABULARY).argmax()))


class Crowd:
    """Requests that are made, and cancelled, while others are answered."""

    def __init__(self, seed: int) -> None:
        self.rng, self.asked = np.random.default_rng(seed), list[ScheduledSequence]()
        self.runner = RecurrentToy(SLOTS, PAGES, VOCABULARY, chunk=128, prompt_tokens_per_step=64)
        self.runner.pace = self.go_on
        self.runner.most_steps_in_flight = int(self.rng.integers(1, 3))
        self.heads = [self.words(300), self.words(200)]
        watch = SchedulerObserver()
        watch.on_preemption = self._preempted  # type: ignore[method-assign]
        store = SharedPageStore(PAGES, StateSlots(SLOTS, CHECKPOINTS))
        self.store, self.scheduler = store, Scheduler(self.runner, store, watch, 99)

    def _preempted(self) -> None:
        self.runner.preemptions += 1

    def words(self, n: int) -> list[int]:
        return [int(word) for word in self.rng.integers(300, 20000, n)]

    def prompt(self) -> list[int]:
        head = self.heads[int(self.rng.integers(2))]
        if self.asked and self.rng.random() < 0.4:  # behind an answer, or the same once more
            head = self.asked[int(self.rng.integers(len(self.asked)))].ids
        places = (len(head), int(self.rng.integers(1, len(head) + 1)), 50, 65, 129)
        cut = places[int(self.rng.integers(len(places)))]
        return [*head[:cut], *self.words(int(self.rng.integers(0, 9)))][:260] or self.words(1)

    def request(self) -> None:
        sink, prompt = Ear(int(self.rng.integers(1, 220))), self.prompt()
        known = toy_logits(prompt, VOCABULARY).argmax() if self.rng.random() < 0.1 else -1
        most = int(self.rng.integers(1, 220))
        sequence = ScheduledSequence(prompt, GREEDY, most, frozenset({int(known)}), sink)
        forks = [sequence]
        if self.rng.random() < 0.2:
            forks.append(ScheduledSequence([*prompt], GREEDY, most, frozenset(), Ear(9)))
        self.asked += forks
        self.scheduler.submit(forks)

    def go_on(self) -> None:
        """Called while a step is under way."""
        if len(self.asked) < REQUESTS and self.rng.random() < 0.05:
            self.request()
        if self.rng.random() < 0.01:
            self.scheduler.cancel([self.asked[int(self.rng.integers(len(self.asked)))]])
        if len(self.asked) >= REQUESTS:
            self.scheduler.stop_when_idle()

    def answer(self) -> None:
        for _ in range(4):
            self.request()
        self.scheduler.run()
        assert self.scheduler.failure is None


@pytest.mark.parametrize("seed", [0, 3])
def test_answers_are_those_of_one_alone(seed: int) -> None:
    crowd = Crowd(seed)
    crowd.answer()
    for each in crowd.asked:
        for at in range(each.n_prompt, len(each.ids)):
            assert each.ids[at] == toy_logits(each.ids[:at], VOCABULARY).argmax()
    assert crowd.store.n_free_pages == PAGES
    assert crowd.runner.preemptions and crowd.runner.resumed
