"""A file's block that proposes tokens (MTP): what it says, and texts that stay the same.

The golden numbers are llama.cpp 0.5.0's (graph_mtp, fed as common/speculative.cpp does, keys and
values of 32 bits), of the greedy tokens behind the first 70 of the prompt.
"""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.batching.running import Ear, ear
from tests.engine.conftest import Load
from tests.engine.models import tokenizer
from tests.engine.network import hybrid_models
from tests.engine.network.hybrid_models import CONTEXT, MODELS, PROMPT

from orinbench.check.reference import Reference
from orinbench.check.reference_rope import layer_rope_frequencies
from orinbench.model import open_model
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import MtpProposer, Proposer
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.choose.sampling import Floats, Sampling, sample_token
from orinllm.cpu.executor import CpuRunner
from orinllm.cpu.mtp_block import CpuMtpBlock
from orinllm.errors import BadInput
from orinllm.gpu.kernels.buffers import PAGE, pages_for_tokens
from orinllm.gpu.mtp_block import FusedMtpBlock
from orinllm.gpu.path_plan import cache_bytes
from orinllm.loader import MTP, Network, SharingOptions, make_page_store, make_runner, plan_network
from orinllm.model import Generation, Model, ModelDescription
from orinllm.server.engine import _affordable_pages
from orinllm.server.options import EngineOptions

TEXT = list(PROMPT[:70])
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.4, seed=5)
# By model: the first four logits of each of three tokens, and the tokens.
GOLDEN: dict[str, tuple[list[list[float]], list[int]]] = {
    "qwen35": (
        [
            [0.425794, -0.247702, 1.366857, -0.82859],
            [-1.023646, -1.13484, 0.389571, -0.131654],
            [-0.523122, -0.175839, -0.356915, -1.267063],
        ],
        [48, 36, 51],
    ),
    "qwen35moe": (
        [
            [1.5086, 0.661731, -0.874119, -1.672336],
            [-1.438246, -0.979485, -0.438579, 0.595771],
            [-1.866712, 0.51413, 0.747654, 1.66204],
        ],
        [57, 52, 56],
    ),
}
Values = dict[str, NDArray[np.float32]]
pytestmark = pytest.mark.usefixtures("compiler")


def opened(path: Path, slots: int = 2) -> tuple[Network, CpuRunner, CpuMtpBlock]:
    network = Network.read(path, CONTEXT)
    runner = make_runner(network, plan_network(network, "CPU"), share=SharingOptions(slots, 99))
    assert isinstance(runner, CpuRunner) and runner.slots == slots
    config = network.require_mtp_block_config()
    return network, runner, CpuMtpBlock(runner.path, network.gguf, config)


class BlockReference(Reference):
    """The float64 reference with the block behind its layers."""

    def proposals(self, text: list[int], most: int) -> NDArray[np.float64]:
        """Return the logits of the greedy tokens behind a text: (most, vocabulary)."""
        model, at, found = self.model, self.model.n_layers, []
        self._rotations.append(
            layer_rope_frequencies(model, at, self._vector, model.context_length)
        )
        left, name = self.hidden_states(text)[:-1], f"blk.{at}.nextn."

        def own(tensor: str, *others: str) -> str:
            names = (f"{name}{tensor}", *others)
            return next(one for one in names if f"{one}.weight" in model.tensors)

        for _ in range(most):
            table = f"{own('embed_tokens', 'token_embd')}.weight"
            rows = self._tensor_rows(table, np.asarray(text[1:]))
            parts = self._norm(rows, f"{name}enorm.weight"), self._norm(left, f"{name}hnorm.weight")
            x = self._run_layer(at, self.linear(np.concatenate(parts, axis=-1), f"{name}eh_proj"))
            last = self._norm(x, f"{own('shared_head_norm', 'output_norm')}.weight")[-1:]
            found.append(self.linear(last, own("shared_head_head", "output", "token_embd"))[0])
            text, left = [*text, int(found[-1].argmax())], np.concatenate((left, last))
        return np.array(found)


@pytest.mark.parametrize("name", GOLDEN)
def test_it_says_what_llama_cpp_and_the_reference_say(tmp_path: Path, name: str) -> None:
    hybrid_models.write(tmp_path / "m.gguf", name, mtp=True)
    want = BlockReference(open_model(tmp_path / "m.gguf")).proposals(TEXT, 3)
    golden, tokens = GOLDEN[name]
    assert np.abs(want[:, :4] - golden).max() < 1e-5 and want.argmax(1).tolist() == tokens
    _, runner, block = opened(tmp_path / "m.gguf")
    path, said = runner.path, list[NDArray[np.float32]]()

    def choose(logits: NDArray[np.float32], position: int) -> int:
        said.append(logits)
        assert position == 69 + len(said)
        return int(logits.argmax())

    for cuts in ([69], [1, 2, 34, 69]):
        for start, end in zip([0, *cuts], cuts, strict=False):
            path.fill_cache(TEXT[start:end], start, slot=1)
            path.fill_cache(TEXT[5:30], 0, slot=0)
        said.clear()
        assert block.propose_tokens(TEXT, 0, [pages_for_tokens(CONTEXT)], 3, choose) == tokens
        error = np.array(said, np.float64) - want
        assert np.sqrt((error**2).mean()) < 4e-4 * want.std()


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (("embed_tokens", "shared_head_head"), ("blk.2.nextn.shared_head_norm.weight",)),
        (("embed_tokens",), ("output.weight",)),
        (("shared_head_head",), ("output.weight",)),
    ],
)
def test_what_it_has_not_is_the_models(
    tmp_path: Path, more: tuple[str, ...], less: tuple[str, ...]
) -> None:
    """Embedding, last norm and head; a head that the model has not is its embedding."""
    given = hybrid_models.tensors("qwen35", mtp=True)
    for at, name in enumerate(more):
        given[f"blk.2.nextn.{name}.weight"] = np.roll(given["token_embd.weight"], at + 1, axis=0)
    with pytest.MonkeyPatch.context() as patch:
        left = {name: values for name, values in given.items() if name not in less}
        patch.setattr(hybrid_models, "tensors", lambda *more: left)
        hybrid_models.write(tmp_path / "m.gguf", "qwen35", mtp=True)
    want = BlockReference(open_model(tmp_path / "m.gguf")).proposals(TEXT[:20], 2)
    _, runner, block = opened(tmp_path / "m.gguf")
    runner.path.fill_cache(TEXT[:19], 0)
    said = list[NDArray[np.float32]]()

    def choose(logits: NDArray[np.float32], position: int) -> int:
        said.append(logits)
        return int(logits.argmax())

    block.propose_tokens(TEXT[:20], 0, [0], 2, choose)
    assert np.abs(np.array(said) - want).max() < 2e-3


def write_apt(path: Path, quant: str | None = None) -> Path:
    """Write a model whose next token is nearly its last one's, which its block nearly knows."""
    real = hybrid_models.tensors

    def tensors(name: str, wider: bool = False, mtp: bool = False) -> Values:
        found = real(name, wider, mtp)
        for tensor, values in found.items():
            if tensor.endswith(("output.weight", "ssm_out.weight", "ffn_down.weight")):
                values *= np.float32(1 if tensor == "output.weight" else 0.25)
        found["token_embd.weight"] *= np.float32(8)
        joined = found["blk.2.nextn.eh_proj.weight"] / np.float32(16)
        joined[:, : len(joined)] += np.eye(len(joined), dtype=np.float32)
        return found | {"blk.2.nextn.eh_proj.weight": joined}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_models, "tensors", tensors)
        hybrid_models.write(path, "qwen35", quant, mtp=True)
    return path


@pytest.fixture(scope="module")
def apt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_apt(tmp_path_factory.mktemp("apt") / "m.gguf")


def test_texts_are_those_without(apt: Path) -> None:
    """Alone, beside others that come and go in its slot and the other, and behind itself."""
    network, runner, block = opened(apt)

    def ask(proposer: Proposer | None, how: Sampling) -> list[ScheduledSequence]:
        prompts = [[*TEXT], [*TEXT[:64], 9, 8, 7], [*TEXT[3:40]], [*TEXT[:30]], [5]]
        store = make_page_store(runner, network)
        guessing = SpeculatingRunner(runner, proposer)
        scheduler = Scheduler(guessing, store, SchedulerObserver(), 99)
        worker = threading.Thread(target=scheduler.run)
        worker.start()
        asked = list[ScheduledSequence]()
        try:
            for wave in ([0], [1, 2], [3, 0, 4], [1], [0]):  # a wave begins when the last has ended
                new = [
                    ScheduledSequence(
                        [*prompts[at]], how, 90 - 20 * i, frozenset(), Ear(60 - 13 * i)
                    )
                    for i, at in enumerate(wave)
                ]
                scheduler.submit(new)
                assert all(ear(one).done.wait(30) for one in new)
                prompts[wave[0]] = [*new[0].ids[: new[0].n_prompt + 9]]  # a chat goes on
                asked += new
        finally:
            scheduler.stop_when_idle()
            worker.join(30)
        assert scheduler.failure is None
        return asked

    for how in (GREEDY, DRAWN):
        alone = ask(None, how)
        guessed = ask(MtpProposer(block), how)
        heard = [[ear(one).heard for one in asked] for asked in (alone, guessed)]
        assert heard[0] == heard[1]
        assert any(one.n_cached for one in guessed)
        # In either slot: what one has read of another's is right by chance alone.
        assert all(one.n_right > 0.04 * one.n_guessed for one in guessed if one.n_guessed > 30)
        right, all_ = (sum(getattr(one, n) for one in guessed) for n in ("n_right", "n_guessed"))
        assert 0.1 * all_ < right < 0.9 * all_


def test_it_reads_again_what_changed_in_a_slot(apt: Path) -> None:
    """Whatever a slot had before, a text's proposals are those of a block that reads all of it."""
    _, runner, block = opened(apt)
    rng, each = np.random.default_rng(4), pages_for_tokens(CONTEXT)
    used, texts, said = MtpProposer(block), [list[int](), list[int]()], [list[int](), list[int]()]
    pages, read = [range(each), range(each, 2 * each)], list[int]()
    real = block._append_with_states

    def go(tokens: list[int], *rest: object, **more: object) -> None:
        read.append(len(tokens))
        real(tokens, *rest, **more)  # type: ignore[arg-type]

    block._append_with_states = go  # type: ignore[assignment,method-assign]
    for _ in range(60):
        slot = int(rng.integers(2))
        kept = int(rng.integers(len(texts[slot]) + 1))
        longer = rng.integers(0, 64, rng.integers(1, 50)).tolist()
        if rng.random() < 0.5:  # what was proposed, which it read behind its own states
            kept, longer = len(texts[slot]), [*said[slot], *longer]
        text = texts[slot] = [*texts[slot][:kept], *longer][:250]
        runner.path.fill_cache(text, 0, slot)  # what the last token leaves, too: it is never read
        read.clear()
        how = Sampling(temperature=0.4, seed=len(text))
        said[slot] = used.guess_tokens(text, 3, pages[slot], how)
        if len(text) < 2:
            assert said[slot] == []
            continue
        assert sum(read[:-2]) <= max(1, len(text) - kept)
        assert used.guess_tokens(text, 3, pages[slot], how) == said[slot]

        def draw(logits: Floats, at: int, how: Sampling = how) -> int:
            return sample_token(logits, how, (), at)

        assert block.propose_tokens(text, 0, pages[slot], 3, draw) == said[slot]


def test_it_reads_again_what_lies_in_other_pages() -> None:
    """On a GPU texts share pages, and get others."""
    starts = list[int]()

    class Noting:
        def cache_slot_of_pages(self, pages: list[int]) -> int:
            return 0

        def propose_tokens(self, text: list[int], start: int, *more: object) -> list[int]:
            starts.append(start)
            return [1]

    block, text = MtpProposer(cast("FusedMtpBlock", Noting())), [*range(3, 153)]
    for given, pages in ((text, [4, 5, 6]), ([*text, 7], [4, 5, 6]), ([*text, 7], [4, 9, 6])):
        block.guess_tokens(given, 3, pages)
    assert starts == [0, 149, PAGE]


def test_it_reads_a_long_text_between_tokens(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part at a time, since nobody can cancel that; it proposes once it has read all."""
    _, runner, block = opened(apt)
    runner.path.fill_cache(TEXT, 0)
    pages = range(pages_for_tokens(CONTEXT))
    whole = MtpProposer(block).guess_tokens(TEXT, 3, pages)
    monkeypatch.setattr("orinllm.batching.proposers._READ_AT_ONCE", 30)
    slowly = MtpProposer(block)
    said = [slowly.guess_tokens(TEXT[:end], 3, pages) for end in (68, 69, 70)]
    assert said == [[], [], whole] and len(whole) == 3


def test_it_sees_no_pictures_and_proposes_no_numbers(apt: Path) -> None:
    _, runner, block = opened(apt)
    mtp = MtpProposer(block)
    assert mtp.guess_tokens([3, -5, 4], 3, [0]) == [] == mtp.guess_tokens([3], 3, [0])
    runner.path.fill_cache(TEXT, 0)
    assert len(mtp.guess_tokens(TEXT, 2, [0])) == 2
    block._norms[0] = np.full_like(block._norms[0], np.nan)
    assert mtp.guess_tokens([*TEXT[:40], 1], 3, [0]) == []


def test_a_model_asks_its_own_block(apt: Path) -> None:
    network, runner, _ = opened(apt)
    description = ModelDescription(network, tokenizer("gpt-2"), None)
    model = Model(
        description, plan_network(network, "CPU"), runner, make_page_store(runner, network)
    )
    alone = model.generate(TEXT, GREEDY, max_tokens=20)
    text = alone.text
    model.speculate(model.load_proposer(MTP))
    guessed = model.generate(TEXT, GREEDY, max_tokens=20)
    assert (guessed.text, guessed.tokens) == (text, alone.tokens)
    assert alone.n_proposed == 0 < guessed.n_accepted
    model.close()


def test_a_block_in_a_file_of_its_own(apt: Path, tmp_path: Path) -> None:
    """As convert_hf_to_gguf.py --mtp writes it: with the model's embedding, head and last norm."""
    network, runner, own = opened(apt)
    runner.path.fill_cache(TEXT, 0)
    architecture, keys, _ = MODELS["qwen35"]
    said = []
    for layers in (2, 1):  # those of the model, and of another one
        tensors = {
            name.replace("blk.2", f"blk.{layers}"): network.gguf.f32_or_f16_tensor(name).reshape(
                tensor.shape
            )
            for name, tensor in network.gguf.tensors.items()
            if not name.startswith(("blk.0", "blk.1"))
        }
        with pytest.MonkeyPatch.context() as patch:
            model: tuple[str, hybrid_models.Keys, list[hybrid_models.Shapes]] = (
                architecture,
                {**keys, "nextn_predict_layers": 1},
                [{}] * (layers + 1),
            )
            patch.setitem(MODELS, "qwen35", model)
            patch.setattr(hybrid_models, "tensors", lambda *more: tensors)  # noqa: B023
            hybrid_models.write(tmp_path / "mtp.gguf", "qwen35")
        file = network.mtp_block_file(tmp_path / "mtp.gguf")
        assert file is not None and file is not network.gguf
        if layers == 2:
            block = CpuMtpBlock(runner.path, file, network.require_mtp_block_config(file))
            said = [MtpProposer(each).guess_tokens(TEXT, 3, [0]) for each in (own, block)]
            assert said[0] == said[1] != []
        else:
            with pytest.raises(
                BadInput, match=r"mtp\.gguf: its block is not of .*m\.gguf: another nu"
            ):
                network.require_mtp_block_config(file)
    assert network.mtp_block_file(apt) is None is network.mtp_block_file(None)
    assert network.mtp_block_file(MTP) is network.gguf


Change = Callable[[dict[str, object], Values], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda keys, t: keys.update(nextn_predict_layers=2), ".* is 2: one block that proposes"),
        (lambda keys, t: t.pop("blk.2.nextn.hnorm.weight"), "tensor blk.2.nextn.hnorm.weight is m"),
        (lambda keys, t: t.pop("blk.2.nextn.eh_proj.weight"), "tensor blk.2.nextn.eh_proj.weight"),
        (lambda keys, t: t.pop("blk.2.attn_q.weight"), "tensor blk.2.attn_q.weight is missing"),
        (
            lambda keys, t: t.update({"blk.2.nextn.eh_proj.weight": t["blk.1.ffn_down.weight"]}),
            r"tensor blk.2.nextn.eh_proj.weight has the shape \(64, 96\)",
        ),
        (
            lambda keys, t: t.update({"blk.2.nextn.more.weight": t["output_norm.weight"]}),
            "tensor blk.2.nextn.more.weight is not part of",
        ),
    ],
)
def test_a_block_that_is_not_what_is_known(tmp_path: Path, change: Change, why: str) -> None:
    architecture, keys, layers = MODELS["qwen35"]
    values = hybrid_models.tensors("qwen35", mtp=True)
    given: dict[str, object] = {**keys, "nextn_predict_layers": 1}
    change(given, values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "qwen35", (architecture, given, [*layers, {}]))
        patch.setattr(hybrid_models, "tensors", lambda *more: values)
        hybrid_models.write(tmp_path / "m.gguf", "qwen35")
    with pytest.raises(BadInput, match=rf"m\.gguf: {why}"):
        network = Network.read(tmp_path / "m.gguf")
        network.require_mtp_block_config()


def test_a_gpus_block_says_what_the_reference_says(emulated: Load, tmp_path: Path) -> None:
    """Behind tokens of all kinds of launches, in pages in any order, and again."""
    hybrid_models.write(tmp_path / "m.gguf", "qwen35moe", "F16", mtp=True)
    text, network = TEXT[:20], Network.read(tmp_path / "m.gguf", 64)
    want = BlockReference(open_model(tmp_path / "m.gguf")).proposals(text, 2)
    executor, said = emulated(tmp_path / "m.gguf", 64, pages=3), list[NDArray[np.float32]]()
    block = FusedMtpBlock(executor, network, network.gguf, network.require_mtp_block_config())
    executor.set_pages([2], 1)
    executor.fill_cache(text, 0, 9)
    executor.fill_cache(text, 9, 10)
    executor.tokens_after_each([*text[10:12], 1, 1], 10)
    executor.set_states_after_accepted(2)
    batch = executor.find_or_make_decoder(4)
    batch.set_pages([[], [], [2], []], [0, 2, 1, 3])
    for at in (12, 13):
        batch.start_step([1, 1, text[at], 1], [-1, -1, at, -1])
    executor.set_pages([2], 1)
    executor.start_prefill_and_first_token(text[:19], 14)

    def choose(logits: NDArray[np.float32], position: int) -> int:
        said.append(logits)
        return int(logits.argmax()) if position == 19 + len(said) else -1

    for start in (0, 18):
        assert block.propose_tokens(text, start, [2], 2, choose) == want.argmax(1).tolist()
        off = np.linalg.norm(np.array(said) - want, axis=1) / np.linalg.norm(want, axis=1)
        assert off.max() < 0.003
        said.clear()


def test_a_gpus_texts_are_those_without(emulated: Load, tmp_path: Path) -> None:
    path = write_apt(tmp_path / "m.gguf", "F16")
    network, executor = Network.read(path, 128), emulated(path, 128, slots=(1, 1))
    runner = FusedRunner(executor, 1)
    description = ModelDescription(network, tokenizer("gpt-2"), None)
    model = Model(
        description, plan_network(network, "EMU"), runner, make_page_store(runner, network)
    )

    def ask(how: Sampling) -> Generation:
        said = model.generate(TEXT[:20], how, max_tokens=9)
        assert said.text is not None
        return said

    cold = Sampling(temperature=0.05, seed=5)
    alone = [ask(how) for how in (GREEDY, cold)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orinllm.gpu.mtp_block.free_memory_bytes", lambda device: 10_000)
        with pytest.raises(BadInput, match=r"m\.gguf: a block of .* do not fit the 0\.0 GB that"):
            model.load_proposer(MTP)
    model.speculate(model.load_proposer(MTP))  # what was read before is read again, for it
    for how, one in zip((GREEDY, cold), alone, strict=True):
        guessed = ask(how)
        assert guessed.tokens == one.tokens and guessed.n_accepted > 2
    grows = model.generate(TEXT[:20], GREEDY, max_tokens=90)
    with pytest.raises(BadInput, match="mtp: a block is loaded while no answer grows"):
        model.load_proposer(MTP)
    grows.cancel()
    model.close()


def test_its_memory_is_counted(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, runner, _ = opened(apt)
    # Of two slots' 256 tokens: 128 keys and values in a layer and in the block, 64 floats between
    # them. This file's weights are floats, which are held as 16-bit ones: block, embedding, head.
    shapes = hybrid_models.block("qwen35").values()
    wanted = 2 * CONTEXT * (2 * 256 + 4 * 64) + 2 * (sum(map(math.prod, shapes)) + 2 * 64 * 64)
    monkeypatch.setattr("orinllm.cpu.executor.os.sysconf", lambda name: 1)
    for free in (wanted - 2, wanted - 1):
        monkeypatch.setattr("orinllm.cpu.executor._reclaimable_bytes", lambda free=free: free)
        if free + 1 == wanted:
            CpuMtpBlock(runner.path, network.gguf, network.require_mtp_block_config())
        else:
            with pytest.raises(BadInput, match=r"free memory; 255 tokens of context would"):
                CpuMtpBlock(runner.path, network.gguf, network.require_mtp_block_config())


def test_a_server_leaves_its_room(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network.read(apt, CONTEXT)
    plan = plan_network(network, "CPU")
    pages = []
    for block in (None, (network.gguf, network.require_mtp_block_config())):
        # Of a token 128 elements are kept, and 128 and 64 floats beside: a third of it fits.
        free = plan.weight_bytes + 16 * cache_bytes(plan, PAGE)
        monkeypatch.setattr("orinllm.server.engine.free_memory_bytes", lambda device: free)  # noqa: B023
        pages.append(_affordable_pages(EngineOptions(apt, memory=1.0), plan, network, block))
    assert pages == [16, 5]
