"""Fixtures of the simulator's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def programs_of_nobody_else(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kept programs are those of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVGPUSIM_CACHE", str(tmp_path_factory.mktemp("programs")))
        yield
