"""The real worker on tinygrad's CPU device with the tiny shape."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.measure.backends.backend import BackendError, LoadRequest
from orinbench.measure.backends.tinygrad_backend import (
    TinygradBackend,
    measure_copy_bandwidth,
    open_failure_reason,
    worker_environment,
)
from orinbench.measure.backends.worker_process import WorkerProcess
from orinbench.measure.plan import Case, Lane
from orinbench.measure.prompt_text import random_prompt_text, tokenize_prompt, tokenizer_of

TEST = Case(0, 4, 0)


@pytest.fixture(scope="module")
def worker(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    environment = {
        **worker_environment("CPU", folder),
        "CACHEDB": str(folder / "cache.db"),
        "DEBUG": "1",  # what tinygrad prints on standard output must not reach the protocol
    }
    with WorkerProcess(environment, timeout=300) as process:
        loaded = process.runner.load_to_first_token(LoadRequest(str(tiny_path), 256), 40)
        assert loaded.kernels_compiled >= 1 and loaded.compile_s > 0
        yield process


def test_the_device_opens_and_says_what_it_is(worker: WorkerProcess) -> None:
    opened = worker.runner.open_and_identify()
    assert (opened.device, opened.driver) == ("CPU", None)
    assert opened.build_commit.startswith("0.13.0")
    assert opened.n_threads is not None and opened.n_threads >= 1


def test_a_warm_test_compiles_nothing_and_counts_its_kernels(worker: WorkerProcess) -> None:
    warm = worker.runner.warm_up(TEST)
    # A token on a CPU is one program.
    assert (warm.kernels_per_token, warm.launches_per_token) == (1, 1)
    assert warm.type_k == warm.type_v and warm.type_k in ("f32", "f16")
    assert warm.repetition_s <= warm.seconds
    measured = worker.runner.time_repetition(TEST, 1)
    assert measured.ns > 0
    assert measured.kernels_compiled == 0
    # Weights are the file's pages, which are the process's and no buffers of the device.
    assert 0 < (measured.peak_device_bytes or 0) < (measured.peak_rss_bytes or 0)
    assert (measured.peak_rss_bytes or 0) > (measured.peak_device_bytes or 0)


@pytest.mark.parametrize("test", [Case(40, 0, 0), Case(40, 4, 0), Case(8, 0, 40), Case(0, 2, 40)])
def test_prompts_and_depths_run_warm(worker: WorkerProcess, test: Case) -> None:
    warm = worker.runner.warm_up(test)
    assert (warm.kernels_per_token is None) == (test.n_gen == 0)
    measured = worker.runner.time_repetition(test, 3)
    assert measured.kernels_compiled == 0


def test_a_first_text_is_checked_behind_its_own_text(
    worker: WorkerProcess, tiny_path: Path
) -> None:
    case = Case(12, 0, 0, text=True)
    checked = worker.runner.warm_up(
        case, text := random_prompt_text(tiny_path, 12, 0), True
    ).checked
    assert checked is not None and checked.finite and checked.error < 0.05
    assert checked.tokens == [*tokenize_prompt(tokenizer_of(tiny_path), text)]


def test_more_tokens_take_longer(worker: WorkerProcess) -> None:
    def nanoseconds(n_gen: int) -> int:
        test = Case(0, n_gen, 0)
        return min(worker.runner.time_repetition(test, 0).ns for _ in range(3))

    assert nanoseconds(32) > 3 * nanoseconds(2)


def test_a_bad_request_is_an_error_and_not_the_end(worker: WorkerProcess) -> None:
    with pytest.raises(BackendError, match="BadInput"):
        worker.runner.load_to_first_token(LoadRequest("/nowhere.gguf", 64))
    assert worker.runner.open_and_identify().device == "CPU"


def test_bandwidth_is_of_this_world(monkeypatch: Patch) -> None:
    monkeypatch.setattr("orinbench.measure.backends.tinygrad_backend.CPU_COPY_BYTES", 16 << 20)
    found = measure_copy_bandwidth("CPU", 300)
    assert found.n_bytes == 16 << 20
    assert len(found.samples_gb_s) == 7
    assert all(0.05 < sample < 5000 for sample in found.samples_gb_s)


def test_probing_says_why_a_device_does_not_open(monkeypatch: Patch) -> None:
    assert open_failure_reason("CPU") is None
    reason = open_failure_reason("NOSUCH")
    assert reason is not None and "\n" not in reason
    monkeypatch.setenv("CC", "/nowhere/clang")
    reason = open_failure_reason("CPU")
    assert reason is not None and "no C compiler" in reason


def test_a_backend_from_cold_to_closed(tiny_path: Path) -> None:
    case = Case(0, 4, 0)
    plan = Lane("tinygrad:CPU", (case,), tiny_path, n_threads=1)
    backend = TinygradBackend(plan, cold_start=True, timeout=300)
    try:
        identity = backend.open_and_identify()
        assert (identity.device, identity.n_threads) == ("CPU", 1)
        first = backend.time_first_token()
        assert first.cold_s is not None and first.cold is not None
        assert first.cold_s > first.cold.compile_s > 0
        assert first.cold.kernels_compiled >= 1
        assert first.n_prompt == 32
        assert backend.warm_up(case).kernels_compiled >= 0
        sample = backend.time_repetition(case, seed=5)
        assert sample.ns > 0 and sample.kernels_compiled == 0
        cache = Path(backend.environment["CACHEDB"])
        assert cache.exists()
    finally:
        backend.close()
    assert not cache.parent.exists()
