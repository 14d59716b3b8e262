"""Every rule that the recorded answers do not show is broken, or relied on, once.

Which ones they show in every way stands in docs/reference/simulator-rules-noticed.csv: test_judge
plays them.
"""

from __future__ import annotations

import ast
import csv
import inspect
from types import TracebackType

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.rawclient import Board
from tests.simulator.kernel.rules import (
    cases_channel,
    cases_ctrl,
    cases_dispatch,
    cases_dmabuf,
    cases_nvmap,
    cases_space,
    cases_tsg,
)
from tests.simulator.kernel.rules.cases import CASES, Case, R35Board, bound, fails
from tests.simulator.kernel.rules.test_pages import REFERENCE

from nvgpusim.orin.rules import RULES

CILP_FLAG, CILP, CTA = 4, 4, 2
REGISTERED = (
    cases_channel,
    cases_ctrl,
    cases_dispatch,
    cases_dmabuf,
    cases_nvmap,
    cases_space,
    cases_tsg,
)


def test_every_rule_has_a_case_or_recorded_answers() -> None:
    with (REFERENCE / "simulator-rules-noticed.csv").open(newline="") as lines:
        shown = {row["rule"] for row in csv.DictReader(lines) if row["judge"] == row["ways"]}
    assert set(CASES) | shown == set(RULES)


def _last_statement(function: Case) -> int:
    """Line of a case's last statement, where its refusal comes from; 0 of a lambda."""
    if function.__name__ == "<lambda>":
        return 0
    (tree,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(tree, ast.FunctionDef)
    return function.__code__.co_firstlineno + tree.body[-1].lineno - 1


def _line(trace: TracebackType | None, function: Case) -> int:
    """The line of `function` that raised."""
    while trace is not None and trace.tb_frame.f_code is not function.__code__:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else -1


@pytest.mark.parametrize("rule", sorted(CASES))
def test_rule(rule: str) -> None:
    function, options = CASES[rule]
    with simulated(**options) as kernel:
        board = R35Board() if options.get("profile") == "r35" else Board()
        number = RULES[rule].errno
        if number:
            with pytest.raises(OSError) as raised:
                function(kernel, board)
            assert raised.value.errno == number, raised.value
            assert _line(raised.tb, function) >= _last_statement(function), "refused too early"
            assert kernel.journal.refusals[-1]["rule"] == rule
        else:
            function(kernel, board)
        assert kernel.journal.rules[rule] > 0
        kernel.check_invariants()


@pytest.mark.parametrize(("profile", "lowered"), [("r35", True), ("r36", False)])
def test_a_later_class_sets_modes_from_r36_on(profile: str, lowered: bool) -> None:
    with simulated(profile=profile):
        board = R35Board() if profile == "r35" else Board()
        channel = bound(board)
        rc.alloc_obj(channel, rc.COMPUTE)
        rc.call(channel, "H", 108, "IIQ", rc.COMPUTE, CILP_FLAG, 0)
        modes = (channel, "H", 122, "II", 0, CTA)
        if lowered:
            rc.call(*modes, direction="w")
        else:
            fails(22, rc.call, *modes, direction="w")
        rc.call(channel, "H", 122, "II", 0, CILP, direction="w")
