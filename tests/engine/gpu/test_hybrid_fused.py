"""Families with recurrent states on the fused kernels, on an emulated GPU: logits and reuse."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.batching.running import Ear
from tests.engine.conftest import Load
from tests.engine.gpu.kernels.emulated_buffers import read as whole
from tests.engine.network import hybrid_models
from tests.engine.network.hybrid_models import MODELS, PROMPT
from tests.engine.network.test_hybrid import Oracle

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinllm.batching.cache import SharedPageStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import Proposer
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.batching.state_checkpoints import StateSlots
from orinllm.choose.sampling import Sampling
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.kernels.buffers import Q8_0

# Of the logits' norm: errors of halves, and of keys and values in bytes.
HALVES, EIGHT_BIT_KEYS = 0.004, 0.02
# Scores of scale 1 (gemma4) magnify them.
MAGNIFIED = {"gemma4": 2.5, "gemma4moe": 2.5}
GREEDY = Sampling(temperature=0)
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    folder = tmp_path_factory.mktemp("wide")

    def write(name: str, quant: str = "F16") -> Path:
        path = folder / f"{name}-{quant}.gguf"
        if not path.exists():
            hybrid_models.write(path, name, quant)
        return path

    return write


def off(got: NDArray[np.float32], want: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def read(executor: FusedExecutor, cuts: tuple[int, ...], states: int = 0) -> None:
    """Compute a prompt up to its last token, in pieces, in a slot of its own."""
    executor.set_pages([states], states)
    for start, end in itertools.pairwise((0, *cuts)):
        executor.fill_cache(PROMPT, start, end)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references(emulated: Load, written: Write, name: str) -> None:
    """Token by token, in chunks that are cut anywhere, and in a batch at its own positions."""
    path, limit = written(name), HALVES * MAGNIFIED.get(name, 1)
    executor = emulated(path, 128, pages=4)
    wanted = Reference(open_model(path)).logits(PROMPT[:64], 64)  # behind each of its tokens
    read(executor, (2,), states=2)
    executor.start_step(PROMPT[2], 2)
    assert off(executor.wait_for_logits(), wanted[2]) < limit
    lengths = [41, 62, 3, 0]
    read(executor, (20, 21, 24, 32, 41), states=0)  # of 8, threads that share a channel meet
    executor.set_pages([1], 1)
    executor.start_prefill_and_first_token(PROMPT[:62], 0)
    assert off(executor.wait_for_logits(), wanted[61]) < limit
    decoder, slots = executor.find_or_make_decoder(4), [1, 0, 3, 2]
    decoder.set_pages([[slot] for slot in slots], slots)
    positions = [lengths[slot] for slot in slots]
    positions[2] = -1  # idle
    for _ in range(2):
        decoder.start_step([PROMPT[max(at, 0)] for at in positions], positions)
        for row in (0, 1, 3):
            assert off(decoder.wait_for_logits()[row], wanted[positions[row]]) < limit
        positions = [at + (at >= 0) for at in positions]
    # A slot that others used begins from nothing.
    read(executor, (9,), states=0)
    executor.start_step(PROMPT[9], 9)
    assert off(executor.wait_for_logits(), wanted[9]) < limit
    if executor.memory.states is not None:  # a copy is one of all of them
        executor.start_state_copy(0, 3)
        states = whole(executor.memory.states).reshape(6, -1)
        np.testing.assert_array_equal(states[3], states[0])


@pytest.mark.parametrize("name", ["qwen35", "nemotron_h", "lfm2"])
def test_states_go_back_behind_any_guess(emulated: Load, written: Write, name: str) -> None:
    """To the bit they are those of tokens one by one, wherever the first wrong guess was."""
    executor = emulated(written(name), 64, pages=2)
    assert executor.memory.states is not None
    memory, start, drawn = executor.memory.states, 3, []

    def states(slot: int) -> NDArray[np.float32]:
        return np.array(whole(memory).reshape(6, -1)[slot], np.float32)

    read(executor, (start,), states=1)
    executor.start_state_copy(1, 4)
    behind = [states(4)]
    for at in range(start, start + 4):
        executor.start_step(PROMPT[at], at)
        drawn.append(executor.wait_for_token())
        behind.append(states(1))
    for given, right in ((4, 1), (4, 3), (3, 2), (4, 4)):
        executor.start_state_copy(4, 1)
        assert executor.tokens_after_each(PROMPT[start : start + given], start) == drawn[:given]
        np.testing.assert_array_equal(states(1), behind[0])
        executor.set_states_after_accepted(right)
        np.testing.assert_array_equal(states(1), behind[right])


@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_keys_and_values_in_bytes(emulated: Load, written: Write, name: str) -> None:
    path, limit = written(name), EIGHT_BIT_KEYS * MAGNIFIED.get(name, 1)
    executor, reference = emulated(path, 128, kv=Q8_0), Reference(open_model(path))
    executor.fill_cache(PROMPT, 0, 69)
    executor.start_step(PROMPT[69], 69)
    assert off(executor.wait_for_logits(), reference.logits(PROMPT[:70])[-1]) < limit


def answer(
    executor: FusedExecutor,
    store: SharedPageStore,
    prompts: list[list[int]],
    end: int = -1,
    proposer: Proposer | None = None,
) -> list[ScheduledSequence]:
    """Answer prompts through a scheduler, all at once: greedily, of different lengths.

    proposer: guesses what the last one that runs says.
    """
    runner = SpeculatingRunner(FusedRunner(executor, 3), proposer)
    scheduler = Scheduler(runner, store, SchedulerObserver(), 99)
    asked = [
        ScheduledSequence(prompt, GREEDY, 4 + at % 7, frozenset({end}), Ear(99))
        for at, prompt in enumerate(prompts)
    ]
    scheduler.submit(asked)
    scheduler.stop_when_idle()
    worker = threading.Thread(target=scheduler.run)
    worker.start()
    worker.join(400)
    if scheduler.failure is not None:
        raise scheduler.failure
    assert all(isinstance(each.sink, Ear) and each.sink.reason for each in asked)
    return asked


def wrong(path: Path, asked: list[ScheduledSequence]) -> list[int]:
    """Return tokens of answers that are not the reference's best, nor as good but for rounding."""
    reference, found = Reference(open_model(path)), []
    for each in asked:
        n = len(each.ids) - each.n_prompt
        for at, logits in enumerate(reference.logits(each.ids[:-1], n), each.n_prompt):
            missing = logits.max() - logits[each.ids[at]]
            if missing > 2 * HALVES * np.linalg.norm(logits):
                found.append(at)
    return found


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_answers_are_those_of_one_alone(emulated: Load, written: Write, name: str) -> None:
    """More requests than slots, which begin alike, share pages, and end in between."""
    path = written(name)
    executor = emulated(path, 256, pages=12, slots=(3, 3))
    store, head = SharedPageStore(12, StateSlots(3, 3)), list(PROMPT[:130])
    rng = np.random.default_rng(5)
    asked = answer(executor, store, [[*head, 9], head[:31], head[:70]])
    ends = [rng.integers(3, 60, 9).tolist() for _ in range(4)]
    asked += answer(executor, store, [[*head, *end] for end in ends])
    assert [each.n_cached for each in asked[3:6]] == [128] * 3  # all from one checkpoint
    longer = [[*asked[-1].ids, 7, 8], [*asked[-2].ids, 9]]
    # The one that ended last goes on behind its whole answer, but for the last token.
    whole = len(asked[-1].ids) - 1
    asked += answer(executor, store, longer)
    assert [each.n_cached for each in asked[-2:]] == [whole, 128]
    assert wrong(path, asked) == []
    # One that its last token ended has passed that, too.
    *known, end = asked[-1].ids
    (ended,) = answer(executor, store, [known[:-2]], end)
    assert ended.ids == known or end in known[-2:]
    (goes_on,) = answer(executor, store, [[*ended.ids, end, 7]])
    assert goes_on.n_cached == len(ended.ids) + 1
    # As is what follows one that ended where guesses were wrong, too: one is right before.
    oracle = Oracle(goes_on.ids, len(goes_on.ids) - 2)
    (guessed,) = answer(executor, store, [goes_on.ids[:-4]], goes_on.ids[-2], oracle)
    assert guessed.ids == goes_on.ids[:-2] and 0 < guessed.n_right < guessed.n_guessed
    (behind,) = answer(executor, store, [[*guessed.ids, 9]])
    assert wrong(path, [goes_on, behind]) == []


def test_a_preempted_answer_goes_on(emulated: Load, written: Write) -> None:
    """Of two that need a page more, one waits, and begins anew where there are states."""
    path, counted = written("lfm2"), list[SchedulerObserver]()

    def count(watch: SchedulerObserver) -> None:
        counted.append(watch)

    executor = emulated(path, 192, pages=5, slots=(3, 2))
    store = SharedPageStore(5, StateSlots(3, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerObserver, "on_preemption", count)
        prompts = [list(PROMPT[:126]), [5, *PROMPT[:125]]]
        asked = answer(executor, store, prompts)
    assert counted and wrong(path, asked) == []
    assert store.n_free_pages == 5
