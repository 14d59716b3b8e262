import pytest
from hypothesis import given
from hypothesis import strategies as st

from orinbench.benchmark import protocol
from orinbench.benchmark.plan import Case

CASES = st.builds(Case, *[st.integers(0, 10**6)] * 3, st.just(()))
MESSAGES = st.one_of(
    st.just(protocol.Open()),
    st.builds(protocol.Load, st.text(), st.integers(1, 10**6)),
    st.builds(protocol.Measure, CASES, st.integers()),
    st.builds(protocol.WarmUp, CASES, st.text()),
    st.builds(protocol.Bandwidth, st.integers(), st.lists(st.floats(0, 1e5))),
    st.builds(protocol.Measured, *[st.integers(0, 10**15)] * 5),
    st.builds(protocol.Loaded, st.floats(0, 1e3), st.text(), st.text(), st.none()),
    st.builds(protocol.Failed, st.text(), st.text()),
)


@given(MESSAGES)
def test_every_message_survives_the_wire_on_one_line(message: protocol.Message) -> None:
    line = protocol.encode(message)
    assert "\n" not in line
    assert protocol.decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        *("", "x", "1", "[]", "{}", '{"type": "Nothing"}', '{"type": "Load"}'),
        *('{"type": "Open", "more": 1}', '{"type": "WarmUp", "case": 3}'),
    ],
)
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        protocol.decode(line)
