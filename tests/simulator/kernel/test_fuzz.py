"""The model under random clients: no crash, no hang, no overlap, nothing left behind.

NVGPUSIM_FUZZ_STEPS asks for more (or fewer) steps than CI's 40,000.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.simulator.kernel.fuzzer import STEP, live

STEPS = int(os.environ.get("NVGPUSIM_FUZZ_STEPS", "40000"))
LIFE = 1000
"""Steps of one life: hypothesis draws at most 8 KiB."""


def test_lives() -> None:
    taken = 0

    @settings(
        max_examples=-(-STEPS // LIFE),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=STEP * LIFE, max_size=STEP * LIFE))
    def lives(data: bytes) -> None:
        nonlocal taken
        taken += live(data)

    lives()
    assert taken >= STEPS
