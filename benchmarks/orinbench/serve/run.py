"""A run: servers in turns, each under the same loads, for some rounds."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from orinbench.errors import BenchError
from orinbench.interrupts import Interrupts
from orinbench.judge.verdict import Comparison, compare_paired, holm_adjusted
from orinbench.pictures import RandomPictures
from orinbench.progress import Progress
from orinbench.serve.client import Client, Prompt
from orinbench.serve.load import Load, LoadResult, ask_all
from orinbench.serve.load_statistics import Goals, LoadStatistics, statistics_of_load
from orinbench.serve.servers import first_served_model

# Before each load so many requests go at once, untimed, for so many tokens: kernels and graphs of
# that many sequences are made when they are first needed.
_WARM_REQUESTS, _WARM_TOKENS = 32, 8
#: What two servers are compared by; more of each is better.
MEASURES: dict[str, Callable[[LoadStatistics], float | None]] = {
    "output tokens a second": lambda f: f.output_tokens_s or None,
    "time to first text, p50": lambda f: 1 / f.ttft_ms["p50"] if f.ttft_ms else None,
    "gap between texts, p99": lambda f: 1 / f.itl_ms["p99"] if f.itl_ms else None,
}


@dataclass(frozen=True)
class Server:
    """A server by its name in the results; `serve` starts it if need be and gives its address.

    `fresh`: it is a process of its own in each round.
    """

    name: str
    serve: Callable[[], AbstractContextManager[str]]
    fresh: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """The load for every server. `prompt(i)` is the text of the i-th request of the run.

    pictures: what each request has one of. rows: what one takes of a prompt at most, where known.
    """

    loads: tuple[Load, ...]
    rounds: int
    requests: int | None  # of a load; None: see `request_count`
    max_tokens: int
    prompt: Callable[[int], str]
    endpoint: str
    model_name: str | None  # None: the first that the server lists
    headers: dict[str, str]
    timeout: float
    seed: int
    goals: Goals
    pictures: RandomPictures | None = None
    rows: int | None = None

    def prompt_of_request(self, number: int, max_tokens: int) -> Prompt:
        """Return what the i-th request of the run asks."""
        picture = None if self.pictures is None else self.pictures.data_uri(number)
        return Prompt(self.prompt(number), max_tokens, picture)

    def request_count(self, load: Load) -> int:
        """Return the requests of a load: four for each user, at least 16."""
        return self.requests or max(16, 4 * (load.concurrency or 8))


@dataclass
class ServeResults:
    """Stretches by server, load and round; `partial`: interrupted, `fault`: by this."""

    plan: LoadPlan
    servers: tuple[Server, ...]
    stretches: dict[tuple[str, Load], dict[int, LoadResult]] = field(default_factory=dict)
    partial: bool = False
    fault: str | None = None

    def statistics_of(self, server: str, load: Load) -> LoadStatistics | None:
        """Return what all rounds of a server under a load come to; None before the first."""
        found = self.stretches.get((server, load))
        return statistics_of_load(list(found.values()), self.plan.goals) if found else None

    def comparisons(self) -> list[tuple[str, str, Load, str, Comparison]]:
        """Compare each server with the baseline, llama-server if it is there, else the first.

        Returns (server, baseline, load, measure, comparison): one value of a round, judged at once.
        """
        names = [server.name for server in self.servers]
        baseline = next((name for name in names if name == "llama-server"), names[0])
        found, judged = [], []
        for name in (name for name in names if name != baseline):
            for load in self.plan.loads:
                for measure, value in MEASURES.items():
                    ours, theirs = (
                        self._values_by_round(name, load, value),
                        self._values_by_round(baseline, load, value),
                    )
                    if rounds := sorted(ours.keys() & theirs.keys()):
                        found.append((name, baseline, load, measure))
                        pair = [ours[r] for r in rounds], [theirs[r] for r in rounds]
                        judged.append(compare_paired(*pair))
        return [
            (*what, comparison)
            for what, comparison in zip(found, holm_adjusted(judged), strict=True)
        ]

    def _values_by_round(
        self, name: str, load: Load, value: Callable[[LoadStatistics], float | None]
    ) -> dict[int, float]:
        rounds = self.stretches.get((name, load), {})
        values = {r: value(statistics_of_load([stretch], {})) for r, stretch in rounds.items()}
        return {r: found for r, found in values.items() if found is not None}


def run_rounds(
    plan: LoadPlan, servers: tuple[Server, ...], talk: Progress, interrupts: Interrupts
) -> ServeResults:
    """Run all rounds; an interrupt ends it and keeps what is there, and so does a server's end.

    Raises BenchError where nothing was measured before that. `interrupts` lets none through behind
    the run, where results are written.
    """
    results = ServeResults(plan, servers)
    loop = asyncio.Runner()  # one: a loop that is cut off while it closes complains
    try:
        try:
            for round_ in range(plan.rounds):
                _run_round(results, round_, talk, partial(interrupts.run_coroutine, loop))
        finally:
            interrupts.start_holding()
            loop.close()
    except KeyboardInterrupt:
        results.partial = True
    except BenchError as error:
        if not results.stretches:
            raise
        results.partial, results.fault = True, str(error)
    return results


def _run_round(
    results: ServeResults,
    round_: int,
    talk: Progress,
    finish: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    plan = results.plan
    order = list(results.servers)
    random.Random(f"{plan.seed} {round_}").shuffle(order)
    for server in order:
        talk.show_phase(f"{server.name}: round {round_ + 1} of {plan.rounds}: getting ready")
        with server.serve() as address:
            model = plan.model_name or first_served_model(address, plan.headers)
            finish(_measure_loads(results, server, (address, model), round_, talk))


async def _measure_loads(
    results: ServeResults, server: Server, served: tuple[str, str], round_: int, talk: Progress
) -> None:
    plan = results.plan
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        headers=plan.headers, limits=limits, timeout=None, trust_env=False
    ) as http:
        client = Client(http, *served, plan.endpoint, plan.timeout)
        first = round_ * sum(2 * plan.request_count(load) for load in plan.loads)
        for load in plan.loads:
            talk.show_phase(f"{server.name}: round {round_ + 1} of {plan.rounds}: {load.label}")
            n = plan.request_count(load)
            prompts = [plan.prompt_of_request(first + i, plan.max_tokens) for i in range(n)]
            warm = min(load.concurrency or 8, _WARM_REQUESTS, n)
            tokens = min(_WARM_TOKENS, plan.max_tokens)
            others = [
                plan.prompt_of_request(first + n + i, tokens) for i in range(warm)
            ]  # none comes twice
            first += 2 * n
            await ask_all(Load(warm), others, client.ask, 0)
            stretch = await ask_all(load, prompts, client.ask, plan.seed + round_)
            results.stretches.setdefault((server.name, load), {})[round_] = stretch
