"""Load: a number of requests at once (closed loop), or a number a second (open loop)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orinbench.serve.client import AnswerTimes, Prompt

Ask = Callable[[Prompt, float], Awaitable[AnswerTimes]]


@dataclass(frozen=True)
class Load:
    """Either `concurrency` (closed) or `rate` (open, requests a second).

    Gaps between requests of an open loop are gamma distributed, as in `vllm bench serve`:
    `burstiness` 1 is a Poisson process, less comes in bursts, more is more even.
    """

    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return f"{self.concurrency} at once"


@dataclass(frozen=True)
class LoadResult:
    """The answers under one load, and what the client itself took."""

    answers: list[AnswerTimes]
    seconds: float  # from the first request to the last text
    cpu_share: float  # of one core, by the client: near 1, the client is the limit


async def ask_all(load: Load, prompts: Sequence[Prompt], ask: Ask, seed: int) -> LoadResult:
    """Ask all prompts under a load."""
    cpu, start = time.process_time(), time.perf_counter()
    run = _ask_closed_loop if load.rate is None else _ask_open_loop
    answers = await run(load, prompts, ask, seed)
    cpu, now = time.process_time() - cpu, time.perf_counter()
    ends = [answer.last for answer in answers if answer.error is None and answer.last is not None]
    return LoadResult(answers, (max(ends) if ends else now) - start, cpu / (now - start))


async def _ask_closed_loop(
    load: Load, prompts: Sequence[Prompt], ask: Ask, seed: int
) -> list[AnswerTimes]:
    left = iter(prompts)
    answers: list[AnswerTimes] = []

    async def user() -> None:
        for prompt in left:  # shared: each takes the next
            answers.append(await ask(prompt, time.perf_counter()))

    assert load.concurrency is not None
    await asyncio.gather(*(user() for _ in range(load.concurrency)))
    return answers


async def _ask_open_loop(
    load: Load, prompts: Sequence[Prompt], ask: Ask, seed: int
) -> list[AnswerTimes]:
    assert load.rate is not None
    start = time.perf_counter()

    async def at(due: float, prompt: Prompt) -> AnswerTimes:
        await asyncio.sleep(due - time.perf_counter())
        return await ask(prompt, due)

    times = arrival_times(len(prompts), load.rate, load.burstiness, seed)
    pairs = zip(times, prompts, strict=True)
    return list(await asyncio.gather(*(at(start + due, prompt) for due, prompt in pairs)))


def arrival_times(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when `n` requests arrive, in seconds from the first, `rate` a second on average."""
    draw = np.random.default_rng(seed)
    gaps = draw.gamma(burstiness, 1 / (rate * burstiness), max(0, n - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:n]
