"""Several requests at once on a CPU: each has the tokens that it has alone."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.engine.batching.running import Ear, ear, wait
from tests.engine.conftest import Synthetic

from orinllm.batching.cache import SlotStore
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.choose.sampling import Sampling
from orinllm.cpu.executor import CpuRunner
from orinllm.errors import BadInput
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.loader import Network, SharingOptions, make_page_store, make_runner, plan_network

CONTEXT, SLOTS, VOCABULARY = 192, 4, 1000
# One of packed rows, one with windows, sinks and experts in 16-bit floats.
MODELS = [("tiny-qwen3", "Q4_K_M"), ("tiny-gptoss", "F16")]


class Even:
    """A constraint that allows even tokens, and ends the answer at one that 26 divides."""

    is_complete = False

    def allowed_mask(self) -> np.ndarray:
        return np.packbits(np.arange(1024) % 2 == 0, bitorder="little").view(np.uint32)

    def take_token(self, token: int) -> None:
        assert token % 2 == 0
        self.is_complete = token % 26 == 0


class Kept:
    """A listener for an embedding's states."""

    def __init__(self, pieces: list[np.ndarray]) -> None:
        self._pieces = pieces

    def __call__(self, start: int, values: np.ndarray) -> None:
        self._pieces.append(values)


class Server:
    """A scheduler on its thread, with the CPU's slots."""

    def __init__(self, path: Path, slots: int) -> None:
        network = Network.read(path, CONTEXT)
        pages = slots * CONTEXT // PAGE
        runner = make_runner(
            network, plan_network(network, "CPU"), share=SharingOptions(slots, pages)
        )
        assert isinstance(runner, CpuRunner) and runner.slots == slots
        store = make_page_store(runner, network)
        assert isinstance(store, SlotStore)
        self.widest, launch = 0, runner.submit_step

        def counted(rows: list[object]) -> None:
            self.widest = max(self.widest, len(rows))
            launch(rows)  # type: ignore[arg-type]

        runner.submit_step = counted  # type: ignore[assignment, method-assign]
        self.scheduler = Scheduler(runner, store, SchedulerObserver(), 1000)
        self._thread = threading.Thread(target=self.scheduler.run)
        self._thread.start()

    def end(self) -> None:
        self.scheduler.stop_when_idle()
        self._thread.join()


@pytest.fixture(params=MODELS, ids=lambda model: model[0])
def servers(
    request: pytest.FixtureRequest, synthetic: Synthetic
) -> Iterator[tuple[Server, Server]]:
    """One that shares, and one that answers one after the other."""
    path = synthetic(*request.param)
    both = Server(path, SLOTS), Server(path, 1)
    yield both
    for server in both:
        server.end()


def drawn(draws: random.Random, beginnings: list[list[int]]) -> ScheduledSequence:
    """Return a request: a beginning that others have, too, and any sampling, mask or logprobs."""
    rest = draws.choices(range(VOCABULARY), k=draws.choice((1, 2, 20, 33, 70)))
    ids = [*draws.choice(beginnings), *rest]
    how = Sampling(temperature=draws.choice((0, 4.0)), seed=draws.randrange(99))
    if draws.random() < 0.3:
        how = replace(how, presence_penalty=3.0)
    return ScheduledSequence(
        *(ids, how, draws.randrange(1, 12), frozenset(range(0, VOCABULARY, 31)), Ear()),
        constraint=Even() if draws.random() < 0.3 else None,
        top=draws.choice((None, None, 2)),
        reuse=draws.random() < 0.8,
        client=draws.choice("ab"),
    )


def test_requests_at_once_and_one_after_the_other(servers: tuple[Server, Server]) -> None:
    """Random requests, some of which are cancelled; slots keep what the next prompt begins with."""
    shared, alone = servers
    draws = random.Random(11)
    beginnings = [[], *(draws.choices(range(VOCABULARY), k=n) for n in (5, 40, 64))]
    reused = 0
    for _ in range(5):
        states = draws.getstate()
        together = [drawn(draws, beginnings) for _ in range(8)]
        draws.setstate(states)
        apart = [drawn(draws, beginnings) for _ in range(8)]
        gone = set(draws.sample(range(8), 2))
        shared.scheduler.submit(together)
        shared.scheduler.cancel([together[i] for i in gone])
        wait(*(one for i, one in enumerate(together) if i not in gone))
        for i, (one, other) in enumerate(zip(together, apart, strict=True)):
            if i in gone:
                continue
            alone.scheduler.submit([other])
            wait(other)
            heard, wanted = ear(one), ear(other)
            assert (heard.heard, heard.reason) == (wanted.heard, wanted.reason)
            reused += one.n_cached > 0
    assert shared.widest == SLOTS and alone.widest == 1
    assert reused


def test_states_beside_answers(synthetic: Synthetic) -> None:
    """An embedding's states are those that a slot alone gives."""
    server = Server(synthetic(*MODELS[0]), 2)
    try:
        found: dict[str, list[np.ndarray]] = {"alone": [], "beside": []}
        ids = random.Random(5).choices(range(VOCABULARY), k=100)
        for name, others in (("alone", 0), ("beside", 1)):
            answers = [
                ScheduledSequence(ids[50:], Sampling(temperature=0), 30, frozenset(), Ear())
                for _ in range(others)
            ]
            asked = ScheduledSequence(
                *(list(ids), Sampling(), 1, frozenset(), Ear()),
                reuse=False,
                hidden_states=Kept(found[name]),
            )
            server.scheduler.submit([*answers, asked])
            wait(*answers, asked)
        alone, beside = (np.concatenate(pieces) for pieces in found.values())
        assert alone.shape[0] == len(ids)
        np.testing.assert_array_equal(alone, beside)
    finally:
        server.end()


def test_slots_are_as_many_as_memory_has(synthetic: Synthetic) -> None:
    path = synthetic(*MODELS[0])
    network = Network.read(path, CONTEXT)
    plan = plan_network(network, "CPU")
    each = CONTEXT // PAGE
    for pages, slots in ((each - 1, 1), (each, 1), (3 * each, 3), (99 * each, 8), (None, 8)):
        assert make_runner(network, plan, share=SharingOptions(32, pages)).slots == slots


def test_threads_share_a_model(synthetic: Synthetic) -> None:
    """Answers of eight threads are those of one; a prompt that is refused stops nobody."""
    from orinllm.model import Model

    model = Model.load(synthetic(*MODELS[0]), device="CPU", context=64)
    greedy, prompts = Sampling(temperature=0), [[i + 1, 5 * i + 2, 7] for i in range(8)]

    def ask(ids: list[int]) -> list[int]:
        with pytest.raises(BadInput, match="is not from 0 to"):
            model.generate([1 << 40], greedy)
        answer = model.generate(ids, greedy, max_tokens=9)
        assert answer.text or answer.tokens
        return answer.tokens

    wanted = [ask(ids) for ids in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == wanted
