"""Whose boot an upgrade may end: that of a system on trial, and no other."""

import argparse
import errno
import importlib
import itertools
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.nixos.recorded import FOLDER, STORE

upgrade = importlib.import_module("upgrade")
reachable = importlib.import_module("reachable")


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A board with three generations; `new` is the newest, `good` has passed."""
    for folder in ("nix/var/nix/profiles", "run", "var/lib/orin-upgrade"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("older", "good", "new"):
        (tmp_path / "store" / name).mkdir(parents=True)
    (tmp_path / "nix/var/nix/profiles/system").symlink_to(tmp_path / "store/new")
    (tmp_path / "var/lib/orin-upgrade/good").write_text(f"{tmp_path}/store/good\n")
    return tmp_path


@pytest.mark.parametrize(
    ("booted", "bad", "ends"),
    [
        ("new", "", True),
        ("good", "", False),
        # Chosen in the menu: a person wants this one, though no check of it is noted any more.
        ("older", "", False),
        # Given up, and its restart has come to no end.
        ("older", "older", True),
    ],
)
def test_a_boot_on_trial_is_ended_and_one_that_a_person_chose_is_not(
    board: Path, monkeypatch: pytest.MonkeyPatch, booted: str, bad: str, ends: bool
) -> None:
    for link in ("booted-system", "current-system"):
        (board / "run" / link).symlink_to(board / "store" / booted)
    (board / "var/lib/orin-upgrade/bad").write_text(f"{board}/store/{bad}\n" if bad else "")
    asked: list[list[str]] = []
    monkeypatch.setattr(upgrade.subprocess, "run", lambda command, **_: asked.append(command))
    code = upgrade.main(["deadline", "--root", str(board), "--esp", str(board / "boot")])
    assert asked == ([["systemctl", "--force", "reboot"]] if ends else [])
    assert code == int(ends)


@pytest.fixture
def menu(board: Path) -> Path:
    """The boot menu as nixpkgs' installation of `new` leaves it, with noise beside: a power cut may
    leave anything in a file of FAT, and a person another system's entry."""
    entries = board / "boot/loader/entries"
    entries.mkdir(parents=True)
    entries.with_name("loader.conf").write_bytes(b"timeout 5\n\xff\xfe\ndefault nixos-2.conf\n")
    (entries / "nixos-0.conf").write_bytes(b"\xff\x00noise")
    (entries / "windows.conf").write_text("title Windows\nefi /EFI/w.efi\n")
    for n, name in enumerate(("good", "new"), 1):
        text = f"title NixOS\nversion {n}\nlinux /{n}.efi\noptions init={board}/store/{name}/init\n"
        (entries / f"nixos-{n}.conf").write_text(text)
    return entries


def run(board: Path, *action: str) -> int:
    return int(upgrade.main([*action, "--root", str(board), "--esp", str(board / "boot")]))


def ours(menu: Path) -> set[str]:
    return {path.name for path in menu.glob("orin-*")}


def test_noise_in_the_boot_menu_stops_no_upgrade(board: Path, menu: Path) -> None:
    assert run(board, "arm", str(board / "store/new")) == 0
    assert ours(menu) == {"orin-next+3.conf", "orin-good.conf"}
    settings = menu.with_name("loader.conf").read_bytes()
    assert settings == b"default orin-*\ntimeout 5\n\xff\xfe\n"


def test_the_good_system_comes_first_before_a_new_one_is_written(
    board: Path, menu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may go between any two of these."""
    write, begins = upgrade.write_menu_entry, []

    def written(to: object, name: str, *more: str) -> None:
        begins.append((name, menu.with_name("loader.conf").read_bytes()[:14]))
        write(to, name, *more)

    monkeypatch.setattr(upgrade, "write_menu_entry", written)
    assert run(board, "arm", str(board / "store/new")) == 0
    assert begins == [("orin-good", b"timeout 5\n\xff\xfe\nd"), ("orin-next+3", b"default orin-*")]


def test_a_full_boot_partition_fails_no_check_of_a_good_system(
    board: Path, menu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit that fails is started again: it would be for ever, the board well."""
    for link in ("booted-system", "current-system"):
        (board / "run" / link).symlink_to(board / "store/new")
    monkeypatch.setattr(upgrade, "problems_after_wait", lambda options: [])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upgrade, "write_menu_entry", full)
    arguments = ["--root", str(board), "--esp", str(board / "boot")]
    assert upgrade.main(["check", *arguments]) == 0
    said = capsys.readouterr()
    assert "store/new is good" in said.out
    assert f"{board}/boot: No space left on device" in said.err
    with pytest.raises(SystemExit, match="No space left on device"):
        upgrade.main(["arm", str(board / "store/new"), *arguments])


@pytest.mark.parametrize(("booted", "restarts"), [("new", True), ("good", False)])
def test_a_program_that_does_not_start_ends_no_boot_of_a_good_system(
    board: Path, menu: Path, booted: str, restarts: bool
) -> None:
    """Whose last try is under way, or over."""
    assert run(board, "arm", str(board / "store/new")) == 0
    (menu / "orin-next+3.conf").rename(menu / "orin-next+0-3.conf")
    (board / "run/booted-system").symlink_to(board / "store" / booted)
    (line,) = re.findall(r"-c '(.*)'", (FOLDER / "orin-upgrade-deadline.service").read_text())
    line = line.replace("/run/", f"{board}/run/").replace("/boot/", f"{board}/boot/")
    for name, is_now in ((f"{STORE}/bin/python3", "false"), ("systemctl", "echo"), ("$$", "$")):
        line = line.replace(name, is_now)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("--force reboot\n" * restarts, "")


@pytest.mark.parametrize("notes", [b"\n", b"\xff\xfe\n", b"\x00\x00", b"4.2\n/nix/store/gone\n"])
def test_notes_of_noise_or_of_an_older_version_name_no_system(
    board: Path, menu: Path, notes: bytes
) -> None:
    for name in ("good", "bad"):
        (board / "var/lib/orin-upgrade" / name).write_bytes(notes)
    assert run(board, "arm", str(board / "store/new")) == 0 and not ours(menu)
    good = f"{board}/store/good\n".encode()
    (board / "var/lib/orin-upgrade/good").write_bytes(notes + b"\n" + good)
    assert run(board, "arm", str(board / "store/new")) == 0
    assert ours(menu) == {"orin-next+3.conf", "orin-good.conf"}


@pytest.mark.parametrize("bad", [False, True])
def test_a_check_that_passes_late_leaves_the_tries_of_an_upgrade(
    board: Path, menu: Path, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    """An upgrade was installed for the next boot while the check waited: two at once."""
    for link in ("booted-system", "current-system"):
        (board / "run" / link).symlink_to(board / "store/good")
    profile = board / "nix/var/nix/profiles/system"
    profile.unlink()
    profile.symlink_to(board / "store/good")

    def problems_after_wait(_: object) -> list[str]:
        profile.unlink()
        profile.symlink_to(board / "store/new")
        assert run(board, "arm", str(board / "store/new")) == 0
        if bad:
            (board / "var/lib/orin-upgrade/bad").write_text(f"{board}/store/new\n")
        return []

    monkeypatch.setattr(upgrade, "problems_after_wait", problems_after_wait)
    assert run(board, "check") == 0
    assert ours(menu) == {"orin-good.conf"} | (set() if bad else {"orin-next+3.conf"})
    # The collector keeps it, whatever generations come after it.
    assert (board / upgrade.GOOD).resolve() == board / "store/good"


def test_a_profile_is_as_nix_env_reads_it(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NAME names NAME-N-link in its folder, which names the system; what is beside it is left."""
    profile = board / "nix/var/nix/profiles/system"
    for name, target in {
        "system-9-link": "older",
        "system-10-link": "new",
        "system-x-link": "x",
    }.items():
        profile.with_name(name).symlink_to(board / "store" / target)
    profile.with_name("system.new").symlink_to("left-by-a-power-cut")
    for name, link in {"older": "system-9-link", "good": "system-11-link"}.items():
        upgrade.set_profile(profile, board / "store" / name)
        assert str(profile.readlink()) == link and profile.resolve() == board / "store" / name
    upgrade.set_profile(profile, board / "store/good", alone=True)
    left = {path.name for path in profile.parent.iterdir()}
    assert left == {"system", "system-x-link", "system-11-link"}
    (board / "file").touch()
    upgrade.set_profile(board / "file/system", board / "store/new")
    assert "file/system: not written: " in capsys.readouterr().err


def test_an_upgrade_that_comes_while_a_check_waits_is_checked_too(
    board: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemd starts no second check then; a timer that was missed begins right after a boot."""
    (board / "run/booted-system").symlink_to(board / "store/good")
    running, profile = board / "run/current-system", board / "nix/var/nix/profiles/system"
    running.symlink_to(board / "store/good")
    profile.unlink()
    profile.symlink_to(board / "store/good")

    def problems_after_wait(_: object) -> list[str]:
        if running.resolve().name == "new":
            return ["orin-gpu.service is failed"]
        for link in (running, profile):
            link.unlink()
            link.symlink_to(board / "store/new")
        (board / "run/orin-upgrade").mkdir()
        (board / "run/orin-upgrade/trying").write_text(f"{board}/store/new\n")
        return []

    went: list[Path] = []

    def go_back_to_good(_: object, good: Path, bad: Path, __: object) -> str:
        went.extend((good, bad))
        return ""

    monkeypatch.setattr(upgrade, "problems_after_wait", problems_after_wait)
    monkeypatch.setattr(upgrade, "go_back_to_good", go_back_to_good)
    assert (
        upgrade.main(["check", "--root", str(board), "--esp", str(board / "boot")])
        == upgrade.DECIDED
    )
    assert went == [board / "store/good", board / "store/new"]
    assert "orin-gpu.service is failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"ifname": "eth0", "flags": ["BROADCAST", "UP", "LOWER_UP"]}, True),
        (
            {"ifname": "br-lan", "flags": ["UP", "LOWER_UP"], "linkinfo": {"info_kind": "bridge"}},
            True,
        ),
        ({"ifname": "br-0123456789ab", "flags": ["UP", "LOWER_UP"]}, False),
        ({"ifname": "eth0", "flags": ["NO-CARRIER", "BROADCAST", "UP"]}, False),
        ({"ifname": "eth0", "flags": ["BROADCAST", "UP"]}, False),  # not told yet
        (
            {"ifname": "wg0", "flags": ["UP", "LOWER_UP"], "linkinfo": {"info_kind": "wireguard"}},
            False,
        ),
        (
            {"ifname": "tailscale0", "flags": ["UP", "LOWER_UP"], "linkinfo": {"info_kind": "tun"}},
            False,
        ),
        (
            {
                "ifname": "flannel.1",
                "flags": ["UP", "LOWER_UP"],
                "linkinfo": {"info_kind": "vxlan"},
            },
            False,
        ),
        ({"ifname": "incusbr0", "flags": ["UP", "LOWER_UP"]}, False),
        ({"ifname": "lo", "flags": ["LOOPBACK", "UP", "LOWER_UP"]}, False),
    ],
)
def test_an_address_counts_where_others_could_use_it(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, object], found: bool
) -> None:
    """As `ip -json -details address` of iproute2 6.1 writes its links."""
    link = {**said, "addr_info": [{"family": "inet", "local": "10.0.0.2"}]}
    monkeypatch.setattr(reachable, "_run_ip", lambda *_: json.dumps([link]))
    assert bool(reachable.reachable_addresses()) == found


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ({"10.0.0.2": "SSH-2.0-x", "10.0.1.2": ""}, []),
        # sshd listens on the other address alone.
        ({"10.0.0.2": None, "10.0.1.2": "SSH-2.0-x"}, []),
        (
            {"10.0.0.2": None, "10.0.1.2": "HTTP/1.1 400"},
            [
                "port 22 of 10.0.0.2 does not answer from outside: refused",
                "port 22 of 10.0.1.2 says 'HTTP/1.1 400', which is not ssh",
            ],
        ),
        ({}, ["no connected interface has an address that others could know"]),
    ],
)
def test_ssh_answers_at_one_of_the_boards_addresses(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | None], wrong: list[str]
) -> None:
    def ask(address: str, _: int) -> str:
        if (said := answers[address]) is None:
            raise OSError("Traceback\nrefused")
        return said

    monkeypatch.setattr(reachable, "reachable_addresses", lambda: list(answers))
    monkeypatch.setattr(reachable, "read_banner_from_outside", ask)
    assert reachable.reachability_problems(22, None) == wrong


UP, AGAIN, STARTS, FAILED = ("active", "1"), ("active", "2"), ("activating", ""), ("failed", "")


@pytest.mark.parametrize(
    ("looks", "wrong"),
    [
        ([UP, UP], []),
        ([STARTS, UP, UP], []),
        ([FAILED], ["x.service is failed"]),
        # It was up when it was first looked at.
        ([UP, FAILED], ["x.service is failed"]),
        ([UP, AGAIN, AGAIN], []),
        ([UP, AGAIN, STARTS, UP, STARTS], ["x.service is activating"]),
        ([UP, AGAIN, UP, AGAIN, UP, AGAIN], ["x.service does not stay up"]),
    ],
)
def test_what_dies_soon_after_its_start_has_not_come_up(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[str, str]], wrong: list[str]
) -> None:
    options = argparse.Namespace(units=["x.service"], seconds=4.5, ssh=None, peer=None)
    seen = iter(looks)
    clock = itertools.count()
    monkeypatch.setattr(upgrade, "unit_states_and_start_ids", lambda units: {units[0]: next(seen)})
    time = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(upgrade, "time", time)
    assert upgrade.problems_after_wait(options) == wrong
