"""Saved results beside each other: their tests in common, each with its verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orinbench.judge.identity import (
    case_key,
    full_test_name,
    labels_by_identity,
    machine_key,
    measurement_identity,
    setup_differences,
)
from orinbench.judge.schema import Record
from orinbench.judge.verdict import (
    ADVICE,
    UNJUDGED,
    Comparison,
    Noise,
    Verdict,
    compare_separate,
    holm_adjusted,
    interval_text,
    process_medians,
    ratio_text,
    verdict_text,
    without_verdict,
)
from orinbench.show.markdown import markdown_table


@dataclass(frozen=True)
class JudgedTest:
    """One test of both sides; `case` is its identity."""

    label: str
    backend: str
    comparison: Comparison
    case: str = ""

    def json_fields(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        test = {"backend": self.backend, "test": self.label, "n": self.comparison.n}
        return test | self.comparison.json_fields()


@dataclass(frozen=True)
class MissingTest:
    """A test that was measured before and now was not; `error` says why it failed, if it did."""

    label: str
    backend: str
    error: str | None

    def summary_line(self) -> str:
        """Say it."""
        what = "was not measured" if self.error is None else f"failed: {self.error}"
        return f"{self.backend} {self.label}: {what}"


@dataclass(frozen=True)
class SavedComparison:
    """Two saved results: their tests in common, judged at once, and what only the first has."""

    judged: list[JudgedTest]
    missing: list[MissingTest]
    differs: list[str]  # between machines and versions
    usual: list[str]  # differences between runs of the same software
    questions: int  # that were asked of each test, this one being one of them

    @property
    def is_worse(self) -> bool:
        """True if a test became slower or failed."""
        slower = any(test.comparison.verdict is Verdict.SLOWER for test in self.judged)
        return slower or any(test.error for test in self.missing)

    def markdown(self, ours: str, theirs: str, notes: Sequence[str]) -> str:
        """Return the table, what differs, the notes, and a line for each test."""
        table = markdown_table(
            ("backend", "test", f"{ours} / {theirs}", "95 % interval", "n", "p", "verdict"),
            [
                (
                    test.backend,
                    test.label,
                    ratio_text(test.comparison.ratio),
                    interval_text(test.comparison.ci_low, test.comparison.ci_high, "{} – {}"),
                    str(test.comparison.n),
                    "" if test.comparison.verdict in UNJUDGED else f"{test.comparison.p_value:.2g}",
                    test.comparison.verdict.value,
                )
                for test in self.judged
            ],
            right=("n", "p", f"{ours} / {theirs}"),
        )
        lines = [f"differs: {difference}" for difference in self.differs]
        lines += [*self.usual, *notes]
        for test in self.judged:
            text = verdict_text(test.comparison, ours, theirs, "process", "results of -r 10")
            lines.append(f"{test.backend} {test.label}: {text}.")
        if any(test.comparison.verdict is Verdict.UNKNOWN for test in self.judged):
            lines.append(ADVICE)
        tested = sum(test.comparison.verdict not in UNJUDGED for test in self.judged)
        if tested > 1:
            lines.append(f"p after Holm's correction for {tested} tests at once.")
        if self.questions > 1:
            lines.append(f"p times {self.questions}: the level of each series is tested too.")
        return "\n".join([table, "", *(f"- {line}" for line in lines)])


def compare_saved(
    before: Sequence[Record],
    after: Sequence[Record],
    noise: Mapping[str, Noise | None],
    questions: int = 1,
) -> SavedComparison:
    """Compare each record of `after` with the same measurement in `before`.

    `noise` says by `case_key` how much runs differ by themselves. Records without samples on a
    side, such as those of llama.cpp's sql, are left out.
    """
    old = {measurement_identity(record): record for record in before if record.samples_ts}
    new = [record for record in after if record.samples_ts]
    both = [
        (old[measurement_identity(record)], record)
        for record in new
        if measurement_identity(record) in old
    ]
    comparisons = [
        compare_records(record, then, noise.get(case_key(record))) for then, record in both
    ]
    labels = labels_by_identity([*before, *after])
    judged = [
        JudgedTest(
            labels[measurement_identity(record)],
            record.backend,
            comparison,
            measurement_identity(record),
        )
        for (_, record), comparison in zip(both, holm_adjusted(comparisons, questions), strict=True)
    ]
    errors = {(full_test_name(record), record.backend): record.error for record in after}
    gone = old.keys() - {measurement_identity(record) for record in new}
    missing = [
        MissingTest(
            labels[case], record.backend, errors.get((full_test_name(record), record.backend))
        )
        for case, record in old.items()
        if case in gone
    ]
    usual = [
        f"{test.backend} {test.label}: between {each.of} of the same software on this machine "
        f"{100 * each.sd:.2g} % is usual, by {each.degrees + 1} of them or more"
        for test in judged
        if (each := test.comparison.noise) is not None
    ]
    return SavedComparison(judged, missing, setup_differences(before, after), usual, questions)


# Values of WarningKind: of a run whose machine was not the one that is asked about.
_BLOCKING = {"busy_machine", "unsteady", "drift", "throttled"}


def compare_records(record: Record, then: Record, noise: Noise | None) -> Comparison:
    """Compare two runs' records of a case.

    Where the noise between runs is not known there is no verdict: two runs say nothing of what a
    day or a restart does to a machine, and one machine's noise nothing of another's. Nor is there
    under a warning that the machine was not fit.
    """
    if machine_key(record) != machine_key(then):
        noise = None
    new, old = (process_medians(r.samples_ts, r.processes).values() for r in (record, then))
    comparison = compare_separate([*new], [*old], noise)
    kinds = {warning.get("kind") for side in (record, then) for warning in side.warnings}
    if comparison.verdict in UNJUDGED:
        return comparison
    if noise is None:
        return without_verdict(comparison, Verdict.UNKNOWN)
    if kinds & _BLOCKING and comparison.verdict in (Verdict.FASTER, Verdict.SLOWER):
        return without_verdict(comparison, Verdict.UNFIT)
    return comparison
