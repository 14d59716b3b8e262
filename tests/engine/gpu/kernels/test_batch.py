"""Batches on tensor cores, on the emulated GPU: products, choice of tokens, whole models."""

import ctypes

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tests.engine.conftest import Load, Synthetic
from tests.engine.gpu import cuda_emulation
from tests.engine.gpu.kernels.emulated_buffers import Array, buffer, read
from tests.engine.sources import flat

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinllm.errors import BadInput
from orinllm.file.ggml import kernel_ggml_types
from orinllm.gpu.decoder import batch_sizes_for_slots
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.kernels.batch import ArgmaxScratch, argmax_launch, batch_product_launches
from orinllm.gpu.kernels.buffers import PAGE, Q8_0, PackedMatrix, pages_for_tokens
from orinllm.gpu.kernels.gemm import RowProduct
from orinllm.gpu.kernels.gemv import ArgmaxTailScratch, GemvProduct, gemv_launches
from orinllm.gpu.kernels.rows import gate_launch
from orinllm.gpu.launch import LaunchGraph
from orinllm.gpu.memory import addressable_pages, make_memory, pages_that_fit
from orinllm.loader import Network, make_runner, plan_network

pytestmark = pytest.mark.usefixtures("emulation")
BY_NAME = {t.name: t for t in kernel_ggml_types().values()}
HIDDEN_SCALE = 0.0625
PROMPT = [(37 * i) % 1000 + 3 for i in range(70)]
# Error of halves in the logits, of their norm; int8 activations, which GEMVs have, add more.
HALVES, EIGHT_BIT = 0.005, 0.05


def matrix(rng: np.random.Generator, name: str, rows: int, cols: int) -> tuple[PackedMatrix, Array]:
    """A packed matrix and its values."""
    type_ = BY_NAME[name]
    dense = rng.standard_normal((rows, cols)).astype(np.float32)
    if name == "Q6_K":  # gguf packs none of it
        blocks = rng.integers(0, 256, (rows * cols // 256, 210), dtype=np.uint8)
        scales = (rng.standard_normal((len(blocks), 1)) * 0.001).astype(np.float16)
        blocks[:, 208:] = scales.view(np.uint8)
        packed = blocks.reshape(rows, -1)
    else:
        packed = quants.quantize(dense, GGMLQuantizationType(type_.id)).reshape(rows, -1)
    values = quants.dequantize(packed, GGMLQuantizationType(type_.id)).reshape(rows, cols)
    weight = PackedMatrix(buffer(packed.view(np.uint8)), type_, rows, cols)
    return weight, values.astype(np.float64)


def run(product: RowProduct) -> list[str]:
    launches = list(batch_product_launches("EMU", product))
    LaunchGraph("EMU", launches).start()
    return [launch.name for launch in launches]


@pytest.mark.parametrize(
    ("types", "sequences", "cols", "rows"),
    [
        (("Q6_K", "Q6_K", "Q6_K"), 8, 512, (24, 9, 8)),
        (("Q8_0", "F16", "F16"), 17, 224, (20, 16, 5)),
        (("BF16",), 3, 64, (7,)),
        (("Q4_0",), 32, 160, (200,)),  # many items a block
    ],
)
def test_products_with_biases(
    types: tuple[str, ...],
    sequences: int,
    cols: int,
    rows: tuple[int, ...],
    rng: np.random.Generator,
) -> None:
    made = [matrix(rng, name, n, cols) for name, n in zip(types, rows, strict=True)]
    biases = [rng.standard_normal(n).astype(np.float32) for n in rows]
    x = rng.standard_normal((sequences, cols)).astype(np.float16)
    out = buffer(np.full((sequences, sum(rows)), np.nan, np.float32))
    product = RowProduct(
        *("qkv", "STORE", tuple(weight for weight, _ in made), out, buffer(x), sequences),
        biases=tuple(map(buffer, biases)),
        factor=0.5,
    )
    assert len(run(product)) == len(dict.fromkeys(types))
    w = np.concatenate([values for _, values in made])
    want = (x.astype(np.float64) @ w.T + np.concatenate(biases)) * 0.5
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).T + 1
    got = read(out).reshape(want.shape)
    assert (np.abs(got - want) <= 2.0**-10 * magnitude).all()


@pytest.mark.parametrize("sequences", [8, 32])
def test_a_product_that_is_added(sequences: int, rng: np.random.Generator) -> None:
    (weight, w), hidden = matrix(rng, "Q4_1", 100, 256), rng.standard_normal((sequences, 256))
    x = rng.standard_normal((sequences, 100)).astype(np.float32)
    halves = (hidden * HIDDEN_SCALE).astype(np.float16)
    out = buffer(x)
    given = ("down", "ADD", (weight,), out, buffer(halves), sequences)
    run(RowProduct(*given, factor=0.25, of_hidden=True))
    seen = halves.astype(np.float64) / HIDDEN_SCALE
    got = read(out).reshape(x.shape)
    magnitude = np.abs(seen) @ np.abs(w).T + np.abs(x)
    assert (np.abs(got - x - 0.25 * (seen @ w.T)) <= 2.0**-10 * magnitude).all()


def test_two_matrices_that_are_gated(rng: np.random.Generator) -> None:
    (gate, g), (up, u) = (matrix(rng, "Q8_0", 70, 320) for _ in range(2))
    x = (rng.standard_normal((16, 320)) / 18).astype(np.float16)
    out = buffer(np.full((16, 70), np.nan, np.float16))
    run(RowProduct("gate_up", "GATED", (gate, up), out, buffer(x), 16, activation="SILU"))
    seen = x.astype(np.float64)
    a, b = seen @ g.T, seen @ u.T
    want = a / (1 + np.exp(-a)) * b
    got = read(out, np.float16).reshape(want.shape).astype(np.float64) / HIDDEN_SCALE
    np.testing.assert_allclose(got, want, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("halves", [False, True])
def test_a_gate_of_its_own(halves: bool, rows: int, rng: np.random.Generator) -> None:
    """SILU of one product times the other, where their matrices have different types."""
    cols = 300  # more than a block has threads, and no multiple of them
    both = rng.standard_normal((rows, 2, cols)).astype(np.float32)
    out = buffer(np.full((rows, cols), np.nan, np.float16 if halves else np.float32))
    (launch,) = launches = [gate_launch(out, buffer(both), cols, "SILU", rows)]
    assert launch.file == "gate.cu"
    LaunchGraph("EMU", launches).start()
    a, b = both[:, 0].astype(np.float64), both[:, 1].astype(np.float64)
    got = read(out, np.float16 if halves else np.float32).astype(np.float64).reshape(rows, cols)
    np.testing.assert_allclose(
        got / (HIDDEN_SCALE if halves else 1), a / (1 + np.exp(-a)) * b, rtol=1e-3, atol=1e-4
    )


def test_the_most_likely_tokens(rng: np.random.Generator) -> None:
    """The first of equals; an idle slot is left alone; no number leaves no token."""
    rows = 5000
    logits = rng.standard_normal((6, rows)).astype(np.float32)
    # Of blocks of 256 threads, eight a row: the first of equals is in a later block, a later warp,
    # and a lane that a later one is compared with.
    logits[0, [2050, 300]] = 9
    logits[4, [2056, 40]] = 9
    logits[5, [2053, 3]] = 9
    logits[1] = np.nan
    logits[3, 0] = 7
    state = buffer(np.array([11, 12, 13, 14, 15, 16, 5, 6, -1, 0, 8, 9], np.int32))
    size, counters = ArgmaxScratch.buffer_sizes(6)
    scratch = ArgmaxScratch(
        buffer(np.full(size, np.nan, np.float32)),
        buffer(np.full(size, -7, np.int32)),
        buffer(np.zeros(counters, np.int32)),
    )
    mail = buffer(np.full(12, -9, np.int32))
    graph = LaunchGraph("EMU", [argmax_launch(buffer(logits), scratch, state, mail)])
    graph.start()
    assert read(state, np.int32).tolist() == [300, -1, 13, 0, 40, 3, 6, 7, -1, 1, 9, 10]
    # By the parity of each position before: 5, 6, none, 0, 8, 9.
    assert read(mail, np.int32).tolist() == [-9, 300, -1, -9, -9, -9, 0, -9, 40, -9, -9, 3]
    graph.start()  # counters are left as they were
    assert read(state, np.int32)[6:].tolist() == [7, 8, -1, 2, 10, 11]


def test_of_equal_rows_the_first_is_the_next_token(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head's rows, whichever warps and blocks have them: more blocks than a warp has lanes."""
    rows, cols, n, sms = 3000, 64, 2, 40
    monkeypatch.setattr("orinllm.gpu.kernels.gemv.multiprocessor_count", lambda device: sms)
    packed, best = np.zeros((rows, cols), np.float16), rng.integers(0, rows, (cols, 40))
    for column, equal in enumerate(best):
        packed[equal, column] = 1
    blocks = n * 2 * sms
    tail = ArgmaxTailScratch(
        buffer(np.zeros(blocks, np.float32)), buffer(np.zeros(blocks, np.int32))
    )
    x, state = buffer(np.zeros((n, cols), np.float32)), buffer(np.zeros(2 * n + 1 + n, np.int32))
    head = GemvProduct(
        *(
            "head",
            "ARGMAX",
            (PackedMatrix(buffer(packed.view(np.uint8)), BY_NAME["F16"], rows, cols),),
        ),
        *(buffer(np.zeros((n, rows), np.float32)), x, state),
        norm=buffer(np.ones(cols, np.float32)),
        sequences=n,
        tail=tail,
    )
    graph = LaunchGraph("EMU", list(gemv_launches("EMU", head)))
    for column in range(0, cols, n):
        x.copyin(memoryview(bytearray(np.eye(cols, dtype=np.float32)[column : column + n])))
        graph.start()
        assert read(state, np.int32)[:n].tolist() == best[column : column + n].min(1).tolist()


class Slots:
    """Slots of one decoder, whose sequences begin alike: PROMPT's keys and values in each."""

    def __init__(self, executor: FusedExecutor, sequences: int) -> None:
        self.executor, self.decoder = executor, executor.find_or_make_decoder(sequences)
        pool = executor.memory.pages
        # Scattered, and none of the last two, which hold what is copied.
        order = [p * 7 % (pool - 2) for p in range(2 * sequences)]
        assert len(set(order)) == 2 * sequences
        self.pages = [order[2 * i : 2 * i + 2] for i in range(sequences)]
        first = [pool - 1, pool - 2]
        executor.set_pages(first)
        executor.fill_cache(PROMPT, 0, len(PROMPT))
        for cache in executor.memory.caches:
            held = np.empty(cache.nbytes // 2, np.uint16)
            cache.copyout(held.data.cast("B"))
            by_page = held.reshape(pool, -1)
            for pages in self.pages:
                by_page[pages] = by_page[first]
            cache.copyin(held.data.cast("B"))
        self.decoder.set_pages(self.pages)


def off(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


MODELS = [
    ("tiny", "Q6_K", 8),
    ("tiny", "Q4_K", 32),
    ("tiny-qwen2", "F16", 16),  # biases
    ("tiny-gemma2", "F16", 8),  # windows, norms behind the parts, soft caps
    ("tiny-gptoss", "MXFP4", 8),  # sinks, experts with biases
    ("tiny-qwen3moe", "Q4_K_M", 8),
]


@pytest.mark.parametrize(("shape", "quant", "sequences"), MODELS)
def test_slots_at_their_own_positions(
    emulated: Load, synthetic: Synthetic, shape: str, quant: str, sequences: int
) -> None:
    """Two tokens of each slot, the second the one that the first left; every third slot idle."""
    path = synthetic(shape, quant)
    executor = emulated(path, 128, 2 * sequences + 3)
    slots, reference = Slots(executor, sequences), Reference(open_model(path), context=128)
    decoder = slots.decoder
    positions = [-1 if i % 3 == 2 else 7 + 61 * i // sequences for i in range(sequences)]
    given = [5 * i + 1 for i in range(sequences)]
    used = [0, 1, sequences - 1 if sequences % 3 else sequences - 2]
    rows = {i: [*PROMPT[: positions[i]], given[i]] for i in used}
    decoder.start_step(given, positions)
    for _ in range(2):
        tokens = decoder.wait_for_tokens()
        for i, row in rows.items():
            got = decoder.wait_for_slot_logits(i)
            assert off(got, reference.logits(row)[-1]) < HALVES
            assert tokens[i] == got.argmax()
            row.append(tokens[i])
        decoder.start_step()


def test_a_slot_does_not_depend_on_the_others(emulated: Load, synthetic: Synthetic) -> None:
    """Bit by bit in one class; between classes and one alone by rounding."""
    executor = emulated(synthetic("tiny-mixtral", "Q6_K"), 128, 19)
    slots = Slots(executor, 8)
    decoder, pages = slots.decoder, slots.pages
    decoder.start_step([5] * 8, [20, *[-1] * 7])
    alone = decoder.wait_for_slot_logits(0)
    decoder.start_step([5, *range(7)], [20, 30, 40, 50, 60, 3, 20, 65])
    np.testing.assert_array_equal(decoder.wait_for_slot_logits(0), alone)
    # The same sequence in another slot.
    decoder.set_slot_pages(6, pages[0])
    decoder.start_step([9] * 6 + [5, 9], [-1, 30, -1, 2, -1, 3, 20, 65])
    np.testing.assert_array_equal(decoder.wait_for_slot_logits(6), alone)
    np.testing.assert_array_equal(decoder.wait_for_logits()[6], alone)
    executor.set_pages(pages[0])
    executor.start_step(5, 20)
    assert 0 < off(executor.wait_for_logits(), alone) < EIGHT_BIT


ADDRESSES = """
struct Paged {
  typedef u16 Element;
  static constexpr int PAGE = 64, KV_HEADS = 2, HEAD_DIM = 64;
};
extern "C" __global__ void __launch_bounds__(32, 1) entry(const int* page, u64* out) {
  const Cached<Paged> cache = {(u16*)0, 0};
  const u32 key = key_offset<Paged>(*page, Paged::KV_HEADS - 1, 63);
  out[0] = (u64)(cache.elements + key);
  out[1] = (u64)(cache.elements + (key + value_offset<Paged>()));
}
"""


def test_the_last_page_that_kernels_address(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of 8 GB a layer: its last rows are where they belong. Of one more page is told."""
    network = Network.read(synthetic("tiny", "F16"), 128)
    most, out, three = addressable_pages(network.config), np.zeros(2, np.uint64), ctypes.c_int * 3
    page = np.array([most - 1], np.int32)
    lib = cuda_emulation.compile_emulated(flat("cache.cuh") + ADDRESSES)
    pointers = (ctypes.c_void_p * 2)(page.ctypes.data, out.ctypes.data)
    ctypes.CDLL(lib.decode()).emulated_launch(pointers, three(1, 1, 1), three(32, 1, 1))
    # Halves of 64 elements; behind the last keys come the values of two heads.
    assert out.tolist() == [2**33 - 128 - 2 * PAGE * 128, 2**33 - 128]
    monkeypatch.setattr("orinllm.gpu.memory._MOST_ELEMENTS", 2**32 // most)
    with pytest.raises(BadInput, match=r"of 128 tokens; the fused kernels address those of 64 at"):
        make_runner(network, plan_network(network, "EMU"))


def test_a_pool_of_pages(synthetic: Synthetic) -> None:
    """So many bytes of it, up to what the kernels address; and the classes of so many slots."""
    network = Network.read(synthetic("tiny", "F16"), 128)
    page = 2 * 2 * 2 * PAGE * 64 * 2  # layers, keys and values, heads, tokens, dimensions, bytes
    assert [pages_that_fit(network.config, n) for n in (0, page - 1, 5 * page)] == [0, 0, 5]
    assert [pages_that_fit(network.config, n, Q8_0) for n in (17 * page, 17 * page - 1)] == [32, 31]
    most = 2**32 // (page // 4)
    assert pages_that_fit(network.config, 1 << 50) == most
    with pytest.raises(ValueError, match=f"a pool of {most + 1} pages; 1 to {most} are possible"):
        make_memory(network.config, None, "EMU", 128, most + 1)  # type: ignore[arg-type]
    assert [pages_for_tokens(n) for n in (1, PAGE, PAGE + 1)] == [1, 1, 2]
    assert [batch_sizes_for_slots(n) for n in (1, 3, 32)] == [(1,), (1, 2, 4), (1, 2, 4, 8, 16, 32)]
    with pytest.raises(ValueError, match="33 slots; 1 to 32 are possible"):
        batch_sizes_for_slots(33)


def test_bad_batches_and_pages_are_refused(emulated: Load, synthetic: Synthetic) -> None:
    executor = emulated(synthetic("tiny", "F16"), 128, 1)  # a pool below one context
    with pytest.raises(ValueError, match="33 sequences; a batch has 1 to 32"):
        executor.find_or_make_decoder(33)
    decoder = executor.find_or_make_decoder()
    with pytest.raises(ValueError, match="pages 0 to 1 of a pool of 1"):
        decoder.set_slot_pages(0, [0, 1])
    with pytest.raises(ValueError, match=f"3 pages; a sequence of {2 * PAGE} tokens has 2"):
        decoder.set_pages([[0, 0, 0]])
    with pytest.raises(ValueError, match="pages of 2 sequences for 1 slots"):
        decoder.set_pages([[0], [0]])
    with pytest.raises(ValueError, match="2 tokens and 1 positions for 1 slots"):
        decoder.start_step([1, 2], [0])
