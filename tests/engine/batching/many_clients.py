"""Random clients of a scheduler: shared beginnings, cancels, masks, guesses, little memory.

python -m tests.engine.batching.many_clients 1000000 answers so many tokens and prints what
happened; each answer is compared with what the model says alone. The model costs a microsecond a
token: its next token is a hash of all before, and a page keeps the hash up to each of its tokens.
All runs in one thread, so a seed says the same again.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import click
import numpy as np

from orinllm.batching.cache import PageStore, SharedPageStore, SlotStore
from orinllm.batching.runner import StepRow
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.choose.sampling import DrawnTokens, DrawRequest, Floats, Logprobs, Sampling, Words
from orinllm.gpu.kernels.buffers import PAGE, pages_for_tokens

_VOCABULARY, _CONTEXT = 64, 512
# Tokens of a world: a scheduler of a size, with what is drawn for it.
_WORLD = 10_000
_SLOT_PAGES = pages_for_tokens(_CONTEXT)
_DRAWN = tuple(DrawnTokens(token) for token in (*range(_VOCABULARY), -1))
_HALVES = tuple(np.full(2, half, np.uint32) for half in (0x55555555, 0xAAAAAAAA))


def _next(chain: int, how: Sampling, mask: Words | None) -> int:
    """Return the token behind a text whose hash is `chain`; -1 where none is allowed."""
    token = hash((chain, how.seed)) % _VOCABULARY if how.temperature else chain % _VOCABULARY
    if mask is None:
        return token
    bits = int(mask[0]) | int(mask[1]) << 32
    behind = bits >> token << token or bits
    return (behind & -behind).bit_length() - 1


@dataclass
class Model:
    """`Runner`, whose cells hold the hash of all tokens up to their own.

    recurrent: the hash goes on from its slot's, which does not go back, as recurrent states do.
    """

    slots: int
    pages: int
    chunk: int
    prompt_tokens_per_step: int
    most_steps_in_flight: int
    noise: random.Random
    meddle: Callable[[], None] = lambda: None
    name: str = "hashes"
    context: int = _CONTEXT
    vocab_size: int = _VOCABULARY
    most_extra_tokens: int = 0
    most_verified_tokens: int = 5
    computed: int = 0  # tokens of prompts
    followed: int = 0  # steps that began before the tokens of the one before were read
    recurrent: bool = False
    resumed: int = 0  # sequences that began with a checkpoint
    _slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens, and their hash
    _checkpoints: dict[int, tuple[int, int]] = field(default_factory=dict)
    _cells: list[int] = field(default_factory=list)
    _steps: deque[list[DrawnTokens]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._cells = [-1] * (self.pages * PAGE)

    def _put(self, pages: Sequence[int], at: int, token: int) -> int:
        """Note a token at its position; return the hash up to it, by what lies before it."""
        cells = self._cells
        before = cells[pages[(at - 1) // PAGE] * PAGE + (at - 1) % PAGE] if at else 0
        if self.recurrent and at:
            tokens, before = self._slots[self._slot(pages)]
            assert tokens == at, f"the states of {tokens} tokens do not go to position {at}"
        chain = cells[pages[at // PAGE] * PAGE + at % PAGE] = hash((before, token))
        if self.recurrent:
            self._slots[self._slot(pages)] = at + 1, chain
        return chain

    @staticmethod
    def _slot(pages: Sequence[int]) -> int:
        return pages[0] // _SLOT_PAGES

    def _look(self, pages: Sequence[int], text: Sequence[int], end: int, at: int) -> None:
        """Compare some position of a text, any number, with what lies there."""
        at %= end
        cells = self._cells
        before = cells[pages[(at - 1) // PAGE] * PAGE + (at - 1) % PAGE] if at else 0
        held = cells[pages[at // PAGE] * PAGE + at % PAGE]
        assert held == hash((before, text[at])), f"position {at} of {end} is another text's"

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        assert start >= 0 and end - start <= self.chunk and end <= len(pages) * PAGE
        for at in range(start, end):
            self._put(pages, at, tokens[at])
        self.computed += end - start
        self.meddle()

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Floats:
        self.fill_pages(pages, tokens, start, end)
        cells = self._cells
        chains = [cells[pages[at // PAGE] * PAGE + at % PAGE] % 1024 for at in range(start, end)]
        return np.array(chains, np.float32)[:, None]

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        assert self.recurrent
        self._checkpoints[checkpoint] = self._slots[self._slot(pages)]

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        assert self.recurrent
        self._slots[self._slot(pages)] = self._checkpoints[checkpoint]
        self.resumed += 1

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        assert start <= row.position == len(row.draw.before) - 1
        self._steps.clear()  # what was not collected is not wanted
        self.fill_pages(row.pages, row.draw.before, start, row.position)
        self.submit_step([row])

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        assert 0 < len(rows) <= self.slots
        known = [row.token for row in rows if row.token is not None]
        assert len(known) in (0, len(rows))
        if known:
            self._steps.clear()
        else:
            assert all(row.draw.is_token_only for row in rows)
            known = [drawn.token for drawn in self._steps[-1]]
            self.followed += 1
        self._steps.append([self._step(*pair) for pair in zip(rows, known, strict=True)])
        assert len(self._steps) <= self.most_steps_in_flight
        self.meddle()

    def _step(self, row: StepRow, token: int) -> DrawnTokens:
        how = row.draw
        chain = self._put(row.pages, row.position, token)
        self._look(row.pages, how.before, min(row.position + 1, len(how.before)), chain)
        token = _next(chain, how.sampling, how.mask() if how.mask else None)
        if how.top is None:
            return _DRAWN[token]
        return DrawnTokens(token, Logprobs(-float(row.position), ()))

    def wait_for_tokens(self) -> list[DrawnTokens]:
        self.meddle()
        return self._steps.popleft()

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        assert row.token is not None and len(guesses) < self.most_verified_tokens
        texts = enumerate((row.token, *guesses), row.position)
        return [_next(self._put(row.pages, i, t), row.draw.sampling, None) for i, t in texts]

    def last_logits(self) -> Floats:
        raise AssertionError("nobody checks the model")


class Guesser:
    """Knows the next tokens, and errs here and there."""

    def __init__(self, noise: random.Random) -> None:
        self._noise = noise

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int], how: Sampling
    ) -> list[int]:
        chain, found = 0, list[int]()
        for token in text:
            chain = hash((chain, token))
        for _ in range(self._noise.randint(0, most)):
            wrong = self._noise.random() < 0.2
            found.append((_next(chain, how, None) + wrong) % _VOCABULARY)
            chain = hash((chain, found[-1]))
        return found


class Rule:
    """`TokenConstraint`: half of the tokens, by the one before, and a number of them."""

    def __init__(self, most: int) -> None:
        self.most, self._left, self._last, self.is_complete = most, most, 0, False

    def allowed_mask(self) -> Words:
        return _HALVES[self._last % 2]

    def take_token(self, token: int) -> None:
        self._left, self._last = self._left - 1, token
        self.is_complete = not self._left


class Client:
    """A request and what it hears. enough: tokens after which a text of it stops the answer."""

    def __init__(self, job: ScheduledSequence, enough: int, rule: int) -> None:
        self.job, self._enough, self._rule = job, enough, rule
        self.heard: list[int] = []
        self.states: list[float] = []
        self.reason, self.left, self.deaf = "", False, False
        job.sink = self
        if job.hidden_states is not None:
            job.hidden_states = self._hear

    def take_token_and_check_done(self, token: int, logprobs: Logprobs | None) -> bool:
        assert not self.deaf and not self.reason
        assert (logprobs is None) == (self.job.top is None)
        assert logprobs is None or logprobs.own == 1 - self.job.n_prompt - len(self.heard)
        self.heard.append(token)
        return len(self.heard) >= self._enough

    def on_end(self, reason: str, error: str | None) -> None:
        assert not self.deaf and not self.reason and error is None, (self.left, reason, error)
        self.reason = reason

    def _hear(self, start: int, found: Floats) -> None:
        assert start <= len(self.states)  # 0 again where memory ran out
        self.states[start:] = found[:, 0].tolist()

    def check(self) -> None:
        """Compare with what the model says alone."""
        job, chain = self.job, 0
        chains = [chain := hash((chain, token)) for token in job.ids[: job.n_prompt]]
        if job.hidden_states is not None:
            wanted = [chain % 1024 for chain in chains]
            assert self.states == wanted or self.reason != "stop"
            return
        rule, said, reason = Rule(self._rule), list[int](), ""
        while not reason:
            token = _next(chain, job.sampling, rule.allowed_mask() if self._rule else None)
            if token in job.end_ids:
                reason = "stop"
                break
            said.append(token)
            chain = hash((chain, token))
            if self._rule:
                rule.take_token(token)
            reason = "stop" if rule.is_complete or len(said) >= self._enough else ""
            reason = reason or "length" * (len(said) >= job.most)
        if self.reason == "cut" or not self.reason:
            assert self.heard == said[: len(self.heard)]
        else:
            assert (self.heard, self.reason) == (said, reason)


class World(SchedulerObserver):
    """A scheduler of a random size, its clients, and what happened."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.noise = noise = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self._tokens, self._clients, self._leaving = tokens, list[Client](), list[Client]()
        self._texts = [self._text(noise.choice((0, 1, 9, 40, 63, 64, 65, 140))) for _ in range(6)]
        tight = noise.random() < 0.7  # the memory is for a few of them
        slots = noise.choice((3, 8, 16) if tight else (1, 2, 8, 16))
        paged, reserve = tight or noise.random() < 0.3, not tight and noise.random() < 0.2
        pages = noise.randint(9, 12 if tight else 60) if paged else slots * _SLOT_PAGES
        chunk, beside = noise.choice(((128, 64), (64, 32), (16, 16), (512, 128)))
        self.model = Model(slots, pages, chunk, beside, noise.choice((1, 2)), noise, self._meddle)
        self.store: PageStore = SharedPageStore(pages) if paged else SlotStore(slots, _CONTEXT)
        if not paged and noise.random() < 0.6:
            self.model.recurrent = True
            self.model.most_verified_tokens = self.model.most_steps_in_flight = 1
            self.store = SlotStore(slots, _CONTEXT, False, noise.choice((0, 1, 3, 8)))
        # Without a proposer it is the model itself.
        runner = SpeculatingRunner(self.model, Guesser(noise) if noise.random() < 0.4 else None)
        self.scheduler = Scheduler(runner, self.store, self, 10**6, reserve)
        self.scheduler.on_alive = self._turn
        self._odd = noise.choice((0.0, 0.2))  # of requests whose tokens the host draws
        self._lengths = (1, 90, 300, 300) if tight else (1, 20, 90)  # of answers
        self._crowd = 2 * slots + 2 if tight else noise.choice((1, slots, 2 * slots))

    def run(self) -> Counter[str]:
        """Let clients come until there are tokens enough; return what happened."""
        self.scheduler.run()
        assert self.scheduler.failure is None, self.scheduler.failure
        for client in self._clients:
            self._done(client)
        assert self.store.n_used_pages == 0
        self.happened["prompts' tokens"] += self.model.computed
        self.happened["steps ahead"] += self.model.followed
        self.happened["resumed"] += self.model.resumed
        return self.happened

    def on_preemption(self) -> None:
        self.happened["preemptions"] += 1

    def on_token(self, sequence: ScheduledSequence, gap: float, first: bool) -> None:
        self.happened["tokens"] += 1

    def on_speculation(self, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed
        self.happened["guessed"] += right

    def _text(self, length: int) -> list[int]:
        return self.noise.choices(range(_VOCABULARY), k=length)

    def _client(self, after: ScheduledSequence | None) -> Client:
        noise = self.noise
        base = noise.choice(self._texts)
        more = 1 if noise.random() < 0.2 else noise.randint(1, 40)
        ids = list(after.ids[: after.n_prompt]) if after else base + self._text(more)
        ids = ids[-_CONTEXT + 90 :]
        how = Sampling(temperature=noise.randint(0, 1), seed=noise.randrange(10**6))
        rule = noise.randint(1, 80) if noise.random() < self._odd else 0
        ends = frozenset([noise.randrange(_VOCABULARY)] if noise.random() < 0.2 else [])
        most = min(noise.choice(self._lengths), _CONTEXT - len(ids))
        job = ScheduledSequence(
            ids, how, most, ends, Client.__new__(Client), Rule(rule) if rule else None
        )
        job.top = 2 if noise.random() < self._odd else None
        job.draw = DrawRequest(how, job.ids, job.draw.mask, job.top)
        job.reuse, job.after = noise.random() < 0.9, after
        job.client = after.client if after else str(noise.randrange(3))
        if after is None and noise.random() < 0.05:
            job.reuse, job.hidden_states = False, lambda start, found: None
        return Client(job, noise.randint(1, 60) if noise.random() < 0.2 else 10**9, rule)

    def _turn(self) -> None:
        """Let clients come and go between two turns of the scheduler."""
        for client in self._leaving:
            client.deaf = True
        self._leaving.clear()
        if self.happened["tokens"] >= self._tokens:
            if self.noise.random() < 0.02:
                self.scheduler.end_all()
            self.scheduler.stop_when_idle()
            return
        if self.scheduler.n_waiting + self.scheduler.n_running < self._crowd:
            first = self._client(None)
            asked = [first]
            if first.job.hidden_states is None and self.noise.random() < 0.1:
                asked += [self._client(first.job) for _ in range(2)]
            self._clients += asked
            self.scheduler.submit([client.job for client in asked])
        if len(self._clients) > 200:
            self._harvest()

    def _meddle(self) -> None:
        """Let somebody go away in the middle of a turn."""
        if self._clients and self.noise.random() < 0.007:
            client = self.noise.choice(self._clients[-2 * self._crowd :])
            if not client.reason:
                client.left = True
                self._leaving.append(client)
                self.happened["cancelled"] += 1
                self.scheduler.cancel([client.job])

    def _harvest(self) -> None:
        """Check answers that are over; let others go on from some of their texts."""
        for client in [c for c in self._clients if c.job.over]:
            self._done(client)
            self._clients.remove(client)
            if self.noise.random() < 0.2:
                self._texts[self.noise.randrange(6)] = client.job.ids[: _CONTEXT // 2]

    def _done(self, client: Client) -> None:
        assert client.job.over and client.job.lease is None
        assert bool(client.reason) or client.left, "nobody told it the end"
        client.check()
        self.happened["answers"] += 1
        self.happened["reused"] += client.job.n_cached > 0


def worlds(tokens: int, seed: int = 0) -> Counter[str]:
    """Answer so many tokens in worlds of seeds from `seed` on; return what happened."""
    happened: Counter[str] = Counter()
    while happened["tokens"] < tokens:
        try:
            happened += World(seed, min(_WORLD, tokens - happened["tokens"])).run()
        except AssertionError as error:
            raise AssertionError(f"world {seed}: {error}") from error
        seed += 1
    return happened


@click.command()
@click.argument("tokens", type=click.IntRange(1))
@click.option("--seed", default=0, help="Of the first world.")
def main(tokens: int, seed: int) -> None:
    """Answer so many tokens and print what happened."""
    for what, count in sorted(worlds(tokens, seed).items()):
        click.echo(f"{count:9} {what}")


if __name__ == "__main__":
    main()
