"""Secrets nobody has set are made once, for root alone; a password is said on the console."""

import importlib
from pathlib import Path

import pytest

make_secrets = importlib.import_module("make_secrets")


def test_each_is_made_once_and_a_password_alone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = tmp_path / "console"
    monkeypatch.setattr(make_secrets, "CONSOLE", console)
    names = ["grafana-secret-key", "grafana-admin-password"]
    make_secrets.main(tmp_path, names)
    key, password = ((tmp_path / name).read_text() for name in names)
    assert len(key) >= 43 and len(password) >= 43 and key != password
    assert password in console.read_text() and key not in console.read_text()
    log = capsys.readouterr().out
    assert str(tmp_path / names[0]) in log and password not in log
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in names} == {0o400}
    console.unlink()
    make_secrets.main(tmp_path, names)
    assert [(tmp_path / name).read_text() for name in names] == [key, password]
    assert not console.exists()


def test_an_empty_or_half_written_file_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    (tmp_path / ".key.new").write_text("half")
    secret = make_secrets.make(tmp_path, "key")
    assert secret and (tmp_path / "key").read_text() == secret
    assert not (tmp_path / ".key.new").exists()
