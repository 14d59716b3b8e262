"""A scheduler on its thread, requests, and who hears their answers."""

import random
import threading
from dataclasses import dataclass, field

from tests.engine.server.toy import ToyRunner, toy_logits

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.choose.sampling import DrawRequest, Logprobs, Sampling, sample_masked_token

VOCABULARY = 32000
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=1.2, top_k=0, top_p=1, min_p=0, seed=7)


@dataclass
class Ear:
    """A sink that keeps what it hears. most: tokens after which it has enough."""

    most: int = 10**9
    heard: list[int] = field(default_factory=list)
    reason: str = ""
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        self.heard.append(token)
        return len(self.heard) >= self.most

    def on_end(self, reason: str, error: str | None) -> None:
        self.reason, self.error = reason, error
        self.done.set()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def alone(ids: list[int], sampling: Sampling, most: int) -> list[int]:
    """Return what the toy says when nobody else is there."""
    ids, answer = list(ids), list[int]()
    for _ in range(most):
        drawn = sample_masked_token(toy_logits(ids, VOCABULARY), DrawRequest(sampling, ids))
        ids.append(drawn.token)
        answer.append(drawn.token)
    return answer


def job(
    ids: list[int], most: int, sampling: Sampling = GREEDY, **more: object
) -> ScheduledSequence:
    return ScheduledSequence(list(ids), sampling, most, frozenset(), Ear(), **more)  # type: ignore[arg-type]


def ear(sequence: ScheduledSequence) -> Ear:
    assert isinstance(sequence.sink, Ear)
    return sequence.sink


def wait(*jobs: ScheduledSequence) -> None:
    for one in jobs:
        # The emulated GPU compiles its kernels first.
        assert ear(one).done.wait(300), "an answer did not end"


class Running:
    """A scheduler on its thread."""

    def __init__(self, runner: ToyRunner, queue: int = 64, reserve: bool = False) -> None:
        self.runner, self.store = runner, SharedPageStore(runner.pages)
        self.preemptions = 0
        self.watch = SchedulerObserver()
        self.watch.on_preemption = self._count  # type: ignore[method-assign]
        self.scheduler = Scheduler(runner, self.store, self.watch, queue, reserve)
        self._thread = threading.Thread(target=self.scheduler.run, daemon=True)

    def _count(self) -> None:
        self.preemptions += 1

    def answer(self, *jobs: ScheduledSequence) -> None:
        """Ask, and wait until all have ended."""
        self.scheduler.submit([*jobs])
        wait(*jobs)

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.scheduler.stop_when_idle()
        self._thread.join(60)
        assert not self._thread.is_alive()


def runner(slots: int = 4, pages: int = 64) -> ToyRunner:
    return ToyRunner(slots, pages, VOCABULARY)
