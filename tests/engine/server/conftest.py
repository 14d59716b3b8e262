"""One real model on a CPU, served by the command, for all tests that ask it."""

from collections.abc import Iterator

import openai
import pytest
from tests.engine.models import smollm2
from tests.engine.server.live import Started, command

#: Its name, as the server says it.
MODEL = "smollm2"


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    log = tmp_path_factory.mktemp("server") / "log"
    with command(smollm2(), log, "--context", "512", "--alias", MODEL) as started:
        yield started


@pytest.fixture
def api(smol: Started) -> openai.OpenAI:
    return smol.client()
