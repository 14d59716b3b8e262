"""Secrets nobody has set are made once, for root alone; a password is said on the console."""

import subprocess
from pathlib import Path

from tests.nixos.recorded import recorded

SCRIPT = recorded()["orin-grafana-secrets-start.sh"]
NAMES = ("grafana-secret-key", "grafana-admin-password")


def make(folder: Path) -> str:
    """Run the unit's script on a folder; what it logs."""
    text = SCRIPT.replace("/var/lib/orin-grafana", str(folder))
    text = text.replace("/dev/console", str(folder / "console"))
    command = ["bash", "-ec", f"umask 0277\n{text}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_each_is_made_once_and_a_password_alone_is_said(tmp_path: Path) -> None:
    log = make(tmp_path)
    key, password = ((tmp_path / name).read_text() for name in NAMES)
    assert len(key) == len(password) == 43 and key != password
    said = (tmp_path / "console").read_text()
    assert password in said and key not in said
    assert str(tmp_path / NAMES[0]) in log and password not in log
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in NAMES} == {0o400}
    (tmp_path / "console").unlink()
    assert make(tmp_path) == ""
    assert [(tmp_path / name).read_text() for name in NAMES] == [key, password]
    assert not (tmp_path / "console").exists()


def test_an_empty_or_half_written_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).touch()
    (tmp_path / f"{NAMES[0]}.new").write_text("half")
    make(tmp_path)
    assert len((tmp_path / NAMES[0]).read_text()) == 43
    assert not (tmp_path / f"{NAMES[0]}.new").exists()
