"""What each path asks of a model; the fused one over a fake of patched tinygrad's `Fused`."""

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tinygrad.device import Compiler
from tinygrad.engine.realize import Ops

from orinbench import protocol
from orinbench.tinygrad_paths import (
    FusedPath,
    JitPath,
    LogitsPath,
    batch_path,
    decode_path,
    kernels_of,
    set_batch,
)
from orinbench.tinygrad_runner import CompileMeter, TinygradRunner

CHUNK = 512


class FakeFused:
    """Notes what is asked of it; its token is 7."""

    class Token:
        @staticmethod
        def copyout(out: memoryview) -> memoryview:
            out[:] = b"\7\0\0\0"
            return out

    def __init__(self, prefill: bool = True) -> None:
        self.calls: list[Any] = []
        self.chunk = SimpleNamespace(size=2 + CHUNK)
        self.prefill = object() if prefill else None
        self.token = self.Token()
        self.linear = linear(graph(82))
        self.batch = 1
        self.logits: Any = None

    def step(self, at: tuple[int, ...]) -> None:
        self.calls.append(at)

    def fill(self, tokens: list[int], start: int, end: int) -> None:
        self.calls.append(("fill", tokens[start:end], start))


class FakeLogits:
    """A buffer of floats on the device."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = np.array(list(values), np.float32)
        self.nbytes = self.values.nbytes

    def copyout(self, out: memoryview) -> memoryview:
        out[:] = self.values.tobytes()
        return out


class FakeModel:
    """A loaded model on patched tinygrad."""

    max_context = 256
    blk: ClassVar[list[Any]] = []

    def __init__(self, fused: FakeFused | None) -> None:
        self.fused = fused
        self.attach: Any = lambda batch: fused
        self._cached_tokens = [1]


def linear(*calls: Any) -> Any:
    return SimpleNamespace(src=calls)


def call(op: Any = Ops.PROGRAM, arg: str = "", kernels: int = 0) -> Any:
    body = SimpleNamespace(op=op, arg=arg, src=(SimpleNamespace(src=(None,) * kernels),))
    return SimpleNamespace(src=(body,))


def graph(kernels: int) -> Any:
    return call(Ops.CUSTOM_FUNCTION, "graph", kernels)


@pytest.fixture
def fused() -> FakeFused:
    return FakeFused()


@pytest.fixture
def runner(fused: FakeFused, monkeypatch: pytest.MonkeyPatch) -> TinygradRunner:
    """A runner whose model has been loaded; what synchronizes is noted with the calls."""
    from tinygrad.device import Buffer

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    monkeypatch.setattr(Buffer, "allocate", Buffer.allocate)
    runner = TinygradRunner()
    runner.model, runner.vocab_size = FakeModel(fused), 1000
    runner._path = decode_path(runner.model)
    monkeypatch.setattr(runner, "_synchronize", lambda: fused.calls.append("sync"))
    return runner


def test_a_models_path_is_what_generate_takes(fused: FakeFused) -> None:
    assert isinstance(decode_path(FakeModel(fused)), FusedPath)
    assert isinstance(decode_path(FakeModel(None)), JitPath)
    assert isinstance(decode_path(SimpleNamespace(max_context=8)), JitPath)  # stock tinygrad


def test_the_general_path_leaves_no_token_to_the_hand_written_kernels(fused: FakeFused) -> None:
    """A model's `__call__` gives them each token as long as there are any."""
    model = FakeModel(fused)
    assert isinstance(decode_path(model, general=True), JitPath)
    assert model.fused is None and model.attach(2) is None


def test_kernels_inside_graphs_count_and_a_graph_is_one_launch(fused: FakeFused) -> None:
    assert kernels_of(linear(graph(30), call(), graph(3))) == (34, 3)
    assert FusedPath(fused).counts() == (82, 1)


def test_a_fused_prompt_ends_with_the_logits_of_its_last_token(fused: FakeFused) -> None:
    path = FusedPath(fused)
    prompt = path.upload_prompt([10, 11, 12, 13, 14])
    path.prompt(prompt, 0, 5, 32)
    path.prompt(prompt, 2, 4, 32)
    assert fused.calls == [
        *(("fill", [10, 11, 12, 13], 0), (14, 4)),
        *(("fill", [12], 2), (13, 3)),
    ]
    assert path.last_token() == 7


def test_a_batch_takes_the_kernels_that_the_model_has_for_it(fused: FakeFused) -> None:
    class Patched(FakeModel):
        def set_batch(self, batch: int) -> None:
            self.fused = fused if batch <= 4 else None

    model = Patched(None)
    path = batch_path(model, 3)
    assert isinstance(path, FusedPath)
    assert isinstance(batch_path(model, 5), LogitsPath)
    assert isinstance(batch_path(model, 1), FusedPath)
    for tokens, position in zip(path.upload_tokens([1, 2], [3, 4], [5, 6]), (8, 9), strict=True):
        path.decode(tokens, position)
    assert fused.calls == [(1, 3, 5, 8), (2, 4, 6, 9)]
    fused.batch, fused.logits = 3, FakeLogits(range(6))
    assert path.logits().tolist() == [[0, 1], [2, 3], [4, 5]]


def test_stock_tinygrad_makes_its_caches_anew() -> None:
    block = SimpleNamespace(cache_kv=object(), freqs_cis=object())
    model = SimpleNamespace(blk=[block], max_context=8)
    set_batch(model, 2)
    assert [*vars(block)] == ["freqs_cis"]
    assert isinstance(batch_path(model, 2), LogitsPath)


def test_the_fused_chunk_is_its_own(fused: FakeFused) -> None:
    assert FusedPath(fused).chunk == CHUNK
    assert FusedPath(FakeFused(prefill=False)).chunk == 1
    assert decode_path(FakeModel(None)).chunk is None


def test_fused_tokens_are_timed_one_by_one_at_their_positions(
    runner: TinygradRunner, fused: FakeFused
) -> None:
    done = runner.answer(protocol.Measure(protocol.Test(0, 3, 4, 32), seed=5))
    assert isinstance(done, protocol.Measured)
    draw = random.Random(5)
    depth = [draw.randrange(1000) for _ in range(4)]
    tokens = [draw.randrange(1000) for _ in range(3)]
    assert fused.calls == [
        *(("fill", depth[:3], 0), (depth[3], 3), "sync"),  # not timed
        *((tokens[0], 4), "sync", (tokens[1], 5), "sync", (tokens[2], 6), "sync"),
    ]
    assert done.ns > 0 and done.kernels_compiled == 0
    assert runner.model._cached_tokens == []


def test_a_fused_prompt_is_synchronized_once(runner: TinygradRunner, fused: FakeFused) -> None:
    runner.answer(protocol.Measure(protocol.Test(20, 1, 8, 32), seed=0))
    kinds = [entry if entry == "sync" else entry[0] for entry in fused.calls]
    assert kinds.count("sync") == 3
    (_, _, start) = next(entry for entry in fused.calls[3:] if entry[0] == "fill")
    assert start == 8
    assert [entry[1] for entry in fused.calls if isinstance(entry[0], int)] == [7, 27, 28]


def test_a_fused_warm_up_counts_kernels(runner: TinygradRunner) -> None:
    warm = runner.answer(protocol.WarmUp(protocol.Test(16, 4, 0, 32)))
    assert isinstance(warm, protocol.WarmedUp)
    assert (warm.kernels_per_token, warm.launches_per_token) == (82, 1)
    assert warm.kernels_compiled == 0
    first = runner.answer(protocol.FirstToken(32, 32))
    assert isinstance(first, protocol.FirstTokenDone) and first.seconds > 0


class Plain(Compiler):  # type: ignore[misc]  # tinygrad carries no types
    def compile(self, src: str) -> bytes:
        return src.encode()


class Linking(Plain):
    """Like tinygrad's NVPTXCompiler: compiles by its base, then links."""

    def compile(self, src: str) -> bytes:
        return super().compile(src) + b"!"


@pytest.mark.parametrize("compiler", [Plain, Linking])
def test_a_compilation_counts_once_whatever_compiles(
    compiler: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    for each in (Plain, Linking):
        monkeypatch.setattr(each, "compile", each.compile)
    meter = CompileMeter()
    # base and derived class are both in use, as NVRTC's two are on a machine with two devices
    assert Plain().compile_cached("a") == b"a"
    assert compiler().compile_cached("b").startswith(b"b")
    assert (meter.requested, meter.compiled) == (2, 2)
    assert meter.seconds >= 0


def test_a_compiler_that_raises_is_still_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Compiler):  # type: ignore[misc]  # tinygrad carries no types
        def compile(self, src: str) -> bytes:
            raise RuntimeError(src)

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    meter = CompileMeter()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            Failing().compile_cached("x")
    assert (meter.requested, meter.compiled) == (2, 0)
    assert not meter._inside
