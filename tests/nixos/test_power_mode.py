"""The power mode is set by name and read back from the board's own files."""

import importlib
from pathlib import Path

import pytest
from tests.nixos.fake_board import CPU, GPU, TPC_MASK, write_board

# A script beside the module that runs it, in no package: conftest.py names its folder.
power_mode = importlib.import_module("power_mode")
ModeError, main, read_config = power_mode.ModeError, power_mode.main, power_mode.read_config


def write(root: Path, name: str, value: str) -> None:
    (root / name.lstrip("/")).write_text(value + "\n")


def check(root: Path, mode: str, *flags: str) -> None:
    main(["check", mode, "--root", str(root), *flags])


def refusal(capsys: pytest.CaptureFixture[str], root: Path, mode: str, *flags: str) -> str:
    """The one line of a check that fails."""
    with pytest.raises(SystemExit) as stop:
        check(root, mode, *flags)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    return output.err


@pytest.mark.parametrize("mode", ["MAXN", "MODE_15W", "MODE_30W", "MODE_50W"])
def test_a_board_in_its_mode_passes(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_board(tmp_path, mode)
    check(tmp_path, mode, "--pinned")
    assert capsys.readouterr().out == f"the board is in {mode} with pinned clocks\n"


def test_another_mode_names_all_that_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_board(tmp_path, "MODE_30W")
    line = refusal(capsys, tmp_path, "MAXN")
    for part in (
        "nvpmodel's recorded mode is MODE_30W",
        "CPU_ONLINE CORE_3 is 0, MAXN wants 1",
        "TPC_POWER_GATING TPC_PG_MASK is 240, MAXN wants 0",
        "CPU_A78_0 may run up to 1728000, MAXN wants 2201600",
        "GPU may run up to 612000000, MAXN wants 1300500000",
        "reboot",
    ):
        assert part in line


def test_nvpmodel_says_maxn_but_the_gpu_kept_its_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason for reading back: the record alone would pass."""
    write_board(tmp_path)
    write(tmp_path, TPC_MASK, "240")
    line = refusal(capsys, tmp_path, "MAXN")
    assert "TPC_PG_MASK is 240, MAXN wants 0" in line
    assert "recorded mode" not in line


@pytest.mark.parametrize("written", ["0xf0", "240", "0XF0"])
def test_the_mask_is_a_number_however_it_is_written(tmp_path: Path, written: str) -> None:
    write_board(tmp_path, "MODE_30W")
    write(tmp_path, TPC_MASK, written)
    check(tmp_path, "MODE_30W")


def test_clocks_that_move_count_only_where_they_must_be_pinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_board(tmp_path, pinned=False)
    check(tmp_path, "MAXN")
    capsys.readouterr()
    line = refusal(capsys, tmp_path, "MAXN", "--pinned")
    assert "GPU may run from 306000000 to 1300500000" in line
    assert "CPU_A78_0 may run from 729600 to 2201600" in line


def test_a_limit_between_two_steps_is_the_lower_step(tmp_path: Path) -> None:
    """MODE_50W asks for 1500000 kHz; the table has 1113600 and 1728000."""
    write_board(tmp_path, "MODE_50W")
    assert (tmp_path / f"{CPU}/cpu0/cpufreq/scaling_max_freq"[1:]).read_text() == "1113600\n"
    check(tmp_path, "MODE_50W", "--pinned")


def test_a_knob_that_this_kernel_lacks_is_not_asked(tmp_path: Path) -> None:
    write_board(tmp_path)
    (tmp_path / f"{GPU}/available_frequencies"[1:]).unlink()
    (tmp_path / TPC_MASK[1:]).unlink()
    check(tmp_path, "MAXN")


def test_nvpmodel_never_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_board(tmp_path, recorded=False)
    assert "nvpmodel's recorded mode is none" in refusal(capsys, tmp_path, "MAXN")


def test_no_jetson(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, tmp_path, "MAXN")
    assert "etc/nvpmodel.conf: No such file or directory: is this a Jetson?" in line


def test_a_name_that_the_board_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_board(tmp_path)
    line = refusal(capsys, tmp_path, "MAXN_SUPER")
    assert "no power mode 'MAXN_SUPER': it has MAXN, MODE_15W, MODE_30W, MODE_50W" in line


def test_a_file_that_is_no_nvpmodel_conf(tmp_path: Path) -> None:
    (tmp_path / "nvpmodel.conf").write_text("# nothing\nfoo bar baz\n")
    with pytest.raises(ModeError, match="no POWER_MODEL section"):
        read_config(tmp_path / "nvpmodel.conf")


NVPMODEL = """#!/bin/sh
echo "$@" >>ROOT/called
[ -e ROOT/free ] && exit 0
echo "NVPM WARN: Golden image context is already created"
echo "NVPM WARN: Reboot required for changing to this power mode: 0"
echo "NVPM WARN: DO YOU WANT TO REBOOT NOW? enter YES/yes to confirm:"
read -r answer && [ "$answer" = NO ] || exit 9
echo "NVPM ERROR: optMask is 1, no request for power mode" >&2
exit 234
"""


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A board in 30 W whose GPU somebody has had open; nvpmodel as the forums have it."""
    write_board(tmp_path, "MODE_30W")
    (tmp_path / "nvpmodel").write_text(NVPMODEL.replace("ROOT", str(tmp_path)))
    (tmp_path / "nvpmodel").chmod(0o755)
    return tmp_path


def set_mode(root: Path, mode: str, *flags: str) -> int:
    """The exit code of `set`."""
    try:
        main(["set", mode, "--root", str(root), "--nvpmodel", str(root / "nvpmodel"), *flags])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_set_calls_nvpmodel_with_the_number_of_the_name(used: Path) -> None:
    (used / "free").touch()
    assert set_mode(used, "MODE_50W") == 0
    assert (used / "called").read_text() == f"-f {used}/etc/nvpmodel.conf -m 3\n"


def test_a_mode_that_waits_for_a_reboot_is_said_and_fails_nothing(
    used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first switch of a board in MODE_30W: set and readback pass, and say what to do."""
    assert set_mode(used, "MAXN") == 0
    assert "MAXN waits for the next boot: reboot the board" in capsys.readouterr().out
    check(used, "MAXN", "--pinned")
    said = capsys.readouterr().out
    assert "not in MAXN with pinned clocks yet, reboot it: " in said and "TPC_PG_MASK" in said
    assert (used / "called").read_text().count("\n") == 1
    # After the reboot nothing in run/ is left, and a board that did not follow is a failure again.
    (used / "run/orin-power-mode").unlink()
    assert "the board is not in MAXN" in refusal(capsys, used, "MAXN")


def test_set_refuses_a_name_that_the_board_lacks_and_calls_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_board(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["set", "30W", "--root", str(tmp_path), "--nvpmodel", "/bin/false"])
    assert stop.value.code == 2
    assert "no power mode '30W'" in capsys.readouterr().err
