"""Tokens that are guessed while one answer runs alone: never another text, and counted right."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
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
    wait,
)
from tests.engine.batching.test_fused_batches import run
from tests.engine.conftest import Load, Synthetic
from tests.engine.models import smollm2
from tests.engine.server.live import Started, command, metric, wait_until
from tests.engine.server.toy import ToyRunner

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import StepRow
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.choose.sampling import DrawRequest, Sampling
from orinllm.errors import BadInput
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.server.engine import load_engine
from orinllm.server.options import EngineOptions


class Guesser:
    """A proposer that knows the toy's next tokens, and errs here and there."""

    def __init__(self, knows: Callable[[Sequence[int], Sampling, int], list[int]]) -> None:
        self._knows = knows

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int], how: Sampling
    ) -> list[int]:
        rng = random.Random(len(text))
        guess = self._knows(text, how, rng.randint(0, most))
        if guess and rng.random() < 0.5:
            guess[rng.randrange(len(guess))] += 1
        return guess


class Counted(SchedulerObserver):
    """A watch that hears of guesses."""

    def __init__(self) -> None:
        self.guessed = self.right = self.tokens = 0

    def on_speculation(self, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed > 0
        self.guessed, self.right = self.guessed + guessed, self.right + right

    def on_token(self, sequence: object, gap: float, first: bool) -> None:
        self.tokens += 1


def toy_guesser() -> Guesser:
    return Guesser(lambda text, how, n: alone(list(text), how, n))


def speculating(slots: int = 4, pages: int = 64) -> tuple[Running, ToyRunner, Counted]:
    toy = ToyRunner(slots, pages, VOCABULARY)
    it, watch = Running(toy), Counted()
    runner = SpeculatingRunner(toy, toy_guesser())
    it.scheduler = Scheduler(runner, it.store, watch, 64)
    it._thread = threading.Thread(target=it.scheduler.run, daemon=True)
    return it, toy, watch


@pytest.mark.parametrize("how", [GREEDY, replace(SEEDED, seed=3)])
def test_one_that_runs_alone_says_the_same_in_fewer_steps(how: Sampling) -> None:
    ids = prompt(1, 30)
    it, toy, watch = speculating()
    with it:
        one = job(ids, 150, how)
        it.answer(one)
        want = alone(ids, how, 150)
        assert (ear(one).heard, ear(one).reason) == (want, "length")
        assert toy.steps + toy.verified < 120 < watch.tokens == 150
        assert watch.guessed > watch.right > 30
        # Tokens that were guessed wrong are in no page that a chat which goes on finds.
        longer = job([*ids, *want, 11], 20, how)
        it.answer(longer)
        assert longer.n_cached == 179  # the last token was never read
        assert ear(longer).heard == alone([*ids, *want, 11], how, 20)
    assert it.store.n_used_pages == 0


def test_several_share_steps_and_nothing_is_guessed() -> None:
    """From alone to three and back; an end, and one who has enough, lie within a step."""
    it, toy, watch = speculating()
    with it:
        first = job(prompt(1, 20), 300)
        it.scheduler.submit([first])
        wait_until(lambda: watch.guessed > 0, "a guess")
        others = [job(prompt(i, 70), 20 + i, replace(SEEDED, seed=i)) for i in (2, 3)]
        ear(others[1]).most = 9
        it.scheduler.submit(others)
        wait(first, *others)
        assert toy.widest == 3
    for one, n in ((first, 300), (others[0], 22), (others[1], 9)):
        assert ear(one).heard == alone(one.ids[: one.n_prompt], one.sampling, n)
    assert it.store.n_used_pages == 0


def test_the_end_of_an_answer_may_be_guessed() -> None:
    want = alone(prompt(4, 20), GREEDY, 60)
    it, _, _ = speculating()
    with it:
        one = job(prompt(4, 20), 60)
        one.end_ids = frozenset(want[33:34])
        it.answer(one)
    assert (ear(one).heard, ear(one).reason) == (want[: want.index(want[33])], "stop")


def test_without_a_page_nothing_is_guessed() -> None:
    """An answer that fills all the memory there is still comes, and ends at the last place."""
    it, _, _ = speculating(pages=2)
    with it:
        one = job(prompt(1, 30), 2 * PAGE - 30)
        it.answer(one)
    assert ear(one).heard == alone(prompt(1, 30), GREEDY, 2 * PAGE - 30)


@pytest.mark.parametrize("field", ["repeat_penalty", "presence_penalty"])
def test_penalties_are_not_guessed(field: str) -> None:
    it, toy, watch = speculating()
    given: Any = {field: 1.2}
    how = replace(GREEDY, **given)
    with it:
        one = job(prompt(1, 9), 20, how)
        it.answer(one)
    assert (toy.verified, watch.guessed) == (0, 0)
    assert ear(one).heard == alone(prompt(1, 9), how, 20)


def test_on_the_fused_kernels(emulated: Load, synthetic: Synthetic) -> None:
    """Drawn, and then greedy: each as it is without guesses."""
    executor = emulated(synthetic("tiny", "Q8_0"), context=64, pages=3)
    plain = FusedRunner(executor, 2)
    drawn = Sampling(temperature=1.0, top_k=40, seed=5)
    ids, known = [7, 300, 12, 901], dict[int, list[int]]()
    for how in (GREEDY, drawn):
        one = job(ids, 4, how)
        run(plain, [one])
        known[how.seed] = [*ids, *ear(one).heard]
    assert known[GREEDY.seed] != known[drawn.seed]
    guesser = Guesser(lambda text, how, n: known[how.seed][len(text) : len(text) + n])
    runner = SpeculatingRunner(plain, guesser)
    watch = Counted()
    for how in (drawn, GREEDY):
        one, store = job(ids, 4, how, reuse=False), SharedPageStore(3)
        scheduler = Scheduler(runner, store, watch, 4)
        thread = threading.Thread(target=scheduler.run, daemon=True)
        scheduler.submit([one])
        thread.start()
        wait(one)
        scheduler.stop_when_idle()
        thread.join(60)
        assert [*ids, *ear(one).heard] == known[how.seed]
    assert watch.right > 1


@pytest.fixture(scope="module", params=["draft", "lookup"])
def guessing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """SmolLM2 on the CPU, with itself as its draft, or with earlier text."""
    flags = ["--draft", str(smollm2())] if request.param == "draft" else ["--lookup"]
    log = tmp_path_factory.mktemp("guessing") / "log"
    with command(smollm2(), log, "--context", "256", "--alias", "test", *flags) as started:
        yield started


def said(api: openai.OpenAI, model: str, **fields: Any) -> str:
    messages: Any = [{"role": "user", "content": "Say: one two three one two three one two three"}]
    given = {"messages": messages, "max_tokens": 24, "seed": 9, **fields}
    answer = api.chat.completions.create(model=model, **given)
    return str(answer.choices[0].message.content)


def test_over_http_it_says_what_it_says_without(api: openai.OpenAI, guessing: Started) -> None:
    # A token that is not guessed is drawn as its request asks for, not as the one before it.
    one, wild = {"temperature": 0, "max_tokens": 1}, {"temperature": 2, "seed": 7}
    answers = []
    for fields in ({"temperature": 0}, {"temperature": 1, "top_p": 0.9}, wild, one):
        answers.append(said(guessing.client(), "test", **fields))
        assert answers[-1] == said(api, "smollm2", **fields)
    assert not answers[2].startswith(answers[3])
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    steps, guessed, right, by_place = (
        metric(guessing.url, f"orinllm_spec_decode_num_{name}_total") for name in names
    )
    assert 0 < right == by_place <= guessed and steps < guessed
    tokens = metric(guessing.url, "orinllm_generation_tokens_total")
    assert 'orinllm_spec_decode_num_accepted_tokens_per_pos_total{position="0"}' in (
        httpx.get(f"{guessing.url}/metrics").text
    )
    assert right < tokens


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"lookup": True, "deterministic": True}, "--lookup: steps of several sizes"),
        ({"draft": Path("/none.gguf")}, "/none.gguf: "),
        ({"draft": "mtp"}, "llama.nextn_predict_layers is missing "),
    ],
)
def test_what_cannot_guess(more: dict[str, Any], says: str) -> None:
    options = EngineOptions(smollm2(), "CPU", context=64, **more)
    with pytest.raises(BadInput, match=says):
        load_engine(options, SchedulerObserver())


class Placed:
    """An executor that notes where it was placed when it verified."""

    chunk_size = prompt_tokens_per_step = most_verified_tokens = context = vocab_size = 4
    can_step_from_chunk = True

    def __init__(self) -> None:
        self.pages: tuple[int, ...] = ()
        self.how, self.verified = GREEDY, list[tuple[tuple[int, ...], int]]()

    def set_pages(self, pages: Sequence[int], states: int = 0) -> None:
        self.pages = tuple(pages)

    def fill_cache_with_small_chunk(self, tokens: Sequence[int], start: int, end: int) -> None: ...

    def set_sampling(self, how: Sampling, text: Sequence[int]) -> None:
        self.how = how

    def tokens_after_each(self, tokens: Sequence[int], position: int, behind: int = 0) -> list[int]:
        self.verified.append((self.pages, self.how.seed))
        return [0] * len(tokens)

    def set_states_after_accepted(self, n: int) -> None: ...


def test_verification_is_where_its_sequence_lies() -> None:
    """A prompt that was computed elsewhere meanwhile, more pages, another draw: each is told."""
    executor: Any = Placed()
    runner = FusedRunner(executor, 2)

    def verify(pages: list[int], how: Sampling = GREEDY) -> None:
        runner.tokens_after_guesses(StepRow(5, 3, pages, DrawRequest(how, [1, 2, 3, 5])), [6])

    verify([0])
    runner.fill_pages([1], [7, 8], 0, 1)
    verify([0])
    verify([0, 2])
    verify([0, 2], SEEDED)
    assert executor.verified == [((0,), 0), ((0,), 0), ((0, 2), 0), ((0, 2), SEEDED.seed)]
