"""What two saved results say about each other, test by test."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.identity import case_test, identity
from orinbench.record import Record, verdict_text
from orinbench.statistics import Comparison, Verdict, adjusted, compare_unpaired
from orinbench.tables import markdown_table

EXIT_SLOWER = 1


@dataclass(frozen=True)
class Judged:
    """One test of both sides: `unit` is what was counted, samples or pairs of rounds."""

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


def judge_saved(before: Sequence[Record], after: Sequence[Record]) -> list[Judged]:
    """Compare each record of `after` with the same measurement in `before`, all judged at once.

    Records without samples on a side, such as those of llama.cpp's sql, are left out.
    """
    old = {identity(record): record["samples_ts"] for record in before}
    pairs = [
        (record, old[identity(record)])
        for record in after
        if record["samples_ts"] and old.get(identity(record))
    ]
    comparisons = adjusted([compare_unpaired(new["samples_ts"], then) for new, then in pairs])
    return [
        Judged(case_test(record), record["backend"], comparison, "samples")
        for (record, _), comparison in zip(pairs, comparisons, strict=True)
    ]


def is_slower(judged: Sequence[Judged]) -> bool:
    """Whether anything became slower."""
    return any(test.comparison.verdict is Verdict.SLOWER for test in judged)


def markdown(judged: Sequence[Judged], notes: Sequence[str], ours: str, theirs: str) -> str:
    """Return the table, what differs, and a line for each test."""
    table = markdown_table(
        ("backend", "test", f"{ours} / {theirs}", "95 % interval", "n", "p", "verdict"),
        [
            (
                *(test.backend, test.label, f"{test.comparison.ratio:.3f}"),
                f"{test.comparison.ci_low:.3f} – {test.comparison.ci_high:.3f}",
                *(str(test.comparison.n), f"{test.comparison.p_value:.2g}"),
                test.comparison.verdict.value,
            )
            for test in judged
        ],
        right=("n", "p", f"{ours} / {theirs}"),
    )
    lines = [f"- {note}" for note in notes]
    for test in judged:
        more = "--rounds 10" if test.unit == "rounds" else "-r 10"
        text = verdict_text(test.comparison, ours, theirs, test.unit, more)
        lines.append(f"- {test.backend} {test.label}: {text}.")
    if len(judged) > 1:
        lines.append(f"- p after Holm's correction for {len(judged)} tests at once.")
    return "\n".join([table, "", *lines])
