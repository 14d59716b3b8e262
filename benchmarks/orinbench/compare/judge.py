"""What two saved results say about each other, test by test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.identity import case_test, identity
from orinbench.judge import (
    Comparison,
    Noise,
    Verdict,
    adjusted,
    compare_separate,
    process_medians,
)
from orinbench.record import Record, times, verdict_text
from orinbench.tables import markdown_table

EXIT_SLOWER = 1


@dataclass(frozen=True)
class Judged:
    """One test of both sides: `unit` is what was counted, a "pair" or a "process"."""

    label: str
    backend: str
    comparison: Comparison
    unit: str

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        comparison = self.comparison
        return {
            "backend": self.backend,
            "test": self.label,
            "n": comparison.n,
            "ratio": comparison.ratio,
            "ci95_low": comparison.ci_low,
            "ci95_high": comparison.ci_high,
            "p_value": comparison.p_value,
            "verdict": comparison.verdict.value,
        }


NoiseOf = Callable[[Record, Record], Noise | None]


def no_noise(before: Record, after: Record) -> Noise | None:
    """Know nothing of how runs differ."""
    return None


def judge_saved(
    before: Sequence[Record], after: Sequence[Record], noise_of: NoiseOf = no_noise
) -> list[Judged]:
    """Compare each record of `after` with the same measurement in `before`, all judged at once.

    `noise_of` says how much runs of a measurement differ by themselves. Records without samples on
    a side, such as those of llama.cpp's sql, are left out.
    """
    old = {identity(record): record for record in before if record["samples_ts"]}
    pairs = [
        (old[identity(record)], record)
        for record in after
        if record["samples_ts"] and identity(record) in old
    ]
    comparisons = adjusted(
        [compare_separate(medians(new), medians(then), noise_of(then, new)) for then, new in pairs]
    )
    return [
        Judged(case_test(record), record["backend"], comparison, "process")
        for (_, record), comparison in zip(pairs, comparisons, strict=True)
    ]


def medians(record: Record) -> list[float]:
    """Return the medians of a record's processes."""
    return list(process_medians(record["samples_ts"], record["processes"]).values())


def is_slower(judged: Sequence[Judged]) -> bool:
    """Whether anything became slower."""
    return any(test.comparison.verdict is Verdict.SLOWER for test in judged)


def markdown(judged: Sequence[Judged], notes: Sequence[str], ours: str, theirs: str) -> str:
    """Return the table, what differs, and a line for each test."""
    table = markdown_table(
        ("backend", "test", f"{ours} / {theirs}", "95 % interval", "n", "p", "verdict"),
        [
            (
                *(test.backend, test.label, times(test.comparison.ratio)),
                _interval(test.comparison),
                *(str(test.comparison.n), f"{test.comparison.p_value:.2g}"),
                test.comparison.verdict.value,
            )
            for test in judged
        ],
        right=("n", "p", f"{ours} / {theirs}"),
    )
    lines = [f"- {note}" for note in notes]
    for test in judged:
        more = "--rounds 10" if test.unit == "pair" else "results of -r 10"
        text = verdict_text(test.comparison, ours, theirs, test.unit, more)
        lines.append(f"- {test.backend} {test.label}: {text}.")
    if len(judged) > 1:
        lines.append(f"- p after Holm's correction for {len(judged)} tests at once.")
    return "\n".join([table, "", *lines])


def _interval(comparison: Comparison) -> str:
    if comparison.ci_low is None or comparison.ci_high is None:
        return ""
    return f"{times(comparison.ci_low)} – {times(comparison.ci_high)}"
