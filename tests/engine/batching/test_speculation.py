"""Tokens that are guessed and computed together: the text is the one that comes without."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.engine.conftest import Load, Synthetic
from tests.engine.models import smollm2, tokenizer

from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import DraftProposer, LookupProposer, Proposer
from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.loader import Network, make_page_store, plan_network
from orinllm.model import Model, ModelDescription

PROMPT = [(37 * i) % 1000 + 3 for i in range(66)]
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=9.0, seed=5)


class Oracle:
    """Proposes what is known to follow, and something else for every third token."""

    def __init__(self, whole: Sequence[int]) -> None:
        self._whole = whole

    def guess_tokens(
        self, text: Sequence[int], most: int, pages: Sequence[int], how: Sampling
    ) -> list[int]:
        places = range(len(text), min(len(text) + most, len(self._whole)))
        return [self._whole[at] ^ (at % 3 == 0) for at in places]


def test_lookup_finds_what_came_after() -> None:
    lookup = LookupProposer()
    assert lookup.guess_tokens([1, 2, 3, 4], 3) == []
    assert lookup.guess_tokens([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    # The longest match goes before the latest one.
    text = [1, 2, 3, 4, 1, 2, 7, 2, 3, 9, 5, 1, 2, 3]
    assert lookup.guess_tokens(text, 2) == [4, 1]
    assert lookup.guess_tokens([*text, 9], 2) == [5, 1]
    assert lookup.guess_tokens([3, 9], 2) == []
    # A text that grows in its own list, as an answer does.
    text = [5, 6, 7, 5]
    assert lookup.guess_tokens(text, 2) == []
    text += [6]
    assert lookup.guess_tokens(text, 2) == [7, 5]


def model(path: Path, executor: FusedExecutor) -> Model:
    network = Network.read(path, 128)
    plan = plan_network(network, "EMU")
    runner = FusedRunner(executor, 1)
    description = ModelDescription(network, tokenizer("gpt-2"), None)
    return Model(description, plan, runner, make_page_store(runner, network))


def fresh(model: Model) -> None:
    """Let a model forget what it knows."""
    model._scheduler.store = make_page_store(model.runner, model.description.network)


def answer(model: Model, how: Sampling, proposer: Proposer | None) -> tuple[list[int], int, int]:
    """The tokens of an answer, how many were proposed and how many of them right."""
    model.speculate(proposer)
    fresh(model)
    said = model.generate(PROMPT, how, max_tokens=11)
    assert [piece.token for piece in said if piece.token >= 0] == said.tokens
    return said.tokens, said.n_proposed, said.n_accepted


def test_fused_text_is_the_same(emulated: Load, synthetic: Synthetic) -> None:
    """Tokens of one pass see one another, over a page's end, whichever block runs first."""
    path = synthetic("tiny", "Q8_0")
    one = model(path, emulated(path))
    for how in (GREEDY, DRAWN):
        alone, *none = answer(one, how, None)
        assert none == [0, 0]
        guessed, proposed, right = answer(one, how, Oracle([*PROMPT, *alone]))
        assert guessed == alone
        assert 0 < right < proposed
        again, proposed, right = answer(one, how, DraftProposer(FusedRunner(emulated(path), 1)))
        assert again == alone
        assert right == proposed > 0  # the same model, which draws by the same numbers
    penalized = Sampling(temperature=0, repeat_penalty=1.5)
    assert answer(one, penalized, LookupProposer())[1] == 0


@pytest.fixture(scope="module")
def smol() -> Model:
    return Model.load(smollm2(), device="CPU", context=512)


@pytest.mark.parametrize("how", [GREEDY, Sampling(seed=3)])
def test_a_real_model_says_the_same(smol: Model, how: Sampling) -> None:
    question = [{"role": "user", "content": "Repeat: one two three, one two three, one two three."}]
    texts = []
    for proposer in (None, LookupProposer()):
        smol.speculate(proposer)
        fresh(smol)
        said = smol.generate(question, how, max_tokens=16)
        texts.append(said.text)
    assert texts[0] == texts[1]
    assert 0 < said.n_accepted <= said.n_proposed


def test_a_draft_of_another_vocabulary(smol: Model, synthetic: Synthetic) -> None:
    with pytest.raises(BadInput, match=r"tiny-Q6_K\.gguf: its vocabulary is not that of "):
        smol.load_proposer(synthetic("tiny", "Q6_K"))
