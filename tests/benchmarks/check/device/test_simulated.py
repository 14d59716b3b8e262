"""From end to end on the simulated board; this is the check's own test."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from orinbench.check.device.claims import load_report
from orinbench.child import CommandResult, run_command
from orinbench.cli import orinbench

ROOT = Path(__file__).resolve().parents[4]
ABI_PROBE = ROOT / "benchmarks/orinbench/check/device/abi_probe.py"
# llama-bench on the simulated GPU takes a minute of CPU.
STEPS = "identity,abi,smoke,replay,queue,coherence,faults,kernel-log"


def compilers() -> dict[str, str]:
    """NVRTC, nvJitLink and the headers from the wheels of the extra cuda-tools."""
    (site,) = {Path(path) for path in sys.path if (Path(path) / "nvidia").is_dir()}
    nvidia = site / "nvidia"
    return {
        "NVRTC_PATH": str(next(nvidia.glob("cuda_nvrtc/lib/libnvrtc.so.*"))),
        "NVJITLINK_PATH": str(next(nvidia.glob("nvjitlink/lib/libnvJitLink.so.*"))),
        "CUDA_PATH": str(nvidia / "cuda_runtime"),
    }


def simulated(
    *command: str | Path, options: tuple[str, ...] = (), variables: dict[str, str] | None = None
) -> CommandResult:
    """Run a command on a simulated board."""
    simulator = (sys.executable, "-m", "nvgpusim", "--quiet", *options, "--")
    return run_command((*simulator, *command), 900, compilers() | (variables or {}))


@pytest.mark.parametrize(
    ("release", "size", "board", "sms"),
    [("r35", 312, "nano4", 4), ("r36", 328, "agx64", 16), ("r39", 344, "nx16", 8)],
)
def test_the_probe_finds_each_release_and_board(
    release: str, size: int, board: str, sms: int
) -> None:
    """The probe's own numbers and the simulator's, each from the headers, agree."""
    done = simulated(sys.executable, ABI_PROBE, options=("--profile", release, "--board", board))
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["unexpected"] == [] and len(found["calls"]) > 25
    shape = found["characteristics"]
    assert (shape["size"], shape["release"], shape["sms"]) == (size, release, sms)
    assert (shape["compute_class"], shape["dma_copy_class"]) == (0xC7C0, 0xC7B5)
    assert (shape["sm_arch_sm_version"], shape["gpu_va_bit_count"]) == (0x807, 40)
    assert found["windows"]["va_end"] == {
        "end": "0xfc00000000",
        "works": True,
        "region_start": "0x200000",
        "region_end": "0xfc00000000",
        "buffers": found["windows"]["va_end"]["buffers"],
        "in_windows": False,
        "inside": True,
    }


def test_another_struct_size_is_found_out() -> None:
    """A driver of another release does not know r36's larger structs: the table would say so."""
    program = ABI_PROBE.read_text().replace('release = found["release"]', 'release = "r36"')
    done = simulated(sys.executable, "-c", program, options=("--profile", "r35"))
    assert (done.status != 0 and "ENOTTY" in done.err) or "Errno 25" in done.err


def test_from_end_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    arguments = ("device-check", "--output", folder, "--only", STEPS)
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "USER": "mkowalska"}
    done = simulated(sys.executable, "-m", "orinbench", *arguments, variables=caches)
    assert done.status == 0, done.err
    taken = load_report(folder / "report.json")
    assert taken["simulated"]
    state = {name: (entry["status"], entry["reason"]) for name, entry in taken["steps"].items()}
    log = state.pop("kernel-log")
    assert log[0] in ("done", "not run")
    assert set(state.values()) == {("done", None)} and set(state) == set(STEPS.split(",")[:-1])

    smoke = taken["steps"]["smoke"]["result"]
    assert smoke["sum"] and smoke["copy"] and smoke["windows"] and smoke["product_error"] < 1e-3
    assert (smoke["interface"], smoke["arch"]) == ("TegraIface", "sm_87")
    replayed = taken["steps"]["replay"]["result"]
    assert replayed["events"] > 100 and replayed["differences"] == 0
    queue = taken["steps"]["queue"]["result"]
    assert queue["ring"]["entries"] == 1024 and queue["ring"]["ratio"] > 0
    assert queue["qmd"] == {"launches": 3, "written": 0, "written_after_release": 0}
    shared = taken["steps"]["coherence"]["result"]
    assert [shared[way]["wrong"] for way in ("volatile", "flushed")] == [0, 0]
    missed = shared["unflushed"]
    assert all(missed[way] > 0 for way in ("cpu_then_gpu", "gpu_then_cpu", "cpu_over_gpu"))
    faults = taken["steps"]["faults"]["result"]
    assert "misaligned address" in faults["misaligned"]["error"]
    assert "FIFO_ERROR_MMU_ERR_FLT (31)" in faults["unmapped"]["error"]
    assert faults["hang"]["error"].startswith("Wait timeout: 2000 ms!")
    assert all(fault["works_afterwards"] for fault in faults.values())

    written = (folder / "report.json").read_text() + (folder / "trace.jsonl").read_text()
    for secret in (os.uname().nodename, "mkowalska", str(tmp_path), str(Path.home())):
        assert secret not in written or len(secret) < 3 or secret == "/root"

    words = ["device-check", "verify", str(folder / "report.json")]
    judged = CliRunner().invoke(orinbench, words, standalone_mode=False)
    assert not judged.return_value, judged.stdout
    assert "abi.numbers" in judged.stdout and "refuted" not in judged.stdout


def test_a_gpu_that_writes_into_a_qmd_behind_its_release_is_found_out(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    program = (
        "import json, pathlib, sys; from orinbench.check.device import probes;"
        "found = json.dumps(probes.count_late_qmd_writes(4));"
        "pathlib.Path(sys.argv[1]).write_text(found)"
    )
    late = ("--write-back", "--delay", "20", "--seed", "1")
    variables = {"DEV": "TEGRA+NV", "HCQDEV_WAIT_TIMEOUT_MS": "300000"}
    done = simulated(sys.executable, "-c", program, out, options=late, variables=variables)
    assert done.status == 0, done.err
    assert json.loads(out.read_text())["written_after_release"] > 0
