"""Dependence of greedy answers on other requests: rounding of steps of other sizes, and no more.

python -m tests.engine.server.batch_rounding --url http://127.0.0.1:8000 asks each prompt alone,
then 2, 8 and 32 at once, and prints how far log-probabilities of one text lie apart, which answers
parted, and how close the two tokens were there. Exit code 1: one parted at two tokens that rounding
does not explain, or, with --equal (a --deterministic server), anything differs.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import click
import httpx
import numpy as np

#: Clients at once, beside one alone.
CLIENTS = (2, 8, 32)
# Stands for bytes that are no character: several tokens are called so.
_HALF = "\ufffd"
# Alternatives of each token that are asked for, OpenAI's most in a completion.
_TOP = 5


@dataclass(frozen=True)
class Said:
    """A greedy answer: its tokens, and the best ones' log-probabilities at each place."""

    tokens: tuple[str, ...]
    best: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class Parted:
    """Point where an answer left the one that came alone. gap: between the two tokens, there."""

    clients: int
    prompt: int
    place: int
    gap: float


@dataclass
class Found:
    """Summary of so many answers. apart: most that log-probabilities of one text differ."""

    answers: int
    apart: float
    parted: list[Parted]

    @property
    def explained(self) -> bool:
        """Say whether two tokens parted only where both may have moved by what was seen."""
        return all(one.gap <= 2 * self.apart for one in self.parted)


Ask = Callable[[Sequence[int]], Said]


def asker(url: str, model: str, most: int) -> Ask:
    """Return what asks a server for a greedy answer of `most` tokens."""
    web = httpx.Client(timeout=600, limits=httpx.Limits(max_connections=64))

    def ask(prompt: Sequence[int]) -> Said:
        body = {
            "model": model,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": most,
            "logprobs": _TOP,
            "ignore_eos": True,
        }
        reply = web.post(f"{url}/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found = reply.json()["choices"][0]["logprobs"]
        return Said(tuple(found["tokens"]), tuple(found["top_logprobs"]))

    return ask


def compare(ask: Ask, prompts: Sequence[Sequence[int]], clients: Sequence[int] = CLIENTS) -> Found:
    """Ask each prompt alone, and so many at once; say how answers differ."""
    alone = [ask(prompt) for prompt in prompts]
    found = Found(0, 0.0, [])
    for n in clients:
        with ThreadPoolExecutor(n) as pool:
            together = list(pool.map(ask, prompts))
        for i, (one, other) in enumerate(zip(alone, together, strict=True)):
            found.answers += 1
            _compare(found, one, other, (n, i))
    return found


def _compare(found: Found, one: Said, other: Said, where: tuple[int, int]) -> None:
    pairs = zip(one.tokens, other.tokens, one.best, other.best, strict=True)
    for place, (mine, its, best, others) in enumerate(pairs):
        # Up to here the text is the same, and so should be what follows it.
        known = {token for token in best.keys() & others.keys() if _HALF not in token}
        apart = max((abs(best[token] - others[token]) for token in known), default=0.0)
        found.apart = max(found.apart, apart)
        if mine != its:
            gap = best[mine] - best[its] if its in best else float("inf")
            found.parted.append(Parted(*where, place, gap))
            return


def prompts_of(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random tokens, which never change."""
    random = np.random.default_rng(7)
    return [random.integers(3, vocabulary, tokens + i % 5).tolist() for i in range(count)]


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--prompts", "count", default=64, show_default=True, type=click.IntRange(1))
@click.option("-p", "--tokens", default=48, show_default=True, type=click.IntRange(1))
@click.option("-n", "--most", default=64, show_default=True, type=click.IntRange(1))
@click.option("--vocabulary", default=30000, show_default=True, type=click.IntRange(4))
@click.option("--equal", is_flag=True, help="Answers must be equal: the server is deterministic.")
def main(url: str, count: int, tokens: int, most: int, vocabulary: int, equal: bool) -> None:
    """Ask a server that runs, alone and by many, and compare."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    found = compare(asker(url, model, most), prompts_of(count, tokens, vocabulary))
    click.echo(
        f"{found.answers} answers of {most} tokens, with {CLIENTS} clients: log-probabilities of "
        f"one text up to {found.apart:.2e} apart; {len(found.parted)} answers parted from the one "
        "that came alone"
    )
    for one in found.parted:
        click.echo(
            f"  {one.clients} clients, prompt {one.prompt}, token {one.place}: the two were "
            f"{one.gap:.2e} apart"
        )
    wrong = not found.explained or (equal and (found.parted or found.apart > 0))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
