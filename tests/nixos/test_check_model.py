"""A model that the server could not open is refused in one line."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

# A script beside the module that runs it, in no package: conftest.py names its folder.
check_model = importlib.import_module("check_model")
OPTION = "orin.llm-server.models.main.file"


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(check_model.__file__), OPTION, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_gguf_passes_in_silence(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    result = run(tmp_path / "model.gguf")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file: copy a GGUF there"),
        (b"", "it does not start with GGUF but with b''"),
        (b"<html>404</html>", "it does not start with GGUF but with b'<htm'"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    result = run(path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{OPTION} = {path}: {says}")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert check_model.problem(tmp_path) == "it is a folder: name the .gguf file in it"


def test_a_file_that_the_server_may_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    answer = check_model.problem(Path("/home/me/model.gguf"))
    assert answer == "the server may not read it: `chmod a+r` the file"
