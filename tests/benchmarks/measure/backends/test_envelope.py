"""The Orin envelope on a fake CUDA of 132 multiprocessors, built by the same compiler."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.benchmarks.orinbench_command import Build, Capture, Patch, refused

from orinbench.errors import BenchError
from orinbench.judge.make_records import make_records
from orinbench.measure.backends.sm_limit import (
    SMS,
    GreenContextPreload,
    build_preload_library,
    orin_ms_fields,
)
from orinbench.measure.plan import Case
from orinbench.show.table import render_md

FAKE = Path(__file__).with_name("fake_cuda.c")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of fake libraries, and a `program` on them."""
    folder = tmp_path_factory.mktemp("cuda")

    def cc(name: str, *flags: str) -> None:
        command = ["cc", "-w", *flags, "-o", str(folder / name), str(FAKE)]
        if name == "program":
            command += [str(folder / "libcudart.so.12")]
        subprocess.run(command, check=True)

    cc("libcuda.so.1", "-shared", "-fPIC")
    cc("libcudart.so.12", "-shared", "-fPIC", "-DRUNTIME", "-Wl,-soname,libcudart.so.12")
    cc("program", "-DPROGRAM")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(cuda: Path) -> Run:
    def run(preload: GreenContextPreload, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **preload.environment, "LD_LIBRARY_PATH": str(cuda)}
        return subprocess.run(
            [cuda / "program"],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_programs_streams_are_in_a_green_context(run: Run, tmp_path: Path) -> None:
    done = run(GreenContextPreload(16, tmp_path))
    assert (done.returncode, done.stdout) == (0, "16\n")
    preload = GreenContextPreload(14, tmp_path)
    assert run(preload).stdout == "16\n"  # what was granted, not what was asked
    assert preload.pop_reported_sm_count() == 16
    plain = run(preload, LD_PRELOAD="")
    assert plain.stdout == "132\n"
    with pytest.raises(BenchError, match="made no stream through libcudart"):
        preload.pop_reported_sm_count()
    assert run(preload, FAKE_NO_STREAM="1").returncode == 0
    with pytest.raises(BenchError, match="so it used the whole GPU"):
        preload.pop_reported_sm_count()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"FAKE_CUDA_FAILS": "cuGreenCtxCreate"}, "--sms: cuGreenCtxCreate: CUDA error 801"),
        ({"FAKE_CUDA_LAYOUT": "1"}, "--sms: cudaDeviceProp has a layout that is not known: 132"),
    ],
)
def test_what_goes_wrong_is_one_line(
    run: Run, tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    preload = GreenContextPreload(16, tmp_path)
    assert run(preload, **variables).returncode == 3
    with pytest.raises(BenchError, match=f"^{says}$"):
        preload.pop_reported_sm_count()


def test_a_compiler_that_is_missing_or_fails(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(BenchError, match="--sms: /nowhere/cc does not build its library: "):
        build_preload_library(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setattr("orinbench.measure.backends.sm_limit.shutil.which", lambda name: None)
    monkeypatch.setattr(
        "orinbench.measure.backends.sm_limit.importlib.util.find_spec", lambda name: None
    )
    with pytest.raises(BenchError, match="there is no C compiler: install gcc, or leave"):
        build_preload_library(tmp_path)


PLANNED = """
from orinbench.measure.backends.sm_limit import limit_sms_from_environment
green = limit_sms_from_environment()
from orinllm.gpu.device import gemv_blocks_per_sm, multiprocessor_count
print(multiprocessor_count("CUDA"), green.sms, gemv_blocks_per_sm("CUDA"))
"""


@pytest.mark.parametrize(
    ("fails", "says"),
    [("", "16 16 2"), ("cuGreenCtxCreate", "RuntimeError: cuGreenCtxCreate: CUDA error 801")],
)
def test_tinygrad_plans_for_its_green_context(cuda: Path, fails: str, says: str) -> None:
    variables = {SMS: "12", "DEV": "CUDA", "LD_LIBRARY_PATH": str(cuda), "FAKE_CUDA_FAILS": fails}
    done = subprocess.run(
        [sys.executable, "-c", PLANNED],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout + done.stderr).strip().splitlines()[-1] == says


def test_only_a_cuda_device_can_be_limited(tiny_path: Path, capsys: Capture) -> None:
    words = ["-m", str(tiny_path), "--sms", "16", "--backend", "tinygrad:CPU"]
    line = refused(capsys, "llama-bench", *words)
    assert line == (
        "--sms 16: tinygrad:CPU uses all of its device; tinygrad:CUDA and llama.cpp can take a part"
    )


def test_estimates_stand_beside_the_time(recorded_run: Build) -> None:
    cases = {Case(0, 4, 0, sms=16): [8.0] * 6, Case(512, 0, 0, sms=16): [50.0] * 6}
    records = make_records(recorded_run({"llama.cpp": cases}))
    token, prompt = (record.extra["envelope"] for record in records)
    assert [record.test for record in records] == ["tg4 @ 16 SMs", "pp512 @ 16 SMs"]
    assert (token["ms"], prompt["ms"]) == (pytest.approx(2), pytest.approx(50))
    assert token["orin_ms"] is None  # no clock is known
    floor = (records[0].token_read_bytes or 0) / 204.8e9 * 1e3
    assert token["orin_memory_floor_ms"] == prompt["orin_memory_floor_ms"] == pytest.approx(floor)
    table = render_md(records)
    assert "| at 1.3 GHz * |" in table and "- * Estimates for an AGX Orin, not measured." in table
    assert orin_ms_fields(2.62, 16, 1980, 1.0137e9)["orin_ms"] == pytest.approx(3.99, abs=0.005)
