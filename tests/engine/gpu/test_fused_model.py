"""Answers of a model on the fused kernels: what is kept, where they end, which path is taken."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tests.engine.conftest import Load, Synthetic
from tests.engine.models import tokenizer
from tinygrad import Device
from tinygrad.device import Buffer

from orinllm.batching.fused_runner import FusedRunner
from orinllm.choose.sampling import Sampling, sample_token
from orinllm.errors import BadInput, DeviceFault
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.kernels.buffers import F16, Q8_0
from orinllm.gpu.memory import ModelMemory
from orinllm.gpu.path_plan import make_path_plan
from orinllm.gpu.weights import Weights
from orinllm.loader import Network, make_page_store, make_runner, plan_network
from orinllm.model import Model, ModelDescription
from orinllm.network.layer import Attend, Layer

PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]


def model(path: Path, executor: FusedExecutor, context: int) -> Model:
    """A model whose file has no words: those of another vocabulary stand for them."""
    network = Network.read(path, context)
    plan = plan_network(network, "EMU")
    assert plan.is_fused
    runner = FusedRunner(executor, 2)
    description = ModelDescription(network, tokenizer("gpt-2"), None)
    return Model(description, plan, runner, make_page_store(runner, network))


def arrived(network: Network) -> Weights:
    """A file's weights on the emulated GPU."""
    weights = Weights(network.gguf, network.config, "EMU")
    with weights.upload_meanwhile():
        pass
    return weights


def content(buffer: Buffer) -> bytes:
    return bytes(buffer.copyout(memoryview(bytearray(buffer.nbytes))))


def tokens(model: Model, prompt: list[int], n: int | None = None, **sampling: float) -> list[int]:
    answer = model.generate(prompt, Sampling(**sampling), max_tokens=n)  # type: ignore[arg-type]
    return [piece.token for piece in answer if piece.token >= 0]


def test_a_piece_of_the_weights_is_waited_for_before_the_next(
    emulation: None, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's copies keep pinned memory until somebody waits: as much as the model, otherwise."""
    network, events = Network.read(synthetic("tiny", "Q8_0")), list[str]()
    gguf, config, copyin = network.gguf, network.config, Buffer.copyin

    def copy(self: Buffer, source: memoryview) -> Buffer:
        events.append("copy")
        return copyin(self, source)

    monkeypatch.setattr("orinllm.gpu.weights._PIECE", gguf.n_tensor_bytes // 3)
    monkeypatch.setattr(Buffer, "copyin", copy)
    monkeypatch.setattr(Device["EMU"], "synchronize", lambda: events.append("wait"))
    weights = arrived(network)
    assert len(events) >= 6 and events == ["copy", "wait"] * (len(events) // 2)
    assert (
        content(weights.matrix("token_embd").buffer)
        == gguf.tensor_bytes(config.rows_of_matrix("token_embd").tensor).tobytes()
    )


def test_blocks_that_are_not_computed_take_no_memory(
    emulation: None, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model with and without a block that proposes tokens."""
    monkeypatch.setattr("orinllm.gpu.weights._GAP", 1 << 10)
    taken, bytes_ = list[int](), list[list[int]]()
    for shape in ("tiny-qwen35", "tiny-qwen35-mtp"):
        network = Network.read(synthetic(shape, "Q6_K"))
        gguf, config = network.gguf, network.config
        weights = arrived(network)
        taken.append(sum(part.buffer.nbytes for part in weights._parts))
        bytes_.append(
            [make_path_plan(gguf, config, device).weight_bytes for device in ("EMU", "CPU")]
        )
    assert bytes_[0] == bytes_[1] and abs(taken[0] - taken[1]) < 8 << 10 < gguf.n_tensor_bytes // 8
    for name in ("token_embd", "blk.3.ffn_down"):
        assert content(weights.matrix(name).buffer) == gguf.tensor_bytes(f"{name}.weight").tobytes()


def test_small_matrices_of_floats_are_cut_like_others(
    emulation: None, synthetic: Synthetic
) -> None:
    """Phi-3 keeps q, k and v in one tensor; an H200 wrote past the parts that were all of it."""
    network = Network.read(synthetic("tiny-phi3", "F32"))
    gguf, whole = network.gguf, "blk.0.attn_qkv.weight"
    weights = arrived(network)
    parts = [weights.matrix(f"blk.0.attn_{name}") for name in "qkv"]
    assert sum(part.rows for part in parts) == gguf.tensors[whole].shape[0]
    halves = gguf.f32_or_f16_tensor(whole).astype(np.float16).tobytes()
    assert b"".join(content(part.buffer) for part in parts) == halves


def test_weights_lie_in_parts_that_a_full_board_grants(
    emulation: None, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Jetson whose memory is full of files refuses one buffer of all weights."""
    network, allocate, most = Network.read(synthetic("tiny", "Q6_K")), Buffer.allocate, 300_000
    gguf, sizes = network.gguf, list[int]()

    def allocated(self: Buffer) -> Buffer:
        sizes.append(self.nbytes)
        return allocate(self)

    monkeypatch.setattr("orinllm.gpu.weights._PART", most)
    monkeypatch.setattr(Buffer, "allocate", allocated)
    weights = arrived(network)
    largest = max(tensor.n_bytes for tensor in gguf.tensors.values())
    assert 4 < len(sizes) < len(gguf.tensors) and max(sizes) < max(most, largest) + 256
    for name, tensor in gguf.tensors.items():
        vector = len(tensor.shape) == 1
        found = weights.vector(name) if vector else weights.matrix(name[: -len(".weight")]).buffer
        assert content(found) == gguf.tensor_bytes(name).tobytes(), name

    def refused(self: Buffer) -> Buffer:
        raise MemoryError("no memory for 9 bytes: 8 are available\nby chance")

    monkeypatch.setattr(Buffer, "allocate", refused)
    with pytest.raises(DeviceFault, match=r"^EMU: failed: no memory for 9 bytes: .*; by"):
        make_runner(network, plan_network(network, "EMU"))


def test_weights_arrive_while_launches_are_built(
    emulation: None, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads use a device; what ends the one, Ctrl-C too, ends the other."""
    network = Network.read(synthetic("tiny", "Q8_0"))
    built, copied, begun = threading.Event(), list[int](), threading.Event()

    def copy(piece: Buffer, data: memoryview) -> None:
        begun.set()
        assert built.wait(60)
        copied.append(data.nbytes)
        piece.copyin(data)

    def build(memory: ModelMemory) -> FusedExecutor:
        assert begun.wait(60)
        built.set()
        numbers = {
            "context": memory.context,
            "vocab_size": 0,
            "chunk_size": 1,
            "prompt_tokens_per_step": 1,
            "can_step_from_chunk": 0,
        }
        return cast(FusedExecutor, SimpleNamespace(memory=memory, **numbers))

    def interrupted(memory: ModelMemory) -> FusedExecutor:
        threading.Timer(0.1, built.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr("orinllm.gpu.weights._PIECE_BESIDE", network.gguf.n_tensor_bytes // 3)
    monkeypatch.setattr("orinllm.gpu.weights.concurrent_copy_function", lambda device: copy)
    monkeypatch.setattr("orinllm.gpu.fused_executor.FusedExecutor", build)
    made = make_runner(network, plan_network(network, "EMU"))
    assert isinstance(made, FusedRunner)
    found = made.executor.memory.weights.matrix("token_embd").buffer
    where = network.config.rows_of_matrix("token_embd").tensor
    assert content(found) == network.gguf.tensor_bytes(where).tobytes()
    assert len(copied) > 3
    built.clear()
    copied.clear()
    monkeypatch.setattr("orinllm.gpu.fused_executor.FusedExecutor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_runner(network, plan_network(network, "EMU"))
    assert len(copied) == 1


def test_a_prompt_that_continues_reuses_the_cache(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q8_0")
    executor = emulated(path)
    one = model(path, executor, 128)
    first = tokens(one, PROMPT[:62], 9, temperature=0.0)
    longer = [*PROMPT[:62], *first, *PROMPT[20:33]]
    answer = one.generate(longer, Sampling(temperature=0.0), max_tokens=3)
    again = [piece.token for piece in answer if piece.token >= 0]
    # A page and a piece of the next are known; the last token was said and not read.
    assert (answer.n_prompt, answer.n_cached) == (84, 70)
    # Computed without a store, in the same pieces: those round alike, a prompt in one go may not.
    one.close()
    executor.set_pages(range(2))
    for start, text, n in ((0, PROMPT[:62], 9), (70, longer, 3)):
        executor.start_prefill_and_first_token(text, start)
        said = [executor.wait_for_token()]
        while len(said) < n:
            executor.start_step()
            said.append(executor.wait_for_token())
        assert said == (again if start else first)


def test_an_answer_ends_with_the_context(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q8_0")
    one = model(path, emulated(path, context=64), 64)
    answer = one.generate(PROMPT[:61], Sampling(temperature=0.0))
    assert len([piece for piece in answer if piece.token >= 0]) == 3
    assert answer.finish_reason == "length"
    with pytest.raises(BadInput, match="64 tokens and leaves no room in a context of 64"):
        one.generate(PROMPT[:64])


def test_sampled_tokens_are_those_of_the_host(emulated: Load, synthetic: Synthetic) -> None:
    """Drawn on the device, step after step, with penalties that count the answer."""
    path = synthetic("tiny", "Q8_0")
    executor = emulated(path)
    one = model(path, executor, 128)
    for parameters in ({"temperature": 30.0, "seed": 2}, {"repeat_penalty": 3.0, "top_k": 3}):
        how = Sampling(**parameters)  # type: ignore[arg-type]
        text = PROMPT[:4]
        executor.set_sampling(how, text)
        executor.start_prefill_and_first_token(text, 0)
        for _ in range(5):
            token = executor.wait_for_token()
            assert token == sample_token(executor.wait_for_logits(), how, text, len(text))
            text = [*text, token]
            executor.start_step()
        assert tokens(one, PROMPT[:4], 5, **parameters) == text[4:]
    greedy = tokens(one, PROMPT[:4], 6, temperature=0.0)
    assert greedy != text[4:]
    assert greedy == tokens(model(path, emulated(path), 128), PROMPT[:4], 6, temperature=0.0)


def test_slots_sample_each_in_its_own_way(emulated: Load, synthetic: Synthetic) -> None:
    """Four slots, one idle, one greedy: tokens stay on the device from step to step."""
    executor = emulated(synthetic("tiny", "Q8_0"), pages=8)
    decoder = executor.find_or_make_decoder(4)
    decoder.set_pages([[2 * i, 2 * i + 1] for i in range(4)])
    how = [Sampling(temperature=9.0), None, Sampling(), Sampling(seed=7, presence_penalty=4.0)]
    texts = [[5 + i] for i in range(4)]
    for slot, each in enumerate(how):
        decoder.set_sampling(slot, each)
        decoder.set_penalty_history(slot, texts[slot])
    decoder.start_step([text[0] for text in texts], [0, 0, -1, 0])
    for _ in range(4):
        logits, got = decoder.wait_for_logits(), decoder.wait_for_tokens()
        for slot in (0, 1, 3):
            each, text = how[slot] or Sampling(temperature=0), texts[slot]
            assert got[slot] == sample_token(logits[slot], each, text, len(text))
            text.append(got[slot])
        decoder.start_step()
    for slot in range(4):
        decoder.set_sampling(slot, None)
    decoder.set_token_mask(0, np.array([0, 1 << 4, *[0] * 30], np.uint32))
    decoder.start_step()
    assert decoder.wait_for_tokens()[0] == 36
    assert decoder.wait_for_tokens()[1] == decoder.wait_for_logits()[1].argmax()


def test_greedy_tokens_are_those_of_the_cpu_path(emulated: Load, synthetic: Synthetic) -> None:
    path = synthetic("tiny", "Q6_K")
    fused = model(path, emulated(path), 128)
    network = Network.read(path, 128)
    plan = plan_network(network, "CPU")
    runner = make_runner(network, plan)
    cpu = Model(fused.description, plan, runner, make_page_store(runner, network))
    want = tokens(cpu, PROMPT[:9], 6, temperature=0.0)
    assert tokens(fused, PROMPT[:9], 6, temperature=0.0) == want


def test_a_cpu_takes_its_own_path(synthetic: Synthetic) -> None:
    network = Network.read(synthetic("tiny", "Q6_K"), 32)
    plan = plan_network(network, "CPU")
    assert not plan.is_fused
    assert plan.obstacles == {"device": "CPU is neither CUDA nor NV"}
    assert make_runner(network, plan).name == "cpu"


def test_heads_that_q8_0_does_not_divide(emulation: None, synthetic: Synthetic) -> None:
    """A scale is of 32 elements; the model is refused before anything of it is uploaded."""
    network = Network.read(synthetic("tiny", "Q6_K"), 64, Q8_0)
    layers = [
        Layer(
            tuple(
                replace(op, attention=replace(op.attention, head_dim=80))
                if isinstance(op, Attend)
                else op
                for op in layer.operations
            )
        )
        for layer in network.config.layers
    ]
    plan = plan_network(network, "EMU")
    halves = plan_network(replace(network, kv=F16), "EMU")
    assert plan.cache_bytes_per_token * 32 == halves.cache_bytes_per_token * 17
    other = replace(network, config=replace(network.config, layers=tuple(layers)))
    with pytest.raises(BadInput, match="share a scale by 32, and its heads have 80 "):
        make_runner(other, plan)
