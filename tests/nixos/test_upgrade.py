"""Whose boot an upgrade may end: that of a system on trial, and no other."""

import importlib
from pathlib import Path

import pytest

upgrade = importlib.import_module("upgrade")


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
