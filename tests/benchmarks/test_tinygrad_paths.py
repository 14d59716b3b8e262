"""The engine path's calls of an executor, and the timed part of them."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinygrad.device import Compiler
from tinygrad.engine.realize import Ops

from orinbench.benchmark import tinygrad_runner
from orinbench.benchmark.meters import Meters
from orinbench.benchmark.plan import Case
from orinbench.benchmark.prompt_text import encode, prompt_text, tokenizer_of
from orinbench.benchmark.tinygrad_paths import kernels_of
from orinbench.benchmark.tinygrad_runner import TinygradRunner
from orinllm.sampling import Sampling


class FakeExecutor:
    """Notes what is asked of it; its token is 7."""

    name, context, vocab_size, most_verified = "general", 256, 1000, 1

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.how = Sampling()

    def sample(self, how: Sampling, text: Sequence[int]) -> None:
        self.how = how

    def verify(self, tokens: Sequence[int], position: int) -> list[int]:
        raise AssertionError("nothing is guessed here")

    def states(self, tokens: Sequence[int], start: int, end: int) -> Any:
        raise AssertionError("nothing is embedded here")

    def step(self, token: int | None = None, position: int = 0) -> None:
        self.calls.append((token, position))

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        self.calls.append(("fill", list(tokens[start:end]), start))

    def begin(self, tokens: Sequence[int], start: int) -> None:
        self.calls.append(("begin", list(tokens), start))

    def follow(self, most: int) -> Iterator[int]:
        for _ in range(most):
            yield self.token()

    def token(self) -> int:
        self.calls.append("token")
        return 7

    def logits(self) -> Any:
        return np.zeros(2, np.float32)


def linear(*calls: Any) -> Any:
    return SimpleNamespace(src=calls)


def call(op: Any = Ops.PROGRAM, arg: str = "", kernels: int = 0) -> Any:
    body = SimpleNamespace(op=op, arg=arg, src=(SimpleNamespace(src=(None,) * kernels),))
    return SimpleNamespace(src=(body,))


def graph(kernels: int) -> Any:
    return call(Ops.CUSTOM_FUNCTION, "graph", kernels)


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def runner(executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> TinygradRunner:
    """A runner whose model has been loaded; what synchronizes is noted with the calls."""
    from tinygrad.device import Buffer

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    monkeypatch.setattr(Buffer, "allocate", Buffer.allocate)
    runner = TinygradRunner()
    runner._executor = executor
    monkeypatch.setattr(runner, "_synchronize", lambda: executor.calls.append("sync"))
    return runner


def test_kernels_inside_graphs_count_and_a_graph_is_one_launch() -> None:
    assert kernels_of(linear(graph(30), call(), graph(3))) == (34, 3)


def test_tokens_are_timed_one_by_one_at_their_positions(
    runner: TinygradRunner, executor: FakeExecutor
) -> None:
    done = runner.measure(Case(0, 3, 4), seed=5)
    draw = random.Random(5)
    depth = [draw.randrange(1000) for _ in range(4)]
    tokens = [draw.randrange(1000) for _ in range(3)]
    assert executor.calls == [
        *(("begin", depth, 0), "sync"),  # not timed
        *((tokens[0], 4), "sync", (tokens[1], 5), "sync", (tokens[2], 6), "sync"),
    ]
    assert done.ns > 0 and done.kernels_compiled == 0


def test_a_text_after_drawn_tokens_is_answered_greedily(
    runner: TinygradRunner,
    executor: FakeExecutor,
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner._file = tiny_path
    text = prompt_text(tiny_path, 6, 0)
    runner.measure(Case(0, 1, 0, sampling="temperature=0.7"), seed=0)
    runner.measure(Case(6, 0, 0, text=True), 0, text)
    assert executor.how.greedy
    ids = encode(tokenizer_of(tiny_path), text)
    assert executor.calls[-3:] == ["sync", ("begin", ids, 0), "token"]
    with pytest.raises(RuntimeError, match="a text of 6 tokens, not 7"):
        runner.measure(Case(7, 0, 0, text=True), 0, text)


def test_sampled_tokens_are_drawn_in_the_timed_region(
    runner: TinygradRunner, executor: FakeExecutor
) -> None:
    drawn = Case(0, 2, 0, sampling="temperature=0.5,top_k=3")
    runner.measure(drawn, seed=5)
    assert executor.how == Sampling(temperature=0.5, top_k=3)
    assert [c if isinstance(c, str) else "step" for c in executor.calls] == [
        *("sync", "step", "token", "sync", "step", "token", "sync")
    ]
    runner.measure(Case(0, 1, 0), seed=5)
    assert executor.how.greedy and executor.calls[-2:][1] == "sync"
    assert executor.calls.count("token") == 2


def test_fused_tokens_follow_one_another(
    runner: TinygradRunner, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinygrad_runner, "FusedExecutor", FakeExecutor)
    runner.measure(Case(0, 3, 0), seed=5)
    first = random.Random(5).randrange(1000)
    assert executor.calls == ["sync", (first, 0), "token", "token", "token"]


def test_a_prompt_is_synchronized_once(runner: TinygradRunner, executor: FakeExecutor) -> None:
    runner.measure(Case(20, 1, 8), seed=0)
    kinds = [entry if entry == "sync" else entry[0] for entry in executor.calls]
    assert kinds == ["begin", "sync", "begin", "sync", executor.calls[4][0], "sync"]
    (_, given, start) = executor.calls[2]
    assert (len(given), start, executor.calls[4][1]) == (28, 8, 28)


class FakeBatch:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def sample(self, how: Sampling | None) -> None:
        assert how is None

    def fill(self, rows: list[list[int]]) -> None:
        self.calls.append(("fill", rows))

    def decode(self, tokens: tuple[int, ...], position: int) -> None:
        self.calls.append((tokens, position))


def test_several_sequences_are_timed_together(
    runner: TinygradRunner, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="-npl 2: only the fused kernels decode several"):
        runner.batch(2)
    monkeypatch.setattr(runner, "batch", lambda n: FakeBatch(executor.calls))
    done = runner.measure(Case(0, 2, 3, n_parallel=2), seed=5)
    draw = random.Random(5)
    first, second = ([draw.randrange(1000) for _ in range(5)] for _ in range(2))
    assert executor.calls == [
        *(("fill", [first[:3], second[:3]]), "sync"),  # not timed
        *(((first[3], second[3]), 3), "sync", ((first[4], second[4]), 4), "sync"),
    ]
    assert done.ns > 0


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
    meter = Meters()
    # base and derived class are both in use, as NVRTC's two are on a machine with two devices
    assert Plain().compile_cached("a") == b"a"
    assert compiler().compile_cached("b").startswith(b"b")
    assert meter.compiled == 2
    assert meter.compile_s >= 0


def test_a_compiler_that_raises_is_still_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Compiler):  # type: ignore[misc]  # tinygrad carries no types
        def compile(self, src: str) -> bytes:
            raise RuntimeError(src)

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    meter = Meters()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            Failing().compile_cached("x")
    assert meter.compiled == 0
    assert not meter._inside
