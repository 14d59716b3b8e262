"""Output of serve-bench: two tables and notes, or JSON."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from orinbench.judge.verdict import Comparison, Verdict, interval_text, ratio_text, rounds_needed
from orinbench.measure.environment import read_environment
from orinbench.serve.load import Load
from orinbench.serve.load_statistics import LoadStatistics
from orinbench.serve.run import LoadPlan, ServeResults
from orinbench.show.markdown import counted_noun, markdown_table

# Of a core: a client that takes more than this measures itself.
_BUSY_CLIENT = 0.8
_TIMES = (
    ("first text (TTFT)", "ttft_ms"),
    ("token (TPOT)", "tpot_ms"),
    ("gap (ITL)", "itl_ms"),
    ("whole answer (E2E)", "e2e_ms"),
)

Row = tuple[str, Load, LoadStatistics]


def render_md(results: ServeResults) -> str:
    """Return the tables and notes."""
    rows = [
        (server.name, load, figures)
        for load in results.plan.loads
        for server in results.servers
        if (figures := results.statistics_of(server.name, load))
    ]
    if not rows:
        return "Interrupted before the first figure.\n"
    notes = "\n".join(f"- {note}" for note in _notes_below_tables(results, rows))
    return f"{_throughput_table(rows)}\n\n{_latency_table(rows)}\n\n{notes}\n"


def _throughput_table(rows: list[Row]) -> str:
    titles = ["server", "load", "requests", "failed", "requests/s", "output tok/s", "all tok/s"]
    goals = any(figures.goodput_s is not None for *_, figures in rows)
    cells = [
        [
            *(name, load.label, str(f.requests), str(f.failed), f"{f.requests_s:.2f}"),
            *(f"{f.output_tokens_s:.1f}", f"{f.total_tokens_s:.1f}"),
            *([f"{f.goodput_s:.2f}/s"] if goals else []),
        ]
        for name, load, f in rows
    ]
    titles += ["goodput"] if goals else []
    return markdown_table(titles, cells, titles[2:])


def _latency_table(rows: list[Row]) -> str:
    titles = ["server", "load", "milliseconds", "p50", "p90", "p99", "mean"]
    cells = [
        [name, load.label, what, *(f"{found[p]:.2f}" for p in titles[3:])]
        for name, load, figures in rows
        for what, field in _TIMES
        if (found := getattr(figures, field))
    ]
    return markdown_table(titles, cells, titles[3:])


def _notes_below_tables(results: ServeResults, rows: list[Row]) -> list[str]:
    plan = results.plan
    compared = results.comparisons()
    needed = rounds_needed(len(compared))
    notes = [_comparison_text(*each, needed) for each in compared]
    if notes and not all(server.fresh for server in results.servers):
        notes.append(
            "A server of --url is one process in all rounds: a difference may be that process's "
            "luck. --start takes a fresh one each round."
        )
    notes += [
        f"{name}, {load.label}: {count} failed: {error}."
        for name, load, figures in rows
        for error, count in figures.errors.items()
    ]
    for name, load, figures in rows:
        if figures.client_cpu > _BUSY_CLIENT:
            notes.append(
                f"{name}, {load.label}: the client took {100 * figures.client_cpu:.0f} % of a core "
                "and may be what bounds these figures."
            )
        if figures.cached_tokens:
            share = 100 * figures.cached_tokens / figures.prompt_tokens
            notes.append(f"{name}, {load.label}: the server knew {share:.0f} % of the prompts.")
    if results.partial:
        why = f"Ended early, {results.fault.rstrip('.')}" if results.fault else "Interrupted"
        notes.append(f"{why}: the figures are those measured until then.")
    prompt, output = (
        sum(getattr(figures, field) for *_, figures in rows)
        / max(1, sum(figures.requests - figures.failed for *_, figures in rows))
        for field in ("prompt_tokens", "output_tokens")
    )
    notes.append(
        f"Requests: {plan.endpoint}, streamed, greedy; on average {prompt:.0f} tokens of prompt "
        f"and {output:.0f} of answer, as the server counts them; "
        f"{_pictures_text(plan)}"
        f"{_rounds_text(results)}, servers in an order drawn with seed "
        f"{plan.seed}. Times are the client's, from when a request was due."
    )
    return notes


def _pictures_text(plan: LoadPlan) -> str:
    if (each := plan.pictures) is None:
        return ""
    return f"with each a picture of {each.width} x {each.height}, another one each time; "


def _rounds_text(results: ServeResults) -> str:
    text = counted_noun(results.plan.rounds, "round")
    done = max(map(len, results.stretches.values()), default=0)
    return f"{done} of {text}" if results.partial else text


def _comparison_text(
    server: str, baseline: str, load: Load, measure: str, comparison: Comparison, needed: int
) -> str:
    """Say what a comparison shows; of times the inverse is compared, so more is better.

    `needed` is the rounds that a verdict takes.
    """
    inside = interval_text(comparison.ci_low, comparison.ci_high, "95 % {} to {}, ")
    better = {
        Verdict.FASTER: f"{server} is better",
        Verdict.SLOWER: f"{server} is worse",
        Verdict.NO_DIFFERENCE: "no difference shown",
        Verdict.TOO_FEW: f"too few rounds for a verdict (-r {needed} or more)",
    }.get(comparison.verdict, comparison.verdict.value)
    return (
        f"{load.label}, {measure}: {better}: {ratio_text(comparison.ratio)} times as good as "
        f"{baseline} ({inside}{counted_noun(comparison.n, 'round')})."
    )


def render_json(results: ServeResults) -> str:
    """Return one object: the plan, figures of each round and of all, comparisons, the machine."""
    plan = results.plan
    found: list[dict[str, Any]] = []
    for server in results.servers:
        for load in plan.loads:
            whole = results.statistics_of(server.name, load)
            if whole is None:
                continue
            rounds = results.stretches[server.name, load]
            found.append(
                {
                    "server": server.name,
                    "load": {**asdict(load), "label": load.label},
                    "figures": asdict(whole),
                    "rounds": [
                        {
                            "round": number,
                            "seconds": stretch.seconds,
                            "answers": [asdict(answer) for answer in stretch.answers],
                        }
                        for number, stretch in rounds.items()
                    ],
                }
            )
    compared = [
        {
            "server": server,
            "baseline": baseline,
            "load": load.label,
            "measure": measure,
            "n": comparison.n,
            **comparison.json_fields(),
        }
        for server, baseline, load, measure, comparison in results.comparisons()
    ]
    whole_run = {
        "schema_version": 1,
        "benchmark": "serve-bench",
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "partial": results.partial,
        "fault": results.fault,
        "endpoint": plan.endpoint,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "max_tokens": plan.max_tokens,
        "goodput_limits_ms": plan.goals,
        "results": found,
        "comparisons": compared,
        "environment": asdict(read_environment()),
    }
    return json.dumps(whole_run, indent=2, ensure_ascii=False) + "\n"
