"""A step of several requests on the fused kernels: each token is the one that the host draws."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from tests.engine.conftest import Load, Synthetic

from orinllm.batching.cache import SequencePages
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import StepRow
from orinllm.choose.sampling import DrawRequest, Sampling, sample_token
from orinllm.gpu.decoder import Decoder
from orinllm.gpu.kernels.buffers import PAGE


class Request:
    """A sequence in two pages of its own, and what its next token must be."""

    def __init__(self, sampling: Sampling, number: int, **wanted: int) -> None:
        self.sampling, self.text = sampling, [number, number + 1]
        self.pages, self.top = [2 * number, 2 * number + 1], wanted.get("top")
        self.only = wanted.get("only")

    def mask(self) -> np.ndarray:
        """Allow one token."""
        return np.packbits(np.arange(1024) == self.only, bitorder="little").view(np.uint32)

    @property
    def how(self) -> DrawRequest:
        """The way its token is drawn."""
        return DrawRequest(
            self.sampling, self.text, None if self.only is None else self.mask, self.top
        )

    def row(self) -> StepRow:
        """Return what a step is given."""
        return StepRow(self.text[-1], len(self.text) - 1, self.pages, self.how)

    def next_row(self) -> StepRow:
        """Return what the step behind it is given, before its token is known."""
        return StepRow(None, len(self.text), self.pages, self.how)

    def wanted(self, logits: np.ndarray) -> int:
        """Return the token that the host draws."""
        return self.only or sample_token(logits, self.sampling, self.text, len(self.text))


def step(
    runner: FusedRunner, requests: list[Request], decoder_of: Callable[[int], Decoder]
) -> None:
    """Compute a token of each; if the host draws none, two more, each begun before that is read."""
    decoder = decoder_of(1 << (len(requests) - 1).bit_length())
    ahead = 2 if all(request.how.is_token_only for request in requests) else 0
    runner.submit_step([request.row() for request in requests])
    found = [decoder.wait_for_logits()]
    table = decoder.list.table
    placed = np.frombuffer(table.copyout(memoryview(bytearray(table.nbytes))), np.int32)
    assert placed[: 2 * len(requests)].tolist() == [p for one in requests for p in one.pages]
    for i in range(ahead + 1):
        if i < ahead:
            runner.submit_step([request.next_row() for request in requests])
            found.append(decoder.wait_for_logits())
        for slot, (request, drawn) in enumerate(
            zip(requests, runner.wait_for_tokens(), strict=True)
        ):
            assert drawn.token == request.wanted(found[i][slot])
            assert (drawn.logprobs is None) == (request.top is None)
            request.text.append(drawn.token)


def test_requests_share_steps(emulated: Load, synthetic: Synthetic) -> None:
    """They draw, take the best, are masked or want logarithms; they change slots and sizes.

    A step begins before the tokens of the one before are collected, wherever it may.
    """
    executor = emulated(synthetic("tiny", "Q8_0"), context=2 * PAGE, pages=10)
    runner = FusedRunner(executor, 4)
    counted = Request(Sampling(temperature=3.0, presence_penalty=6.0, penalty_tokens=3), 0)
    drawing = Request(Sampling(temperature=5.0, seed=4), 1)
    best = Request(Sampling(temperature=0), 2)
    masked = Request(Sampling(), 3, only=77)
    known = Request(Sampling(temperature=8.0), 4, top=2)
    for request in (counted, drawing, best, masked, known):
        runner.fill_pages(request.pages, request.text, 0, 1)
    for requests in (
        *[[counted, drawing, best, masked]] * 2,
        *[[known, counted]] * 2,
        [counted, best],
        [drawing, counted],
        [counted, known, best, drawing],
        [best, counted, drawing],
        [best, counted, known],  # one slot changes its pages
    ):
        step(runner, list(requests), executor.find_or_make_decoder)


def test_penalties_count_the_text_of_their_own_request(
    emulated: Load, synthetic: Synthetic
) -> None:
    """A prompt, one whose tokens nobody collected and one that is as long stand in the same slot.

    A short prompt goes through the step of one sequence, which counts what it draws.
    """
    executor = emulated(synthetic("tiny", "Q8_0"), context=2 * PAGE, pages=10)
    runner, sampling = FusedRunner(executor, 1), Sampling(temperature=0, presence_penalty=6.0)
    first, again, heir = (Request(sampling, 0) for _ in range(3))
    runner.fill_pages(first.pages, first.text, 0, 1)
    for _ in range(3):
        step(runner, [first], executor.find_or_make_decoder)
    step(runner, [again], executor.find_or_make_decoder)
    runner.fill_pages([2, 3], first.text, 0, 7)
    step(runner, [again], executor.find_or_make_decoder)
    assert again.text == first.text[:8]
    heir.text = [first.text[8]] * 7 + again.text[7:]
    step(runner, [heir], executor.find_or_make_decoder)
    runner.submit_step([again.row()])
    runner.submit_step([again.next_row()])
    runner.wait_for_tokens()
    step(runner, [again], executor.find_or_make_decoder)


class Asked:
    """An executor that notes which states it is asked to copy."""

    chunk_size, prompt_tokens_per_step, context, vocab_size = 512, 64, 1024, 100
    can_step_from_chunk = True

    memory = SimpleNamespace(slots=4)

    def __init__(self) -> None:
        self.copied: list[tuple[int, int]] = []

    def start_state_copy(self, start: int, to: int) -> None:
        self.copied.append((start, to))


def test_states_go_to_their_checkpoint_behind_all_slots_and_back() -> None:
    executor, place = Asked(), SequencePages([0])
    runner, place.slot = FusedRunner(executor, 1), 2  # type: ignore[arg-type]
    runner.save_states(place, 1)
    runner.restore_states(place, 1)
    assert executor.copied == [(2, 5), (5, 2)]
