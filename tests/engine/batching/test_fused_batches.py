"""Continuous batching on the fused kernels (the emulated GPU), and drawing from logits."""

import threading

import numpy as np
import pytest
from tests.engine.batching.running import GREEDY, ear, job, prompt, wait
from tests.engine.conftest import Load, Synthetic

from orinllm.batching.cache import SharedPageStore, SlotStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import Runner
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.choose.sampling import DrawRequest, Sampling, logprobs_of_token, sample_masked_token
from orinllm.gpu.kernels.buffers import PAGE

PAGES = 3


def run(runner: Runner, jobs: list[ScheduledSequence], reserve: bool = False) -> int:
    """Let a scheduler answer; return how many pages were in use at its end."""
    fused = isinstance(runner, FusedRunner)
    store = SharedPageStore(PAGES) if fused else SlotStore(runner.slots, PAGES * PAGE)
    scheduler = Scheduler(runner, store, SchedulerObserver(), 64, reserve)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    scheduler.submit(jobs)
    thread.start()
    wait(*jobs)
    scheduler.stop_when_idle()
    thread.join(60)
    return store.n_used_pages


def jobs_of(n: int) -> list[ScheduledSequence]:
    """Short ones: the emulated GPU takes a second for a token. Draws have a test of their own."""
    prompts = [[token % 900 for token in prompt(i, 3 - i)] for i in range(n)]
    return [job(ids, 3, GREEDY) for ids in prompts]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_batch_gives_what_each_gives_alone(
    emulated: Load, synthetic: Synthetic, deterministic: bool
) -> None:
    executor = emulated(synthetic("tiny", "Q8_0"), context=64, pages=PAGES)
    runner = FusedRunner(executor, 2, deterministic)
    runner._begins = False  # the end of a prompt alone is rounded as a chunk is
    together = jobs_of(2)
    assert run(runner, together, deterministic) == 0
    runner.most_steps_in_flight = 1  # now each step waits for the tokens of the one before
    for one, many in zip(jobs_of(2), together, strict=True):
        run(runner, [one], deterministic)
        assert ear(many).heard == ear(one).heard
        assert len(ear(one).heard) == one.most


def test_a_mask_holds_and_logarithms_are_of_the_model() -> None:
    logits = np.array([1.0, 3.0, 2.0, 0.0], np.float32)
    mask = np.array([0b0101], np.uint32)
    drawn = sample_masked_token(logits, DrawRequest(Sampling(temperature=0), [], lambda: mask, 2))
    assert drawn.token == 2
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert drawn.logprobs is not None
    assert drawn.logprobs.own == pytest.approx(exact[2])
    assert [token for token, _ in drawn.logprobs.best] == [1, 2]
    assert [value for _, value in drawn.logprobs.best] == pytest.approx(exact[1:3])
    assert logprobs_of_token(logits, 0, 0).best == ()
    none = np.array([0], np.uint32)
    assert sample_masked_token(logits, DrawRequest(Sampling(), [], lambda: none)).token == -1
    assert (
        sample_masked_token(np.full(4, np.nan, np.float32), DrawRequest(Sampling(), [])).token == -1
    )
