"""Every architecture on the fused kernels, on an emulated GPU, against the float64 reference."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.engine.conftest import Load, Synthetic
from tests.engine.gpu.kernels.emulated_buffers import read

from orinbench.check.reference import Reference
from orinbench.measure.backends.timed_models import TimedScheduler
from orinbench.model import open_model
from orinllm.batching.fused_runner import FusedRunner
from orinllm.choose.sampling import Sampling
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.kernels.buffers import PAGE, Q8_0

PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]
# Error of 8-bit activations in the logits, of their norm; halves leave a tenth of it.
EIGHT_BIT, HALVES = 0.05, 0.005
# And what keys and values in 8 bits leave where everything else is halves.
EIGHT_BIT_KEYS = 0.02
SHAPES = [
    *(
        "tiny",
        "tiny-llama3",
        "tiny-qwen2",
        "tiny-qwen3",
        "tiny-mistral3",
        "tiny-smollm3",
        "tiny-granite",
        "tiny-gemma2",
        "tiny-gemma3",
    ),
    *("tiny-phi3", "tiny-mixtral", "tiny-qwen3moe", "tiny-gptoss"),
]


def off(executor: FusedExecutor, want: np.ndarray) -> float:
    """Distance of the logits from the wanted ones, of their norm."""
    got = executor.wait_for_logits().astype(np.float64)
    assert executor.wait_for_token() == got.argmax()
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_a_prompt(emulated: Load, synthetic: Synthetic, shape: str) -> None:
    """A prompt in a chunk, then token by token past a window's border."""
    path = synthetic(shape, "F16")
    # longrope's frequencies depend on the context.
    executor, reference = emulated(path, 128), Reference(open_model(path), context=128)
    first, *_, want = reference.logits(PROMPT, len(PROMPT) - 6)
    executor.fill_cache(PROMPT[:7], 0, 6)
    executor.start_step(PROMPT[6], 6)
    assert off(executor, first) < HALVES
    token = executor.wait_for_token()
    executor.start_step()  # the token that the head left
    assert off(executor, reference.logits([*PROMPT[:7], token])[-1]) < HALVES
    executor.start_prefill_and_first_token(PROMPT, 0)
    in_chunks = off(executor, want)
    # Tokens on both sides of a page's border; the first ones have stepped above.
    for position in range(PAGE - 1, len(PROMPT)):
        executor.start_step(PROMPT[position], position)
    one_by_one = off(executor, want)
    assert in_chunks < HALVES
    assert one_by_one < HALVES


def test_tokens_that_the_host_reads_later(emulated: Load, synthetic: Synthetic) -> None:
    """The next token is computed before the last one is read; a prompt may begin anywhere."""
    executor = emulated(synthetic("tiny", "Q6_K"), 128)
    texts = []
    for how in (Sampling(temperature=0), Sampling(seed=3)):
        executor.set_sampling(how, PROMPT)
        executor.start_prefill_and_first_token(PROMPT, 0)
        logits, token = executor.wait_for_logits(), executor.wait_for_token()
        executor.start_prefill_and_first_token(PROMPT, len(PROMPT) - 1)
        assert (executor.wait_for_logits() == logits).all()
        ((followed,),) = TimedScheduler(FusedRunner(executor, 1)).time_answers([PROMPT], 7, [how])[
            2:
        ]
        # Of the token behind the last one nothing was computed.
        state = executor.find_or_make_decoder().list.state
        assert read(state, np.int32)[1] == len(PROMPT) + 7 - 1
        executor.start_prefill_and_first_token(PROMPT, 0)
        one_by_one = [executor.wait_for_token()]
        for _ in range(6):
            executor.start_step()
            one_by_one.append(executor.wait_for_token())
        assert followed == one_by_one and followed[0] == token
        texts.append(followed)
    assert texts[0] != texts[1]


def kept(executor: FusedExecutor, tokens: int) -> list[np.ndarray]:
    """Keys and values of a sequence's tokens, by layer: (2, KV heads, tokens, head dimension)."""
    found = []
    attentions = executor.memory.config.attention_by_layer.values()
    for attention, cache in zip(attentions, executor.memory.caches, strict=True):
        shape = (-1, 2, attention.kv_heads, PAGE, attention.head_dim)
        raw = memoryview(bytearray(cache.nbytes))
        pages = np.frombuffer(cache.copyout(raw), np.float16).reshape(shape)
        rows = np.moveaxis(pages, 0, 2).reshape(2, attention.kv_heads, -1, attention.head_dim)
        found.append(rows[:, :, :tokens].astype(np.float64))
    return found


def test_parts_of_a_launch_wait_for_those_before(emulated: Load, synthetic: Synthetic) -> None:
    """A layer is one launch, and its numbers are the same whichever blocks are fast."""
    executor = emulated(synthetic("tiny", "Q8_0"))
    tokens = executor.find_or_make_decoder().list
    names = [launch.name for launch in tokens.launches]
    assert [name.startswith("joined_qkv_attention_out_gate_up_down_") for name in names] == [
        *(False, True, True, False)
    ]
    layer = tokens.launches[1]  # says all that its parts write: graphs go by that
    written = {id(a.buffer.base) for a in layer.arguments if a.name in layer.writes}
    assert {
        id(b.base) for b in (tokens.residual, tokens.state, executor.memory.caches[0])
    } < written
    found = []
    for _ in range(2):
        for position, token in enumerate((5, 900, 77)):
            executor.start_step(token, position)
        found.append(executor.wait_for_logits())
    np.testing.assert_array_equal(found[0], found[1])


def test_a_chunk_leaves_in_the_cache_what_its_tokens_leave(
    emulated: Load, synthetic: Synthetic
) -> None:
    executor = emulated(synthetic("tiny", "Q6_K"))
    executor.fill_cache(PROMPT, 0, len(PROMPT))
    chunk = kept(executor, len(PROMPT))
    for position, token in enumerate(PROMPT):
        executor.start_step(token, position)
    for one, other in zip(chunk, kept(executor, len(PROMPT)), strict=True):
        assert 0 < np.linalg.norm(one - other) / np.linalg.norm(other) < 0.02


def test_pieces_beside_answers(
    emulated: Load, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is large for an H200 they have tiles of their own."""
    for module in (
        "orinllm.gpu.fused_executor",
        "orinllm.gpu.kernels.gemm",
        "orinllm.gpu.steps.prompt",
    ):
        monkeypatch.setattr(f"{module}.multiprocessor_count", lambda device: 132)
    monkeypatch.setattr("orinllm.gpu.fused_executor._SHORT", 0)
    path = synthetic("tiny-gptoss", "F16")
    executor = emulated(path)
    executor.fill_cache(PROMPT, 0, len(PROMPT) - 1)
    chunk, want = kept(executor, 64), Reference(open_model(path), context=128).logits(PROMPT)[-1]
    pieces = []
    for ends in ((64, 66, 69), (33, 50, 69)):
        for start, end in itertools.pairwise((0, *ends)):
            executor.fill_cache_with_small_chunk(PROMPT, start, end)
        pieces.append(kept(executor, 64))
        executor.start_step(PROMPT[-1], 69)
        assert off(executor, want) < HALVES
    for one, other, whole in zip(*pieces, chunk, strict=True):
        assert (one == other).all()  # where a piece ends changes nothing
        assert np.linalg.norm(one - whole) < 0.002 * np.linalg.norm(whole)


@pytest.mark.parametrize("quant", ["Q6_K", "Q4_K_M", "Q8_0", "Q4_0", "IQ4_XS", "Q2_K", "BF16"])
def test_types(emulated: Load, synthetic: Synthetic, quant: str) -> None:
    path = synthetic("tiny", quant)
    executor, reference = emulated(path), Reference(open_model(path))
    executor.fill_cache(PROMPT, 0, len(PROMPT) - 1)
    executor.start_step(PROMPT[-1], len(PROMPT) - 1)
    assert off(executor, reference.logits(PROMPT)[-1]) < EIGHT_BIT


@pytest.mark.parametrize("sequences", [2, 4])
def test_sequences_at_their_own_positions(
    emulated: Load, synthetic: Synthetic, sequences: int
) -> None:
    """Pages of the sequences are shuffled, one slot is idle, and each has its own length."""
    path = synthetic("tiny", "F16")
    executor = emulated(path, context=128, pages=2 * (sequences + 1))
    reference, decoder = Reference(open_model(path)), executor.find_or_make_decoder(sequences)
    pages = [[2 * sequences + 1 - 2 * i, 2 * i] for i in range(sequences)]
    lengths = [40 + 30 * i // sequences for i in range(sequences)]
    rows = [[(t * (i + 3)) % 1000 for t in PROMPT[:n]] for i, n in enumerate(lengths)]
    for row, held in zip(rows, pages, strict=True):
        executor.set_pages(held)
        executor.fill_cache(row, 0, len(row) - 1)
    decoder.set_pages(pages)
    last = [row[-1] for row in rows]
    positions = [n - 1 for n in lengths]
    positions[-1] = -1  # idle
    for _ in range(3):
        decoder.start_step(last, positions)
        logits = decoder.wait_for_logits()
        tokens = decoder.wait_for_tokens()
        for i, row in enumerate(rows[:-1]):
            want = reference.logits(row)[-1]
            assert np.linalg.norm(logits[i] - want) < HALVES * np.linalg.norm(want)
            row.append(tokens[i])
            last[i], positions[i] = tokens[i], positions[i] + 1


def test_logits_that_are_no_numbers_leave_no_token(
    emulated: Load, synthetic: Synthetic, tmp_path: Path
) -> None:
    path = tmp_path / "nan.gguf"
    path.write_bytes(synthetic("tiny", "F16").read_bytes())
    norm = open_model(path).tensors["output_norm.weight"]
    with path.open("r+b") as file:
        file.seek(norm.offset)
        file.write(np.full(norm.shape, np.nan, np.float32).tobytes())
    executor = emulated(path)
    executor.start_step(1, 0)
    assert executor.wait_for_token() == -1
    executor.start_step()  # reads no row beyond the table
    assert executor.wait_for_token() == -1


@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma3"])
def test_keys_and_values_in_bytes(emulated: Load, synthetic: Synthetic, shape: str) -> None:
    """A prompt in a chunk and tokens behind it, a batch at its own positions, half the memory."""
    path = synthetic(shape, "F16")
    executor, reference = emulated(path, kv=Q8_0), Reference(open_model(path), context=128)
    executor.fill_cache(PROMPT, 0, len(PROMPT) - 1)
    executor.start_step(PROMPT[-1], len(PROMPT) - 1)
    assert 1e-5 < off(executor, reference.logits(PROMPT)[-1]) < EIGHT_BIT_KEYS
    token = executor.wait_for_token()
    executor.start_step()
    want = reference.logits([*PROMPT, token])[-1]
    assert off(executor, want) < EIGHT_BIT_KEYS
    decoder = executor.find_or_make_decoder(4)
    decoder.set_pages([[0, 1], [], [], []])
    decoder.start_step([token, 0, 0, 0], [len(PROMPT), -1, -1, -1])
    assert np.linalg.norm(decoder.wait_for_logits()[0] - want) < EIGHT_BIT_KEYS * np.linalg.norm(
        want
    )
    halves = emulated(path)
    for cache, scales, whole in zip(
        executor.memory.caches, executor.memory.scales, halves.memory.caches, strict=True
    ):
        assert (cache.nbytes + scales.nbytes) * 32 == whole.nbytes * 17
