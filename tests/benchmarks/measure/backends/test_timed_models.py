"""The engine path's calls of an executor, and the timed part of them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.benchmarks.orinbench_command import Patch
from tinygrad.device import Compiler
from tinygrad.engine.realize import Ops

from orinbench.measure.backends import tinygrad_runner
from orinbench.measure.backends.timed_models import TimedScheduler, n_kernels_and_launches
from orinbench.measure.backends.tinygrad_runner import TinygradRunner
from orinbench.measure.plan import Case
from orinbench.measure.prompt_text import random_prompt_text, tokenize_prompt, tokenizer_of
from orinbench.measure.tinygrad_meters import TinygradMeters
from orinllm.batching.runner import StepRow
from orinllm.choose.sampling import DrawnTokens


class FakeRunner:
    """Notes what is asked of it; its token is 7 (see orinllm's `Runner`)."""

    name, context, vocab_size = "general", 256, 1000
    slots, chunk, prompt_tokens_per_step = 2, 16, 16
    most_extra_tokens, most_steps_in_flight, most_verified_tokens = 0, 1, 1

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.rows: list[StepRow] = []

    def fill_pages(self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        self.calls.append(("fill", list(tokens[start:end]), start))

    def prefill_and_submit_token(self, row: StepRow, start: int) -> None:
        self.calls.append(("begin", list(row.draw.before[start:]), start))
        self.rows = [row]

    def submit_step(self, rows: Sequence[StepRow]) -> None:
        self.calls.append(("step", [row.token for row in rows], [row.position for row in rows]))
        self.rows = list(rows)

    def wait_for_tokens(self) -> list[DrawnTokens]:
        self.calls.append("token")
        return [DrawnTokens(7)] * len(self.rows)

    def tokens_after_guesses(self, row: StepRow, guesses: Sequence[int]) -> list[int]:
        raise AssertionError("nothing is guessed here")

    def save_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """There are no recurrent states."""

    def restore_states(self, pages: Sequence[int], checkpoint: int) -> None:
        """There are none."""

    def prefill_for_hidden_states(
        self, pages: Sequence[int], tokens: Sequence[int], start: int, end: int
    ) -> Any:
        raise AssertionError("nothing is embedded here")

    def last_logits(self) -> Any:
        return np.zeros((1, 2), np.float32)


def linear(*calls: Any) -> Any:
    return SimpleNamespace(src=calls)


def call(op: Any = Ops.PROGRAM, arg: str = "", kernels: int = 0) -> Any:
    body = SimpleNamespace(op=op, arg=arg, src=(SimpleNamespace(src=(None,) * kernels),))
    return SimpleNamespace(src=(body,))


def graph(kernels: int) -> Any:
    return call(Ops.CUSTOM_FUNCTION, "graph", kernels)


@pytest.fixture
def fake() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def runner(fake: FakeRunner, monkeypatch: Patch) -> TinygradRunner:
    """A runner whose model has been loaded; what synchronizes is noted with the calls."""
    from tinygrad.device import Buffer

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    monkeypatch.setattr(Buffer, "allocate", Buffer.allocate)
    runner = TinygradRunner()
    runner._timed = TimedScheduler(fake)
    monkeypatch.setattr(tinygrad_runner, "synchronize_device", lambda: fake.calls.append("sync"))
    return runner


def test_kernels_inside_graphs_count_and_a_graph_is_one_launch() -> None:
    assert n_kernels_and_launches(linear(graph(30), call(), graph(3))) == (34, 3)


def test_the_clock_starts_where_the_first_counted_token_does(
    runner: TinygradRunner, fake: FakeRunner, monkeypatch: Patch
) -> None:
    """A step of 1000 ns, by a clock that only the model moves."""
    now, collect = [0], fake.wait_for_tokens

    def slow() -> list[DrawnTokens]:
        now[0] += 1000
        return collect()

    monkeypatch.setattr(fake, "wait_for_tokens", slow)
    monkeypatch.setattr(
        "orinbench.measure.backends.timed_models.time.perf_counter_ns", lambda: now[0]
    )
    for case, passes in (
        *((Case(0, 3, 4), 3), (Case(0, 3, 0), 3), (Case(9, 0, 4), 1), (Case(9, 0, 0), 1)),
        *((Case(9, 2, 4), 3), (Case(0, 3, 4, n_parallel=2), 3), (Case(0, 3, 0, n_parallel=2), 3)),
    ):
        assert runner.time_repetition(case, seed=5).ns == 1000 * passes, case


def test_a_prompt_is_read_whole_whatever_was_there(
    runner: TinygradRunner, fake: FakeRunner
) -> None:
    """Only a depth is known: two cases of a seed begin with the same random tokens."""
    for case in (Case(20, 0, 0), Case(24, 0, 0), Case(24, 0, 8)):
        fake.calls.clear()
        runner.time_repetition(case, seed=0)
        read = fake.calls[fake.calls.index("sync") + 1 :]
        pieces = [call for call in read if call[0] in ("fill", "begin")]
        assert sum(len(tokens) for _, tokens, _ in pieces) == case.n_prompt
        assert pieces[0][2] == case.n_depth


def test_a_text_after_drawn_tokens_is_answered_greedily(
    runner: TinygradRunner, fake: FakeRunner, tiny_path: Path
) -> None:
    runner._file = tiny_path
    text = random_prompt_text(tiny_path, 6, 0)
    runner.time_repetition(Case(0, 1, 0, sampling="temperature=0.7"), seed=0)
    assert fake.rows[0].draw.sampling.temperature == 0.7
    runner.time_repetition(Case(6, 0, 0, text=True), 0, text)
    assert fake.rows[0].draw.sampling.is_greedy
    ids = tokenize_prompt(tokenizer_of(tiny_path), text)
    assert fake.calls[-3:] == ["sync", ("begin", ids, 0), "token"]
    with pytest.raises(RuntimeError, match="a text of 6 tokens, not 7"):
        runner.time_repetition(Case(7, 0, 0, text=True), 0, text)


def test_several_sequences_are_timed_together(runner: TinygradRunner, fake: FakeRunner) -> None:
    with pytest.raises(RuntimeError, match="-npl 3: the general path has 2 at a time"):
        runner.time_repetition(Case(0, 2, 3, n_parallel=3), seed=5)
    runner.time_repetition(Case(0, 2, 3, n_parallel=2), seed=5)
    steps = [call for call in fake.calls[fake.calls.index("sync") + 1 :] if call != "token"]
    assert [at for _, _, at in steps] == [[2, 2], [3, 3], [4, 4]]


def test_logits_that_are_no_numbers_are_said(
    runner: TinygradRunner, fake: FakeRunner, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fake, "wait_for_tokens", lambda: [DrawnTokens(-1)])
    assert not runner.time_repetition(Case(0, 2, 0), seed=5).finite

    def gone() -> list[DrawnTokens]:
        raise OSError("the device is gone")

    monkeypatch.setattr(fake, "wait_for_tokens", gone)
    with pytest.raises(OSError, match="the device is gone"):
        runner.time_repetition(Case(0, 2, 0), seed=5)


class Plain(Compiler):  # type: ignore[misc]  # tinygrad carries no types
    def compile(self, src: str) -> bytes:
        return src.encode()


class Linking(Plain):
    """Like tinygrad's NVPTXCompiler: compiles by its base, then links."""

    def compile(self, src: str) -> bytes:
        return super().compile(src) + b"!"


@pytest.mark.parametrize("compiler", [Plain, Linking])
def test_a_compilation_counts_once_whatever_compiles(
    compiler: type[Any], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    for each in (Plain, Linking):
        monkeypatch.setattr(each, "compile", each.compile)
    meter = TinygradMeters()
    # base and derived class are both in use, as NVRTC's two are on a machine with two devices
    assert Plain().compile_cached("a") == b"a"
    assert compiler().compile_cached("b").startswith(b"b")
    assert meter.compiled == 2
    assert meter.compile_s >= 0


def test_a_compiler_that_raises_is_still_metered(monkeypatch: Patch) -> None:
    class Failing(Compiler):  # type: ignore[misc]  # tinygrad carries no types
        def compile(self, src: str) -> bytes:
            raise RuntimeError(src)

    monkeypatch.setattr(Compiler, "compile_cached", Compiler.compile_cached)
    meter = TinygradMeters()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            Failing().compile_cached("x")
    assert meter.compiled == 0
    assert not meter._inside
