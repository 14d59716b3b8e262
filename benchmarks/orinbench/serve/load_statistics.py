"""Figures of the answers under one load: percentiles, throughput, goodput."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orinbench.errors import BenchError
from orinbench.serve.client import AnswerTimes
from orinbench.serve.load import LoadResult

PERCENTILES = (50, 90, 99)
#: What a limit of `--goodput` may be on, as `vllm bench serve` names it.
GOALS = ("ttft", "tpot", "e2el")

Goals = dict[str, float]  # milliseconds at most


@dataclass(frozen=True)
class LoadStatistics:
    """Times in milliseconds, each as {mean, p50, p90, p99}; an empty one has no samples.

    `itl` is over the gaps of all answers, `tpot` over the answers' means. Requests that failed are
    in no figure but `failed` and `errors`.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_s: float
    output_tokens_s: float
    total_tokens_s: float
    goodput_s: float | None  # requests a second that keep all limits; None: no limits
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2e_ms: dict[str, float]
    client_cpu: float


def statistics_of_load(stretches: Sequence[LoadResult], goals: Goals) -> LoadStatistics:
    """Return the figures of one load, of all its stretches together."""
    answers = [answer for stretch in stretches for answer in stretch.answers]
    good = [answer for answer in answers if answer.error is None]
    seconds = sum(stretch.seconds for stretch in stretches)
    prompt = sum(answer.prompt_tokens or 0 for answer in good)
    output = sum(answer.output_tokens or 0 for answer in good)
    tpot = [value for answer in good if (value := answer.tpot_s) is not None]
    kept = sum(_meets_goals(answer, goals) for answer in good)
    return LoadStatistics(
        requests=len(answers),
        failed=len(answers) - len(good),
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(answer.cached_tokens or 0 for answer in good),
        output_tokens=output,
        requests_s=len(good) / seconds,
        output_tokens_s=output / seconds,
        total_tokens_s=(prompt + output) / seconds,
        goodput_s=kept / seconds if goals else None,
        ttft_ms=_mean_and_percentiles_ms([answer.ttft_s for answer in good]),
        tpot_ms=_mean_and_percentiles_ms(tpot),
        itl_ms=_mean_and_percentiles_ms([gap for answer in good for gap in answer.gaps_s]),
        e2e_ms=_mean_and_percentiles_ms([answer.e2e_s for answer in good]),
        client_cpu=max(stretch.cpu_share for stretch in stretches),
    )


def _meets_goals(answer: AnswerTimes, goals: Goals) -> bool:
    times = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2e_s}
    return all(1e3 * times[name] <= limit for name, limit in goals.items())


def _mean_and_percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = 1e3 * np.asarray(seconds)
    return {"mean": float(ms.mean())} | {f"p{p}": float(np.percentile(ms, p)) for p in PERCENTILES}


def parse_goals(text: str | None) -> Goals:
    """Return the limits of `--goodput ttft:200,tpot:20`; raises BenchError."""
    goals: Goals = {}
    for item in text.split(",") if text else ():
        name, _, limit = item.strip().partition(":")
        if name in goals:
            raise BenchError(f"--goodput {text}: {name} has two limits; give one")
        try:
            goals[name] = float(limit)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not 0 < goals[name] < float("inf"):
            raise BenchError(
                f"--goodput {text}: '{item}' is no limit in milliseconds; right are ttft:200, "
                "tpot:20, e2el:5000, with commas between"
            )
    return goals
