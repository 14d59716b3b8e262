"""Tiny models that see, against what `transformers` makes of the same weights (record.py)."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conftest import load_emulated
from tests.engine.vision import tiny

from orinllm.batching.cache import SharedPageStore
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import LookupProposer
from orinllm.choose.sampling import Sampling
from orinllm.cpu.picture_encoder import CpuPictureEncoder
from orinllm.errors import BadInput
from orinllm.loader import Network, make_page_store, plan_network
from orinllm.mmproj import PictureEncoder, network_for_pictures, read_mmproj
from orinllm.model import AnswerToken, Model, ModelDescription

GREEDY = Sampling(temperature=0)
KINDS = tiny.KINDS
RECORDED = np.load(Path(__file__).with_name("recorded.npz"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and their projectors with old and new names of matrices."""
    folder = tmp_path_factory.mktemp("vision")
    for kind in KINDS:
        tiny.write_text(folder / f"{kind}.gguf", kind)
        tiny.write_mmproj(folder / f"mmproj-{kind}.gguf", kind)
        tiny.write_mmproj(folder / f"mmproj-{kind}-old.gguf", kind, old_names=True)
    return folder


def load(files: Path, kind: str, device: str = "CPU") -> Model:
    return Model.load(files / f"{kind}.gguf", device=device, mmproj=files / f"mmproj-{kind}.gguf")


def tokens_of(answer: Iterable[AnswerToken]) -> list[int]:
    """Those of an answer; a piece without one is the end of its text."""
    return [piece.token for piece in answer if piece.token >= 0]


def sight_of(model: Model) -> PictureEncoder:
    assert model.template is not None and model.template.picture_encoder is not None
    return model.template.picture_encoder


def ids_of(encoder: PictureEncoder, kind: str) -> list[int]:
    """The prompt of the record, with rows of its pictures."""
    seen = [encoder.prepare_picture(picture) for picture in tiny.pictures(kind)]
    found: list[int] = []
    for part in tiny.prompt(kind):
        if isinstance(part, int):
            found.append(part)
        else:
            picture, tile = part
            n = tiny.rows(kind)[picture]
            found += seen[picture].ids[tile * n : (tile + 1) * n]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_stand_in_the_place_of_a_picture(files: Path, kind: str) -> None:
    """Instead of the template's token, as `transformers` expands it; Gemma's stays before them."""
    model, photo = load(files, kind), tiny.pictures(kind)[0]
    encoder = sight_of(model)
    parts = [{"type": "image", "image": photo}, {"type": "text", "text": "What?"}]
    assert model.template is not None
    ids = model.template.encode([{"role": "user", "content": parts}])
    assert [i for i in ids if i < 0] == list(encoder.prepare_picture(photo).ids)
    slot = tiny.tokens(kind).index(encoder.projector.slot)
    assert ids.count(slot) == (1 if kind == "gemma3" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_first_logits_and_tokens_are_those_of_transformers(files: Path, kind: str) -> None:
    model = load(files, kind)
    ids = ids_of(sight_of(model), kind)
    answer = model.generate(ids, GREEDY, max_tokens=1)
    assert [piece.token for piece in answer][:1] == [RECORDED[f"{kind}.tokens"][0]]
    logits = model.runner.last_logits()[0]
    wanted = RECORDED[f"{kind}.logits"]
    assert np.abs(logits - wanted).max() < 0.001 * np.abs(wanted).max()
    answer = model.generate(ids, GREEDY, max_tokens=24)
    assert tokens_of(answer) == list(RECORDED[f"{kind}.tokens"])
    assert answer.n_cached == len(ids) - 1


def test_a_model_of_experts_that_are_alike_says_what_the_dense_one_says(files: Path) -> None:
    """Qwen3-VL's mixture: what `transformers` made of the dense model judges it."""
    tiny.write_text(files / "moe.gguf", "qwen3vl", experts=4)
    model = Model.load(files / "moe.gguf", device="CPU", mmproj=files / "mmproj-qwen3vl.gguf")
    assert model.description.network.config.architecture == "qwen3vlmoe"
    answer = model.generate(ids_of(sight_of(model), "qwen3vl"), GREEDY, max_tokens=1)
    assert tokens_of(answer) == [RECORDED["qwen3vl.tokens"][0]]
    logits, wanted = model.runner.last_logits()[0], RECORDED["qwen3vl.logits"]
    assert np.abs(logits - wanted).max() < 0.001 * np.abs(wanted).max()


def test_a_part_without_its_picture_is_one_line(files: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(BadInput, match="a picture is NoneType of object"):
        load(files, "gemma3").generate(messages)


def test_an_encoder_that_makes_no_numbers_is_named(files: Path, tmp_path: Path) -> None:
    """The text of the same model goes on."""
    data = bytearray((files / "mmproj-gemma3.gguf").read_bytes())
    bias = read_mmproj(files / "mmproj-gemma3.gguf")[0].tensor_bytes("v.post_ln.bias").tobytes()
    at = data.index(bias)
    data[at : at + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "mmproj.gguf").write_bytes(data)
    model = Model.load(files / "gemma3.gguf", device="CPU", mmproj=tmp_path / "mmproj.gguf")
    with pytest.raises(BadInput, match=r"mmproj\.gguf: its rows of a picture are no numbers"):
        tokens_of(model.generate(ids_of(sight_of(model), "gemma3"), GREEDY, max_tokens=1))
    assert tokens_of(model.generate([5, 6], GREEDY, max_tokens=2))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_transformers(files: Path, kind: str) -> None:
    """Of a file with the names of today, and of one with an older converter's names."""
    model, wanted = load(files, kind), RECORDED[f"{kind}.rows"]
    encoder = sight_of(model)
    tiles = [tile for picture in tiny.pictures(kind) for tile in encoder._image_tiles(picture)[0]]
    assert np.abs(encoder.encode(tiles) - wanted).max() < 1e-4
    old, projector = read_mmproj(files / f"mmproj-{kind}-old.gguf")
    assert np.abs(CpuPictureEncoder(old, projector.encoder)(tiles) - wanted).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernels_see_what_the_cpu_sees(
    files: Path, kind: str, emulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that would cut pictures, from the start and behind what is known."""
    monkeypatch.setattr("orinllm.gpu.fused_executor.CHUNK", 40)
    network = network_for_pictures(
        Network.read(files / f"{kind}.gguf"), files / f"mmproj-{kind}.gguf"
    )
    description, plan = ModelDescription.from_network(network), plan_network(network, "EMU")
    assert plan.is_fused, plan.obstacles
    executor = load_emulated(network.gguf.path, network.context)
    runner = FusedRunner(executor, 2)
    encoder = PictureEncoder.read(files / f"mmproj-{kind}.gguf", network, "CPU")
    model = Model(description, plan, runner, make_page_store(runner, network))
    ids, wanted = ids_of(encoder, kind), RECORDED[f"{kind}.logits"]
    for behind in (0, 64):
        answer = model.generate(ids, GREEDY, max_tokens=4)
        assert tokens_of(answer) == list(RECORDED[f"{kind}.tokens"][:4]), behind
        assert answer.n_cached >= behind
    executor.set_pages(range(len(ids) // 64 + 2))
    executor.start_prefill_and_first_token(ids, 0)
    assert np.abs(executor.wait_for_logits() - wanted).max() < 0.002 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", tiny.QWENS)
def test_guesses_behind_a_picture_are_turned_as_the_tokens_are(files: Path, kind: str) -> None:
    model = load(files, kind)
    model.speculate(LookupProposer())
    answer = model.generate(ids_of(sight_of(model), kind), GREEDY, max_tokens=24)
    assert tokens_of(answer) == list(RECORDED[f"{kind}.tokens"])
    assert answer.n_proposed > 0


def test_answers_that_share_few_pages_are_those_of_each_alone(
    files: Path, emulation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two with pictures on the fused kernels, of which one is preempted; alone is the CPU's path.

    Behind their pictures tokens of the two are turned by positions of different distances.
    """
    kind, alone = "qwen3vl", load(files, "qwen3vl")
    network = alone.description.network
    runner = FusedRunner(load_emulated(network.gguf.path, network.context), 2)
    model = Model(alone.description, plan_network(network, "EMU"), runner, SharedPageStore(3))
    preempted: list[int] = []
    monkeypatch.setattr(model._scheduler._watch, "on_preemption", lambda: preempted.append(1))
    ids = ids_of(sight_of(alone), kind)
    prompts = [ids[:46] + ids[:9], [40, 41, 42, *ids[46:94]]]
    wanted = [tokens_of(alone.generate(prompt, GREEDY, max_tokens=24)) for prompt in prompts]
    answers = [model.generate(prompt, GREEDY, max_tokens=24) for prompt in prompts]
    assert [tokens_of(answer) for answer in answers] == wanted
    assert preempted
    # A text behind them is turned by its places again.
    text = list(range(60, 72))
    wanted = [tokens_of(each.generate(text, GREEDY, max_tokens=8)) for each in (model, alone)]
    assert wanted[0] == wanted[1]
    logits = [each.runner.last_logits()[0] for each in (model, alone)]
    assert np.abs(logits[0] - logits[1]).max() < 0.002 * np.abs(logits[1]).max()
