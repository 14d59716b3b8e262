"""The board around a benchmark: state, requirements, cooling down, energy, the textfile."""

import ctypes
import dataclasses
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.telemetry.conftest import (
    DEVFREQ,
    HWMON,
    THERMAL,
    Show,
    Tree,
    cores_off,
    idle,
    maxn_load,
    orin_nx,
    root,
    supply,
    without,
)

from orinbench.errors import BenchError
from orinbench.judge.sample_statistics import BenchWarning, WarningKind
from orinbench.measure import board
from orinboard import require
from orinboard.board import BoardState, read_state
from orinboard.replay import TreeOnDisk
from orinboard.sensors import nvgpu
from orinboard.sensors.nvgpu import GET_TPC_MASKS, TpcMasksArgs

ROOMS = ("orinboard", "nvgpusim")


def masks(*values: int, result: int = 0, error: int = 0) -> nvgpu.Ioctl:
    """A driver that answers GET_TPC_MASKS so, after looking at the question."""

    def call(fd: int, request: int, args: TpcMasksArgs) -> int:
        assert request == GET_TPC_MASKS and ctypes.sizeof(args) == 16
        assert args.mask_buf_size >= 4 * len(values) and args.reserved == 0
        if error:
            raise OSError(error, "refused")
        buffer = (ctypes.c_uint32 * len(values)).from_address(args.mask_buf_addr)
        buffer[:] = list(values)
        args.mask_buf_size = 4 * len(values)
        return result

    return call


def with_device(tree: Tree) -> Tree:
    return tree | {"dev/nvgpu/igpu0/ctrl": ""}


@pytest.mark.parametrize(
    ("values", "sms"), [((15, 15), 16), ((15, 0), 8), ((7, 15), 14), ((3,), 4)]
)
def test_the_driver_is_asked_for_its_multiprocessors(
    values: tuple[int, ...], sms: int, show: Show
) -> None:
    state = read_state(show(with_device(idle())), masks(*values))
    assert (state.sms, state.sms_source) == (sms, "nvgpu")


@pytest.mark.parametrize(
    "call",
    [
        *(masks(15, 15, error=errno.ENOTTY), masks(15, 15, result=8)),
        nvgpu.call_ioctl,  # on a file that is no GPU
    ],
)
def test_a_driver_that_refuses_is_named(call: nvgpu.Ioctl, show: Show) -> None:
    state = read_state(show(with_device(idle())), call)
    assert (state.sms, state.sms_source) == (16, "sysfs")
    assert any(line.startswith("nvgpu: ") for line in state.errors)


@pytest.mark.parametrize(
    ("profile", "module", "sms"),
    [
        ("r35", "agx64", 16),
        ("r39", "agx32", 14),
        ("r36", "nx16", 8),
        ("r36", "nano4", 4),
    ],
)
def test_the_modelled_kernel_is_asked(profile: str, module: str, sms: int) -> None:
    """The real ioctl against the driver simulator, which knows nothing of these readers."""
    rooms = [Path(importlib.import_module(name).__file__ or "").parents[1] for name in ROOMS]
    simulator = [sys.executable, "-m", "nvgpusim", "--quiet", "--strict"]
    code = "from orinboard.files import Roots; from orinboard.sensors.nvgpu import sm_count; "
    code += "print(sm_count(Roots()))"
    done = subprocess.run(
        [*simulator, "--profile", profile, "--board", module, "--", "python", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, rooms))},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{sms}\n"), done.stderr


def test_the_record_is_json_and_lacks_what_the_board_lacks(show: Show) -> None:
    record = json.loads(json.dumps(read_state(show(maxn_load())).json_record()))
    assert record["power_mode"] == {"id": 0, "name": "MAXN"}
    assert record["pinned"] == {"gpu": True, "cpu": True}
    assert record["module_watts"] == pytest.approx(43.3, abs=0.1)
    assert record["throttling"] == ["gpu-throttle-alert"]
    assert record["gpus"][0]["current_hz"] == 1_300_500_000
    assert record["sms"] == 16 and "emc" not in record and "errors" not in record
    record = read_state(show(root())).json_record()
    assert record["emc"]["current_hz"] == 3_199_000_000
    bare = read_state(show({}))
    assert bare.json_record() == {"pinned": {}, "throttling": []}
    assert (bare.junction_or_hottest_celsius, bare.module_watts, bare.celsius_by_zone) == (
        None,
        None,
        {},
    )


def test_throttle_events_between_two_states(show: Show) -> None:
    before = read_state(show(idle()))
    after = read_state(show(maxn_load()))
    assert after.throttles_by_reason_since(before) == {"instantaneous_overcurrent": 1284}
    assert before.throttles_by_reason_since(before) == {}
    # The board slept or was restarted in between: its counter begins anywhere.
    tree = maxn_load() | {f"{HWMON}/hwmon5/oc3_event_cnt": "3\n"}
    assert read_state(show(tree)).throttles_by_reason_since(after) == {}
    unknown = BoardState(dataclasses.replace(after.readings, throttles=()))
    assert after.throttles_by_reason_since(unknown) == {}


@pytest.mark.parametrize(
    ("tree", "spec", "complaint", "command"),
    [
        (maxn_load(), "maxn,pinned", None, None),
        (idle(), "pinned", "gpu and cpu clocks may move", "sudo jetson_clocks"),
        (
            maxn_load() | {"sys/devices/system/cpu/cpu7/cpufreq/scaling_min_freq": "729600\n"},
            "pinned",
            "cpu clocks may move",
            "sudo jetson_clocks",
        ),
        (cores_off(), "maxn", "the power mode is MODE_30W, not MAXN", "sudo nvpmodel -m 0"),
        (without(idle(), "var/"), "maxn", "nvpmodel has never run here", "sudo nvpmodel -m 0"),
        (
            without(cores_off(), "etc/nvpm"),
            "maxn",
            "the power mode is mode 2",
            "sudo nvpmodel -m 0",
        ),
        (without(idle(), "etc/nvpm"), "maxn", None, None),
        (
            idle() | {"etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN>\n"},
            "maxn",
            None,
            None,
        ),
        (orin_nx(), "maxn", "the power mode is MAXN, not MAXN_SUPER", "sudo nvpmodel -m 4"),
        (
            idle() | {f"{DEVFREQ}/device/tpc_pg_mask": "240\n"},
            "maxn",
            "the power mode is MAXN, but 8 of 16 multiprocessors are on",
            "sudo reboot",
        ),
        ({}, "maxn", "this machine has no nvpmodel, so no power mode", None),
        ({}, "pinned", "this machine shows no clock ranges", None),
    ],
)
def test_requirements(
    tree: Tree, spec: str, complaint: str | None, command: str | None, show: Show
) -> None:
    roots = show(tree)
    problems = require.unmet_conditions(spec, read_state(roots), roots)
    if complaint is None:
        assert problems == []
        board.require_board_state(spec, roots)
    else:
        (problem,) = problems
        assert problem.found.startswith(complaint) and problem.command == command
        with pytest.raises(BenchError, match=f"--require {spec}: ") as caught:
            board.require_board_state(spec, roots)
        assert complaint in str(caught.value) and "\n" not in str(caught.value)
        assert command is None or f"; run: {command}" in str(caught.value)


def test_warnings_of_a_run(show: Show) -> None:
    before = board.read_board_state(show(idle()))
    roots = show(maxn_load())
    found = board.board_warnings(before, board.read_board_state(roots), roots)
    throttled = WarningKind.THROTTLED
    assert found == (
        BenchWarning(throttled, "throttled: instantaneous-overcurrent events", "1284"),
        BenchWarning(throttled, "throttling: gpu-throttle-alert was raised"),
    )
    roots = show(cores_off())
    found = board.board_warnings(before, board.read_board_state(roots), roots)
    assert found is not None
    assert [warning.kind for warning in found] == [
        WarningKind.POWER_MODE,
        WarningKind.POWER_MODE,
        WarningKind.CLOCKS_NOT_PINNED,
    ]
    assert "the power mode changed" in found[0].text
    assert "run: sudo nvpmodel -m 0" in found[1].text
    assert "run: sudo jetson_clocks" in found[2].text
    empty = board.read_board_state(show({}))
    assert board.board_warnings(empty, empty, roots) is None


def test_cooling_down(show: Show, stage: TreeOnDisk) -> None:
    roots = show(maxn_load())
    told: list[float] = []

    def tell(celsius: float) -> None:
        told.append(celsius)
        if len(told) == 6:
            stage.apply_changes({f"{THERMAL}/thermal_zone8/temp": "49000\n"})

    waited = board.wait_for_cooldown(50.0, tell, roots=roots, interval=0.05)
    assert 0.3 <= waited < 30 and told == [88.125] * 6
    assert board.wait_for_cooldown(50.0, roots=roots) < 1


def test_a_board_that_does_not_cool_down(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(board, "time", clock)
    with pytest.raises(BenchError, match=r"--cooldown 20: still 45.6 °C after 0 s"):
        board.wait_for_cooldown(20, roots=show(idle()), limit=0.1, interval=0.05)
    assert slept == [0.05, 0.05]
    with pytest.raises(BenchError, match="--cooldown 50: this machine has no temperature sensor"):
        board.wait_for_cooldown(50, roots=show({}))


def test_only_the_timed_part_of_a_repetition_counts(show: Show) -> None:
    """A worker prepares for a while, and answers with what the timing took."""
    roots = show(idle() | supply(30, 5, 5, 1))
    with board.measure_energy(roots, hertz=4) as run:
        time.sleep(0.8)
        run.set_timed_part(400_000_000)
    fields = run.record_fields(tokens=16)
    assert fields["energy"]["seconds"] == pytest.approx(0.4, abs=0.001)
    assert fields["joules_per_token"] == pytest.approx(40 * 0.4 / 16, rel=0.01)
    assert run.sampler.energy().seconds > 0.75
    assert fields["energy"]["ended"] - fields["energy"]["started"] == pytest.approx(0.4, abs=0.001)
    assert abs(fields["energy"]["ended"] - time.time()) < 60


def test_the_fields_of_a_row(tmp_path: Path) -> None:
    runs = [
        {"joules_per_token": j, "tokens_per_joule": 1 / j, "energy": {"joules": j, "tokens": 1}}
        for j in (1, 4, 2)
    ]
    gap = {"joules_per_token": None, "tokens_per_joule": None, "energy": {"joules": 9, "tokens": 1}}
    fields = board.energy_fields([*runs, gap, {}, None])
    assert (fields["joules_per_token"], fields["tokens_per_joule"]) == (2, 0.5)
    assert len(fields["energy"]) == 6
    assert board.energy_fields([None, {}, gap]) == {}
    text = board.write_metrics_file(
        [RECORD | board.energy_fields([*runs, None])], tmp_path
    ).read_text()
    assert 'test="tg128"} 2.0\n' in text.partition("orinbench_run_joules{")[2]


def test_energy_with_gaps_is_not_put_on_tokens(show: Show, stage: TreeOnDisk) -> None:
    roots = show(idle())
    with board.measure_energy(roots, hertz=50) as run:
        time.sleep(0.1)
        stage.apply_changes({f"{HWMON}/hwmon1/curr1_input": "\n"})
        time.sleep(0.1)
    fields = run.record_fields(tokens=100)
    assert fields["joules_per_token"] is None and fields["energy"]["gap_seconds"] > 0.05


def test_a_region_that_fails_is_measured_all_the_same(show: Show) -> None:
    with pytest.raises(RuntimeError), board.measure_energy(show(idle()), hertz=50) as run:
        raise RuntimeError
    assert run.ended is not None


RECORD: dict[str, Any] = {
    "model_type": 'llama 1B "Q6_K"',
    "backend": "tinygrad:NV",
    "test": "tg128",
    "median_ts": 41.5,
    "joules_per_token": 0.9,
    "tokens_per_joule": 1.11,
    "ttft_warm_s": None,
    "energy": {"joules": 115.2, "tokens": 128, "started": 1000.0, "ended": 1003.1},
}


def test_figures_for_the_textfile_collector(tmp_path: Path) -> None:
    other = RECORD | {"test": "pp512", "energy": None, "joules_per_token": None}
    file = board.write_metrics_file([RECORD, other], tmp_path)
    text = file.read_text()
    labels = 'backend="tinygrad:NV",model="llama 1B \\"Q6_K\\"",test="tg128"'
    assert f"orinbench_tokens_per_second{{{labels}}} 41.5" in text
    assert f"orinbench_run_joules{{{labels}}} 115.2" in text
    assert text.count("orinbench_joules_per_token{") == 1 and "ttft" not in text
    assert file.stat().st_mode & 0o777 == 0o644
    # Rows that would be one series: the newest.
    board.write_metrics_file([RECORD, RECORD | {"median_ts": 50.0}], tmp_path)
    newest = file.read_text()
    assert newest.count("orinbench_tokens_per_second{") == 1 and "} 50.0" in newest
    assert "pp512" not in newest and len(list(tmp_path.iterdir())) == 1
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, "")
