"""Every rule of the model is broken once (or, where it forbids nothing, relied on once)."""

from __future__ import annotations

import pytest
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.conftest import simulated
from tests.simulator.kernel.rawclient import Board
from tests.simulator.kernel.rules import (
    cases_channel,
    cases_ctrl,
    cases_dispatch,
    cases_nvmap,
    cases_space,
    cases_tsg,
)
from tests.simulator.kernel.rules.cases import CASES, R35Board, bound, fails

from nvgpusim.orin.rules import RULES

CILP_FLAG, CILP, CTA = 4, 4, 2
REGISTERED = (cases_channel, cases_ctrl, cases_dispatch, cases_nvmap, cases_space, cases_tsg)


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(RULES)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rule(rule: str) -> None:
    function, options = CASES[rule]
    with simulated(**options) as kernel:
        board = R35Board() if options.get("profile") == "r35" else Board()
        number = RULES[rule].errno
        if number:
            with pytest.raises(OSError) as raised:
                function(kernel, board)
            assert raised.value.errno == number, raised.value
            assert kernel.journal.refusals[-1]["rule"] == rule
        else:
            function(kernel, board)
        assert kernel.journal.rules[rule] > 0
        kernel.check()


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
