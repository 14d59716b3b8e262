import json
import time
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Patch

from orinbench.errors import BenchError
from orinbench.judge.load_results import ran_on_cpu
from orinbench.measure.backends.backend import BackendError
from orinbench.measure.backends.llama_cpp import (
    LlamaCppBackend,
    find_llama_bench,
    llama_bench_arguments,
)
from orinbench.measure.plan import Case, Lane

CASE = Case(0, 16, 0)


def backend(binary: Path, *cases: Case, timeout: float = 20) -> LlamaCppBackend:
    plan = Lane("llama.cpp", cases or (CASE,), Path("m.gguf"))
    return LlamaCppBackend(binary, plan, timeout, ("--numa", "isolate"))


def calls(binary: Path) -> list[list[str]]:
    log = binary.with_name("argv.log").read_text().splitlines()
    return [json.loads(line) for line in log]


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (Case(512, 0, 0), "-p 512 -n 0"),
        (Case(0, 128, 256), "-p 0 -n 128 -d 256"),
        (Case(512, 128, 0), "-p 0 -n 0 -pg 512,128"),
        (
            Case(8, 0, 0, (("n_ubatch", 64), ("flash_attn", "on"), ("n_gpu_layers", -1))),
            "-p 8 -n 0 -ub 64 -fa on -ngl -1",
        ),
    ],
)
def test_a_case_in_llama_benchs_flags(case: Case, arguments: str) -> None:
    assert llama_bench_arguments(case) == arguments.split()


def test_identity_and_first_token_come_from_one_call(fake_llama_bench: Path) -> None:
    lane = backend(fake_llama_bench)
    identity = lane.open_and_identify()
    assert (identity.software, identity.build_number) == ("llama.cpp 0c1e570", 1)
    assert (identity.device, identity.n_threads) == ("CPU", 2)
    first = lane.time_first_token()
    assert first.cold_s is None
    assert 0 < first.warm_s < 20
    (call,) = calls(fake_llama_bench)
    assert call == (
        [
            *("-m", "m.gguf", "-o", "json", "--numa", "isolate", "--no-warmup"),
            *("-r", "1", "-p", "0", "-n", "0", "-pg", "32,1"),
        ]
    )


def test_a_repetition_is_the_last_of_two(fake_llama_bench: Path) -> None:
    sample = backend(fake_llama_bench).time_repetition(CASE, seed=0)
    assert (sample.ns, sample.discarded_ns) == (1_000_000, [2_000_000])
    assert sample.peak_rss_bytes is not None and sample.peak_rss_bytes > 1 << 20
    assert sample.engine_record is not None and sample.engine_record["type_k"] == "f16"
    assert calls(fake_llama_bench)[0][-6:] == ["-r", "2", "-p", "0", "-n", "16"]


def test_several_sequences_are_llama_batched_benchs(fake_llama_bench: Path) -> None:
    """Its second row counts; what it says of no prompt is no number."""
    case = Case(0, 16, 0, (("flash_attn", "on"),), n_parallel=8)
    with pytest.raises(BenchError, match=r"-npl: there is no .*llama-batched-bench"):
        backend(fake_llama_bench, case)
    batched = fake_llama_bench.with_name("llama-batched-bench")
    rows = [f'{{"n_batch": 2048, "pl": 8, "speed_pp": -nan, "t_tg": {t}}}' for t in ("0.5", "0.25")]
    said = "\n".join(["", *rows, ""])
    batched.write_text(f"#!/bin/sh\necho \"$@\" > {batched}.log\ncat <<'END'\n{said}\nEND\n")
    batched.chmod(0o755)
    sample = backend(fake_llama_bench, case).time_repetition(case, seed=0)
    assert (sample.ns, sample.discarded_ns) == (250_000_000, [500_000_000])
    assert sample.ended_s is not None
    assert sample.engine_record is not None and sample.engine_record["n_batch"] == 2048
    given = Path(f"{batched}.log").read_text()
    wanted = "-c 2048 -npp 0 -ntg 16 -npl 8,8 --output-format jsonl -fa on"
    assert given == f"-m m.gguf --numa isolate {wanted}\n"


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("fail", "ended with status 1: llama_bench: error: failed to load model 'x'"),
        ("silent", "ended with status 1: it gave no reason"),
        ("garbage", "printed no JSON array of one object: 'not json"),
        ("array", "printed no JSON array of one object"),
        ("short", "gave no 2 samples_ns"),
    ],
)
def test_what_goes_wrong_is_one_line(
    fake_llama_bench: Path, monkeypatch: Patch, mode: str, says: str
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_BENCH", mode)
    with pytest.raises(BackendError, match=says):
        backend(fake_llama_bench).time_repetition(CASE, 0)


def test_a_call_that_hangs_is_ended(fake_llama_bench: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FAKE_LLAMA_BENCH", "hang")
    start = time.monotonic()
    with pytest.raises(BackendError, match=r"did not end in 1 s \(--timeout\)"):
        backend(fake_llama_bench, timeout=1).time_repetition(CASE, 0)
    assert time.monotonic() - start < 50  # it would end by itself after 60


def test_a_binary_that_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "llama-bench"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    with pytest.raises(BackendError, match="llama-bench does not start"):
        backend(broken).open_and_identify()


def test_finding_the_binary(fake_llama_bench: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    assert find_llama_bench(str(fake_llama_bench)) == fake_llama_bench
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_llama_bench(None) == fake_llama_bench
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_llama_bench(None) is None
    with pytest.raises(BenchError, match="no such file"):
        find_llama_bench(str(tmp_path / "none"))
    plain = tmp_path / "plain"
    plain.write_text("")
    with pytest.raises(BenchError, match="chmod"):
        find_llama_bench(str(plain))


def test_which_device_it_ran_on() -> None:
    assert ran_on_cpu({"backends": "CPU", "n_gpu_layers": -1})
    assert ran_on_cpu({"backends": "BLAS,CPU"})
    assert ran_on_cpu({"backends": "CUDA", "n_gpu_layers": 0})
    assert not ran_on_cpu({"backends": "CUDA", "n_gpu_layers": 99})
