"""Every rule of the model is broken once (or, where it forbids nothing, relied on once)."""

from __future__ import annotations

import pytest

from nvgpusim.rules import RULES

from . import (
    cases_channel,
    cases_ctrl,
    cases_dispatch,
    cases_nvmap,
    cases_space,
    cases_tsg,
)
from .cases import CASES, R35Board
from .conftest import simulated
from .rawclient import Board

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
