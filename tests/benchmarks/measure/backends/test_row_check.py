"""Rows at their depth and batch: two ways of an engine, and numbers that are none."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.benchmarks.orinbench_command import Patch
from tests.engine.conftest import emulation as emulation
from tests.engine.conftest import load_emulated

from orinbench.check.reference import Reference
from orinbench.check.row_result_gate import require_row_passed, row_check_text
from orinbench.errors import CheckFailed
from orinbench.measure.backends.backend import RowCheckResult, WarmUpCost
from orinbench.measure.backends.row_check import compare_engine_row_two_ways, logits_are_finite
from orinbench.measure.backends.timed_models import TimedScheduler, load_runner
from orinbench.measure.plan import Case
from orinbench.measure.results import LaneResult, RunResult
from orinbench.measure.token_sampling import case_samplings
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinllm.choose.sampling import DrawnTokens
from orinllm.gpu.decoder import Decoder
from orinllm.gpu.fused_executor import FusedExecutor

pytestmark = pytest.mark.usefixtures("cpu_device")
CASES = [Case(48, 0, 0), Case(0, 8, 0), Case(0, 4, 40), Case(40, 4, 24), Case(1, 0, 0)]


@pytest.fixture
def cpu_device(monkeypatch: Patch) -> Any:
    from tinygrad import Context

    with Context(DEV="CPU"):
        yield


def rows_of(case: Case) -> list[list[int]]:
    draw = random.Random(3)
    return [
        [draw.randrange(320) for _ in range(case.context_length)] for _ in range(case.n_parallel)
    ]


class Faulty:
    """A runner whose numbers change from a position on, where the tokens before were read so."""

    def __init__(self, real: Any, fault: str, since: int) -> None:
        self._real, self._fault, self._since = real, fault, since
        self._steps = 0
        self._at = -1
        self.filled: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def fill_pages(self, pages: Any, tokens: Sequence[int], start: int, end: int) -> None:
        self._real.fill_pages(pages, tokens, start, end)
        self.filled.append((start, end))

    def submit_step(self, rows: Any) -> None:
        self._real.submit_step(rows)
        self._at, self._steps = rows[0].position, self._steps + 1

    def prefill_and_submit_token(self, row: Any, start: int) -> None:
        self._real.prefill_and_submit_token(row, start)
        self._at, self._steps = row.position, 0

    def last_logits(self) -> Any:
        found = np.array(self._real.last_logits())
        if self._at >= self._since and self._fault == "none":
            found[0, 7] = np.nan
        if self._at >= self._since and self._fault == ("decoded" if self._steps else "prompt"):
            found = np.roll(found, 1, axis=-1)
        return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_two_ways_agree_and_faults_do_not(least_path: Path, case: Case) -> None:
    runner, rows = load_runner(str(least_path), 128), rows_of(case)
    right = compare_engine_row_two_ways(runner, case, rows)
    assert right.finite and right.error < 0.01
    since = case.context_length - 1
    for fault in ("prompt", "decoded") if case.context_length > 1 else ():
        wrong = compare_engine_row_two_ways(cast(Any, Faulty(runner, fault, since)), case, rows)
        assert wrong.finite and wrong.error > 0.5
    none = compare_engine_row_two_ways(cast(Any, Faulty(runner, "none", since)), case, rows)
    assert not none.finite
    assert not logits_are_finite([np.array([0.0, np.inf], np.float32)]) and logits_are_finite([])


def test_the_other_way_cuts_prompts_elsewhere(least_path: Path) -> None:
    runner, case = cast(Any, Faulty(load_runner(str(least_path), 128), "", 0)), Case(100, 0, 0)
    compare_engine_row_two_ways(runner, case, rows_of(case))
    assert runner.filled == [(0, 64), (64, 83)]  # the first way's only piece has the last token


def test_a_batch_is_compared_with_its_sequences_alone(
    emulation: None, tiny_path: Path, monkeypatch: Patch
) -> None:
    from orinllm.batching.fused_runner import FusedRunner

    runner = FusedRunner(load_emulated(tiny_path, 64, pages=8), 2)
    case = Case(0, 1, 2, n_parallel=2)
    found = compare_engine_row_two_ways(runner, case, rows_of(case))
    assert found.finite and found.error < 0.05 and found.against == "the same sequences alone"

    # What is timed draws at random there, too.
    loop = TimedScheduler(runner)
    _, _, drawn = loop.time_answers(
        rows_of(case), 4, case_samplings(replace(case, n_gen=4), seed=1)
    )
    assert all(len(set(tokens)) > 2 for tokens in drawn) and drawn[0] != drawn[1]

    class Swapped(Faulty):
        def last_logits(self) -> Any:
            return np.array(self._real.last_logits())[::-1]

    swapped = compare_engine_row_two_ways(cast(Any, Swapped(runner, "", 0)), case, rows_of(case))
    assert swapped.error > 0.5

    # Every token reads a page that nobody has written, or one of the other sequence's.
    place = Decoder.set_pages
    for stale in (lambda pages: [[7]] * len(pages), lambda pages: [*pages[1:], pages[0]]):
        monkeypatch.setattr(
            Decoder, "set_pages", lambda *a, of=stale: place(a[0], of(a[1]), *a[2:])
        )
        runner = FusedRunner(runner.executor, 2)
        stays = stale([1, 2]) == [[7], [7]]
        of = replace(case, n_depth=10) if stays else case  # else what is read is written, too
        found = compare_engine_row_two_ways(runner, of, rows_of(of))
        assert found.error > 0.5 and (found.mixed > 0.5) != stays


@pytest.mark.parametrize("fault", ["", "tokens", "prompt"])
def test_a_stale_page_of_a_long_text_shows(
    emulation: None, tiny_path: Path, monkeypatch: Patch, fault: str
) -> None:
    """One of three pages, whose effect on logits was 0.5 %: both ways read it."""
    from orinllm.batching.fused_runner import FusedRunner

    place, table = Decoder.set_pages, FusedExecutor.set_pages

    def other(pages: Sequence[int]) -> list[int]:
        return [page if at != 1 else 3 for at, page in enumerate(pages)]

    if fault == "tokens":
        monkeypatch.setattr(Decoder, "set_pages", lambda *a: place(a[0], [other(a[1][0])], *a[2:]))
    elif fault == "prompt":

        def placed(executor: FusedExecutor, pages: Sequence[int], states: int = 0) -> None:
            table(executor, other(pages), states)
            executor.find_or_make_decoder().set_pages([pages])

        monkeypatch.setattr(FusedExecutor, "set_pages", placed)
    runner = FusedRunner(load_emulated(tiny_path, 192, pages=4), 1)
    case = Case(0, 2, 140)
    found = compare_engine_row_two_ways(runner, case, rows_of(case))
    assert found.error > 0.5 if fault else found.error < 0.05


def test_each_sequence_of_a_batch_has_states_of_its_own(emulation: None, tmp_path: Path) -> None:
    """Rows of a model that recurs, once called wrong: the check had them share one state."""
    from orinllm.batching.fused_runner import FusedRunner

    write_synthetic(tmp_path / "m.gguf", "tiny-lfm2", "F16", 0)
    executor = load_emulated(tmp_path / "m.gguf", 64, pages=8, slots=(2, 0))
    runner, case = FusedRunner(executor, 2), Case(0, 1, 2, n_parallel=2)
    found = compare_engine_row_two_ways(runner, case, rows_of(case))
    assert found.finite and found.error < 0.01
    assert TimedScheduler(runner).recurrent


@pytest.mark.parametrize("sampling", ["", "temperature=0", "temperature=1,top_k=0,top_p=1,min_p=0"])
def test_tokens_are_drawn_as_the_row_says(least_path: Path, sampling: str) -> None:
    runner, case = load_runner(str(least_path), 128), Case(0, 12, 4, sampling=sampling)
    right = compare_engine_row_two_ways(runner, case, rows_of(case))
    assert (right.misdrawn, right.drawn) == (0, 12)

    class Other(Faulty):
        """Draws the most likely token, or the second one."""

        def wait_for_tokens(self) -> Any:
            self._real.wait_for_tokens()
            order = np.argsort(-np.array(self._real.last_logits()[0]))
            return [DrawnTokens(int(order[int(sampling == "temperature=0")]))]

    wrong = compare_engine_row_two_ways(cast(Any, Other(runner, "", 0)), case, rows_of(case))
    assert wrong.misdrawn > 6


@pytest.fixture
def lane(recorded_run: Any) -> LaneResult:
    run: RunResult = recorded_run({"tinygrad:CPU": {Case(0, 4, 1000): []}})
    return run.lanes[0]


@pytest.mark.parametrize(
    ("found", "tolerance", "said"),
    [
        (RowCheckResult(False, float("inf"), "x"), 0.1, "its last logits are not finite"),
        (RowCheckResult(True, 0.3, "x"), 0.1, "30 % of their spread off x, allowed 25 %"),
        (RowCheckResult(True, 0.3, "x"), None, "allowed 25 %"),
        (
            RowCheckResult(True, 0.2, "x", mixed=0.02),
            0.1,
            "2 % of their spread off if other sequences",
        ),
        (RowCheckResult(True, 0.2, "x", mixed=0.005), 0.1, ""),
    ],
)
def test_a_row_that_depends_on_its_way_ends_the_run(
    lane: LaneResult, found: RowCheckResult, tolerance: float | None, said: str
) -> None:
    row = lane.rows[0]
    assert row_check_text(row) == "not checked at this depth and batch"
    row.warm_up = replace(row.warm_up or WarmUpCost(), checked=found)
    lane.check = {"tolerance": tolerance}
    if not said:
        require_row_passed(lane, row)
        assert row_check_text(row) == "20 % off x"
        return
    with pytest.raises(CheckFailed) as caught:
        require_row_passed(lane, row)
    assert "tinygrad:CPU tg4 @ d1000" in str(caught.value) and said in str(caught.value)


def test_rounding_may_choose_other_experts(lane: LaneResult, tmp_path: Path) -> None:
    """Two ways of a right engine are further apart where routers choose, and wrong ones fail."""
    write_synthetic(tmp_path / "m.gguf", "tiny-gptoss", "MXFP4", 0)
    model, row = open_model(tmp_path / "m.gguf"), lane.rows[0]
    mixture = replace(lane, model=model, check={"tolerance": 0.04})
    row.warm_up = replace(WarmUpCost(), checked=RowCheckResult(True, 0.32, "x"))
    require_row_passed(mixture, row)
    with pytest.raises(CheckFailed, match="32 % of their spread off x, allowed 10 %"):
        require_row_passed(replace(mixture, model=lane.model), row)
    row.warm_up = replace(WarmUpCost(), checked=RowCheckResult(True, 0.6, "x"))
    with pytest.raises(CheckFailed, match="60 % of their spread off x, allowed 50 %"):
        require_row_passed(mixture, row)


def test_a_row_that_draws_other_tokens_fails(lane: LaneResult) -> None:
    row = lane.rows[0]
    for misdrawn in (2, 3):  # of 16: at the borders of two tokens rounding decides
        checked = RowCheckResult(True, 0.0, "x", misdrawn=misdrawn, drawn=16)
        row.warm_up = replace(WarmUpCost(), checked=checked)
        if misdrawn == 2:
            require_row_passed(lane, row)
    with pytest.raises(CheckFailed, match="3 of 16 tokens are not those that its logits"):
        require_row_passed(lane, row)


def test_the_reference_judges_rows_of_small_models(lane: LaneResult) -> None:
    assert lane.model is not None
    tokens = [5, 6, 7]
    right = Reference(lane.model).logits(tokens)[0]
    lane.check, row = {"tolerance": 0.1}, lane.rows[0]
    row.warm_up = replace(WarmUpCost(), checked=RowCheckResult(True, 0.0, "x", tokens, right))
    require_row_passed(lane, row)
    assert row_check_text(row) == "0 % off x, 0 % off the float64 reference"
    both_wrong = RowCheckResult(True, 0.0, "x", tokens, np.roll(right, 1))
    row.warm_up = replace(WarmUpCost(), checked=both_wrong)
    with pytest.raises(CheckFailed, match="off the float64 reference, allowed 25 %"):
        require_row_passed(lane, row)
