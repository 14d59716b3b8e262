"""Families with recurrent states or shared caches, on a CPU: transformers' logits, and reuse."""

import itertools
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.engine.batching.running import Ear, ear
from tests.engine.models import tokenizer
from tests.engine.network import hybrid_models
from tests.engine.network.hybrid_golden import GOLDEN, POSITIONS
from tests.engine.network.hybrid_models import CONTEXT, MODELS, PROMPT

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinllm.batching.cache import SlotStore
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.batching.state_checkpoints import StateCheckpoints
from orinllm.choose.sampling import Sampling
from orinllm.cpu.executor import CpuRunner
from orinllm.errors import BadInput
from orinllm.loader import Network, SharingOptions, make_page_store, make_runner, plan_network
from orinllm.model import ModelDescription, load_draft_proposer, require_takes_guesses

RECURRENT = [name for name in MODELS if not name.startswith("gemma4")]
Open = Callable[..., tuple[Network, CpuRunner]]
pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    folder = tmp_path_factory.mktemp("hybrid")

    def open_(name: str, slots: int = 3) -> tuple[Network, CpuRunner]:
        path = folder / f"{name}.gguf"
        if not path.exists():
            hybrid_models.write(path, name)
        network = Network.read(path, CONTEXT)
        runner = make_runner(network, plan_network(network, "CPU"), share=SharingOptions(slots, 99))
        assert isinstance(runner, CpuRunner) and runner.slots == slots
        return network, runner

    return open_


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(opened: Open, name: str) -> None:
    """Of prompts that are cut anywhere; two slots in turns do not know of each other."""
    want = np.array(json.loads(GOLDEN.read_text())[name])
    path = opened(name)[1].path
    for position, cuts in zip(POSITIONS, ([1], [33, 34, 100]), strict=True):
        ends = [0, *cuts, position + 1]
        for start, end in itertools.pairwise(ends):
            logits = path.prefill(PROMPT[start:end], start, slot=1)
            path.prefill(PROMPT[40:90], 0, slot=2)
        error = logits.astype(np.float64) - want[POSITIONS.index(position)]
        # Keys and values are 16-bit floats: scores of scale 1 (gemma4) magnify that.
        limit = 3e-3 if name.startswith("gemma4") else 4e-4
        assert np.sqrt((error**2).mean()) < limit * want.std()


@pytest.mark.parametrize("name", MODELS)
def test_the_float64_reference_is_transformers_too(opened: Open, name: str) -> None:
    want = np.array(json.loads(GOLDEN.read_text())[name])[0]
    got = Reference(open_model(opened(name)[0].gguf.path)).logits(PROMPT[: POSITIONS[0] + 1])[0]
    # transformers computes Nemotron-H's last norm in 32 bits.
    assert np.abs(got - want).max() < (1e-4 if name.startswith("nemotron") else 2e-5)


def test_gemma4s_q_k_and_v_may_be_one_tensor(opened: Open, tmp_path: Path) -> None:
    """As llama.cpp's gemma4.cpp takes them: values are no keys there."""
    want = opened("gemma4moe")[1].path.prefill(PROMPT[:20])
    found = hybrid_models.tensors("gemma4moe")
    parts = [found.pop(f"blk.0.attn_{name}.weight") for name in "qkv"]
    found["blk.0.attn_qkv.weight"] = np.concatenate(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_models, "tensors", lambda *more: found)
        hybrid_models.write(tmp_path / "m.gguf", "gemma4moe")
    network = Network.read(tmp_path / "m.gguf", CONTEXT)
    runner = make_runner(network, plan_network(network, "CPU"))
    assert isinstance(runner, CpuRunner)
    np.testing.assert_allclose(runner.path.prefill(PROMPT[:20]), want, rtol=0, atol=1e-5)


def answers(
    runner: CpuRunner, store: SlotStore, prompts: list[list[int]]
) -> list[ScheduledSequence]:
    """Answer prompts through a scheduler, all at once: greedily, of different lengths."""
    scheduler = Scheduler(runner, store, SchedulerObserver(), 99)
    asked = [
        ScheduledSequence(prompt, Sampling(temperature=0), 12, frozenset(), Ear(4 + at % 7))
        for at, prompt in enumerate(prompts)
    ]
    scheduler.submit(asked)
    scheduler.stop_when_idle()
    worker = threading.Thread(target=scheduler.run)
    worker.start()
    worker.join(60)
    assert scheduler.failure is None and all(ear(each).reason for each in asked)
    return asked


@pytest.mark.parametrize("name", RECURRENT)
def test_answers_are_those_of_one_alone(opened: Open, name: str) -> None:
    """More requests than slots, which begin alike, go on behind answers, and end in between."""
    network, runner = opened(name)
    head, rng = list(PROMPT[:130]), np.random.default_rng(5)
    prompts = [head[: int(rng.integers(1, 130))] for _ in range(4)]
    prompts += [[*head, *rng.integers(3, 60, 9).tolist()] for _ in range(6)]
    store = make_page_store(runner, network)
    assert isinstance(store, SlotStore)
    asked = answers(runner, store, [*map(list, prompts)])
    longer = [[*each.ids, 7, 8, 9] for each in asked[-3:]]
    asked += answers(runner, store, [*map(list, longer)])
    assert any(each.n_cached >= 128 for each in asked)  # from a checkpoint, or behind an answer
    path = runner.path
    for each in asked:
        ids, n = each.ids, each.n_prompt
        for at in range(n, len(ids)):
            logits = (
                path.prefill(ids[:at], 0) if at == n else path.prefill(ids[at - 1 : at], at - 1)
            )
            best = np.sort(logits)[-2:]
            assert ids[at] == logits.argmax() or best[1] - best[0] < 1e-3


def test_a_prompt_goes_on_from_the_last_checkpoint_before_they_part(opened: Open) -> None:
    network, runner = opened("lfm2", slots=1)
    store = make_page_store(runner, network)
    assert isinstance(store, SlotStore)
    first = list(PROMPT)
    answers(runner, store, [[*first]])
    (other,) = answers(runner, store, [[*first[:140], 5, 6, 7]])
    assert other.n_cached == 128
    (fresh,) = answers(runner, SlotStore(1, CONTEXT, resumable=False), [[*first[:140], 5, 6, 7]])
    assert (fresh.n_cached, fresh.ids) == (0, other.ids)
    # The checkpoint spares all but the last token: there is nothing to fill.
    (whole,) = answers(runner, store, [[*first[:129]]])
    (fresh,) = answers(runner, SlotStore(1, CONTEXT, resumable=False), [[*first[:129]]])
    assert (whole.n_cached, fresh.n_cached, whole.ids) == (128, 0, fresh.ids)
    (none,) = answers(runner, store, [[*first[:100]]])
    assert none.n_cached == 0


def test_checkpoints_are_bounded_and_kept_while_somebody_begins_with_them() -> None:
    kept = StateCheckpoints(3)
    for tokens in (64, 128, 192):
        assert kept.claim_checkpoint(0, tokens) is not None
    assert kept.claim_checkpoint(0, 128) is None  # there is one
    tokens, checkpoint = kept.length_and_checkpoint_of_owner(0, 100)
    assert tokens == 64 and checkpoint is not None
    kept.pin(checkpoint)
    assert kept.length_and_checkpoint_of_owner(1, 999) == (0, None)
    assert [kept.claim_checkpoint(1, n) is None for n in (64, 128, 192)] == [False] * 3
    assert kept.length_and_checkpoint_of_owner(0, 999) == (64, checkpoint)
    kept.unpin(checkpoint)
    kept.forget_after(0, 63)
    assert kept.length_and_checkpoint_of_owner(0, 999) == (0, None)
    # The last border of a prompt, and equal distances of at least eight pages before it.
    assert kept.prompt_piece_end(0, 1024, 100) == 64
    many = StateCheckpoints(32)
    ends, start = [], 0
    while start < 20000:
        start = many.prompt_piece_end(start, 20000, 20000)
        ends.append(start)
    assert ends[-2:] == [19968, 20000] and len(ends) < 18 and all(n % 64 == 0 for n in ends[:-1])


class Oracle:
    """Proposes what is known to follow, with something else at some places."""

    def __init__(self, whole: list[int], wrong: int) -> None:
        self._whole, self._wrong = whole, wrong

    def guess_tokens(
        self, text: Iterable[int], most: int, pages: Iterable[int], how: Sampling
    ) -> list[int]:
        first = len(list(text))
        places = range(first, min(first + most, len(self._whole)))
        return [self._whole[at] ^ (at % self._wrong == 0) for at in places]


@pytest.mark.parametrize("wrong", [2, 5, 999])
@pytest.mark.parametrize("name", RECURRENT)
def test_states_go_back_to_where_a_guess_was_wrong(opened: Open, name: str, wrong: int) -> None:
    """Texts are those without guesses, and so are those of prompts that go on behind them."""
    network, runner = opened(name, slots=1)

    def ask(proposer: Oracle | None, prompt: list[int], ends: frozenset[int]) -> ScheduledSequence:
        guessing = SpeculatingRunner(runner, proposer)
        asked = ScheduledSequence([*prompt], Sampling(temperature=0), 20, ends, Ear(99))
        scheduler = Scheduler(guessing, store, SchedulerObserver(), 9)
        scheduler.submit([asked])
        scheduler.stop_when_idle()
        scheduler.run()
        assert scheduler.failure is None
        return asked

    prompt, none = list(PROMPT[:70]), frozenset[int]()
    store = make_page_store(runner, network)
    alone = ask(None, prompt, none)
    # One ends behind its last token, the others within what was guessed and computed already.
    for ends in (none, *(frozenset({alone.ids[70 + at]}) for at in (3, 8, 13))):
        store = make_page_store(runner, network)
        said = ask(Oracle(alone.ids, wrong), prompt, ends)
        assert said.ids == alone.ids[: len(said.ids)]
        if not ends:
            assert len(said.ids) == 90 and said.n_right > 0
            assert (said.n_right < said.n_guessed) == (wrong < 99)
        longer = [*said.ids, 7, 8, 9]
        on = ask(None, longer, none)
        assert on.n_cached >= 64
        store = make_page_store(runner, network)
        assert on.ids == ask(None, longer, none).ids


def test_who_cannot_go_back_is_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    network, runner = opened("lfm2")
    network.gguf.metadata.add_lazily("tokenizer.ggml.tokens", lambda: ["a", "b"])
    description = ModelDescription(network, tokenizer("gpt-2"), None)
    monkeypatch.setattr(ModelDescription, "read", lambda *given: description)
    with pytest.raises(BadInput, match=r"m\.gguf: lfm2 has recurrent states, .* a draft model has"):
        load_draft_proposer(description, "m.gguf", "CPU")
    plan = plan_network(network, "CPU")
    require_takes_guesses(runner, plan, "--lookup")
    monkeypatch.setattr(runner, "most_verified_tokens", 1)
    with pytest.raises(BadInput, match="--lookup: the cpu path on CPU takes one token at a time"):
        require_takes_guesses(runner, plan, "--lookup")


def test_a_state_goes_back_to_a_copy_alone(opened: Open) -> None:
    path = opened("lfm2")[1].path
    path.prefill(PROMPT[:9], 0)
    with pytest.raises(BadInput, match="lfm2 cannot go back to position 5"):
        path.prefill(PROMPT[5:9], 5)


def test_the_gpu_says_what_is_not_fused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orinllm.gpu.path_plan.reason_unsupported", lambda device: None)
    monkeypatch.setattr("orinllm.gpu.kernels.gemv.fits_shared_memory", lambda *matrix: True)
    for name, what, why in (
        ("qwen35", "recurrent layer", "heads of 16 dimensions; a multiple of 32 up to 128"),
        ("nemotron_h", "recurrent layer", "states of 24; a multiple of 16 up to 256"),
        ("lfm2", "attention", "head dimension 16 is none of 32, 64"),
        ("gemma4", "attention", "head dimension 16 is none of 32, 64"),
    ):
        network = opened(name)[0]
        plan = plan_network(network, "NULL")
        assert plan.obstacles[what].startswith(why) and not plan.is_fused
        if name != "qwen35":  # which tinygrad.llm knows
            with pytest.raises(BadInput, match="--device CPU runs it"):
                make_runner(network, plan)
