"""tools/series install, and the base that it downloads."""

import os
import shutil
import subprocess
import tarfile
import venv
from pathlib import Path

import pip
import pytest
from tests.tools.conftest import Repository, said

from patchseries import tree as bases
from patchseries.process import SeriesError
from patchseries.series import Base, read_series

Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch


# *** install ***


def test_install_once_and_whole(repository: Repository, tmp_path: Path, capsys: Capture) -> None:
    repository.series()
    place = tmp_path / "venv"
    venv.create(place)  # with_pip takes as long as all the rest
    (packages,) = place.glob("lib/python3*/site-packages")
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")
    capsys.readouterr()
    assert repository.run("install", place) == 0
    version = read_series(repository.root).patched_version()
    assert f"tinygrad {version}: installed" in capsys.readouterr().out
    code = "import tinygrad, importlib.metadata as m; print(tinygrad.b, m.version('tinygrad'))"
    python = place / "bin" / "python"
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == f"1 {version}\n"
    # The second run needs neither archive nor network.
    repository.sdist.rename(tmp_path / "away")
    assert repository.run("install", place) == 0
    assert "already there" in capsys.readouterr().out
    # A file that is no longer what was installed is put right.
    (tmp_path / "away").rename(repository.sdist)
    (broken,) = place.glob("lib/python3*/site-packages/tinygrad/__init__.py")
    broken.write_text("")
    assert repository.run("install", place) == 0
    assert "b = 1" in broken.read_text()
    # A series that does not apply leaves what is there.
    patch = repository.folder / "0001-set-b.patch"
    patch.write_text(patch.read_text().replace("-b = 0", "-b = 9"))
    capsys.readouterr()
    assert repository.run("install", place) == 1
    assert "does not apply" in said(capsys)
    assert "b = 1" in broken.read_text()


def test_an_sdist_is_unpacked_by_python_3_11_2(
    repository: Repository, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Its extractall has no `filter`, which came with 3.11.4, and gives root the maker's files."""
    whole = tarfile.TarFile.extractall

    def plain(tar: tarfile.TarFile, path: Path) -> None:
        tar.extraction_filter = lambda member, _path: member
        whole(tar, path)

    monkeypatch.setattr(tarfile.TarFile, "extractall", plain)
    tree = bases.unpack_tar(repository.sdist, tmp_path / "tree")
    assert (tree / "pyproject.toml").stat().st_uid == os.getuid()


def test_install_wants_an_environment(
    repository: Repository, tmp_path: Path, capsys: Capture
) -> None:
    assert repository.run("install", tmp_path) == 2
    assert "not a virtual environment" in said(capsys)


# *** the sdist ***


def test_wrong_sdist_is_refused(repository: Repository, tmp_path: Path, capsys: Capture) -> None:
    repository.pin("0" * 64)
    assert repository.run("checkout", tmp_path / "tree") == 2
    assert f"base.json wants {'0' * 64}" in said(capsys)
    repository.sdist.unlink()
    assert repository.run("checkout", tmp_path / "tree") == 2
    assert "no such file" in said(capsys)


def test_cached_sdist_is_checked_on_every_use(
    repository: Repository, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = tmp_path / "tinygrad-orin" / "tinygrad-0.13.0.tar.gz"
    cached.parent.mkdir()
    cached.write_bytes(repository.sdist.read_bytes())
    base = read_series(repository.root).base
    assert bases.fetch_sdist(base, None) == cached
    cached.write_bytes(b"cut short")
    fetched: list[str] = []

    def download(requirement: str, to: Path, python: object) -> None:
        fetched.append(requirement)
        to.write_bytes(repository.sdist.read_bytes())

    monkeypatch.setattr(bases, "download_sdist", download)
    assert bases.fetch_sdist(base, None) == cached
    assert fetched == [f"tinygrad==0.13.0 --hash=sha256:{base.sha256}"]
    monkeypatch.setattr(bases, "download_sdist", lambda r, to, p: to.write_bytes(b"another"))
    cached.unlink()
    with pytest.raises(SeriesError, match="sha256 is"):
        bases.fetch_sdist(base, None)
    assert not cached.exists()


def test_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SeriesError, match=r"cannot download tinygrad==0\.13\.0") as caught:
        bases.fetch_sdist(Base("tinygrad", "0.13.0", "0" * 64), None)
    assert "\n" not in str(caught.value)
    assert [*(tmp_path / "tinygrad-orin").iterdir()] == []
