"""The claims stand in the documents, and a report confirms, refutes or does not test each."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.benchmarks.check.device.conftest import report, step, written

from orinbench.check.device.claims import (
    OPERATIONS,
    Claim,
    ClaimCondition,
    ClaimOutcome,
    judge_claim,
    load_claims,
)
from orinbench.check.device.steps import STEPS
from orinbench.cli import orinbench

ROOT = Path(__file__).resolve().parents[4]
CLAIMS = load_claims()


def flat(text: str) -> str:
    """Text without its line ends: a document is wrapped where its author's editor wraps it."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_stands_in_its_document_and_asks_for_what_a_report_has(claim: Claim) -> None:
    assert flat(claim.text) in flat((ROOT / claim.doc).read_text(encoding="utf-8"))
    steps = [step.name for step in STEPS]
    assert claim.checks, "a claim that no step looks at is no claim"
    for check in claim.checks:
        assert check.op in OPERATIONS
        assert check.path[0] in steps and check.path[1] == "result"


def test_ids_are_unique() -> None:
    assert [i for i, n in Counter(claim.id for claim in CLAIMS).items() if n > 1] == []


def claim_of(*checks: ClaimCondition, board_only: bool = False) -> Claim:
    return Claim("x.y", "it works", "docs/x.md", board_only, checks)


SUM = ClaimCondition(("smoke", "result", "sum"), "equals", True)


def test_outcomes() -> None:
    assert judge_claim(claim_of(SUM), report())[0] is ClaimOutcome.CONFIRMED
    wrong = ClaimCondition(("smoke", "result", "arch"), "equals", "sm_90")
    outcome, because = judge_claim(claim_of(SUM, wrong), report())
    assert outcome is ClaimOutcome.REFUTED
    assert because == 'smoke/result/arch is "sm_87"; claimed: equals "sm_90"'
    missing = ClaimCondition(("smoke", "result", "speed"), "equals", 1)
    assert (
        judge_claim(claim_of(SUM, missing), report())[1] == "the report has no smoke/result/speed"
    )
    # A wrong claim is wrong, also where something else was not tested.
    assert judge_claim(claim_of(missing, wrong), report())[0] is ClaimOutcome.REFUTED
    other = ClaimCondition(("memory", "result", "failed"), "equals", 0)
    assert judge_claim(claim_of(other), report())[1] == "memory was not taken"
    late = report(memory=step(None, "not run", "no checkout"))
    assert judge_claim(claim_of(other), late)[1] == "memory: not run: no checkout"
    assert judge_claim(claim_of(SUM, board_only=True), report())[0] is ClaimOutcome.CONFIRMED
    simulated = judge_claim(claim_of(SUM, board_only=True), report(simulated=True))
    assert simulated == (ClaimOutcome.NOT_TESTED, "only a board can show it")


@pytest.mark.parametrize(
    ("op", "found", "wanted", "holds"),
    [
        ("equals", [], [], True),
        ("one of", 16, [8, 16], True),
        ("one of", 9, [8, 16], False),
        ("at least", 2, 2, True),
        ("at most", 3, 2, False),
        ("at most", None, 2, False),
        ("matches", "pc 0xfb", "pc 0x[0-9a-f]+", True),
        ("matches", None, "pc", False),
    ],
)
def test_operations(op: str, found: object, wanted: object, holds: bool) -> None:
    whole = report(smoke=step({"x": found}))
    outcome = judge_claim(claim_of(ClaimCondition(("smoke", "result", "x"), op, wanted)), whole)[0]
    assert outcome is (ClaimOutcome.CONFIRMED if holds else ClaimOutcome.REFUTED)


def test_two_values_of_a_report_are_the_same() -> None:
    sms = ("abi", "result", "characteristics", "sms")
    same = claim_of(ClaimCondition(("smoke", "result", "sms"), "same as", "/".join(sms)))
    assert judge_claim(same, report())[0] is ClaimOutcome.CONFIRMED
    other = report()
    other["steps"]["smoke"]["result"]["sms"] = 8  # a driver that counts the litters
    outcome, because = judge_claim(same, other)
    assert outcome is ClaimOutcome.REFUTED and because.endswith(f'"{"/".join(sms)}"')
    del other["steps"]["abi"]
    assert judge_claim(same, other) == (ClaimOutcome.NOT_TESTED, "abi was not taken")


def verify(tmp_path: Path, whole: dict[str, Any]) -> tuple[int, str]:
    words = ["device-check", "verify", str(written(tmp_path, whole))]
    result = CliRunner().invoke(orinbench, words, standalone_mode=False)
    assert result.exception is None, result.exception
    return result.return_value or 0, result.stdout


def test_verify_prints_the_claims_and_says_by_its_code_whether_one_is_refuted(
    tmp_path: Path,
) -> None:
    # The table of this report says that the other end of the address space is refused.
    code, text = verify(tmp_path, report())
    assert code == 1
    head, refuted, *_ = text.split("\n\n")
    assert "NVIDIA Jetson AGX Orin Developer Kit" in head + refuted
    assert "refuted (1):" in text and "windows.other_end" in text
    assert "windows/other_va_end/works is false; claimed: equals true" in text
    assert "confirmed (" in text and "not tested (" in text

    good = report()
    good["steps"]["abi"]["result"]["windows"]["other_va_end"]["works"] = True
    code, text = verify(tmp_path, good)
    assert code == 0 and "refuted" not in text

    code, text = verify(tmp_path, report(simulated=True))
    assert code == 0 and "nothing here is confirmed for hardware" in text
    assert text.count("only a board can show it") == sum(c.board_only for c in CLAIMS)
