"""tools/series: checkout, export, verify, status, install."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pip
import pytest
from tests.tools.conftest import TOOLS, Edit, Repository

from patchseries import base as bases
from patchseries.errors import SeriesError
from patchseries.model import Base
from patchseries.reader import read_series
from patchseries.tree import AUTHOR

Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch


def said(capture: Capture) -> str:
    """The one line on stderr."""
    err = capture.readouterr().err
    assert err.count("\n") == 1 and err.startswith("series: "), err
    return err


# *** checkout and export ***


def test_export_of_checkout_is_identical_and_stable(repository: Repository, tmp_path: Path) -> None:
    repository.series()
    files = {path.name: path.read_bytes() for path in repository.folder.iterdir()}
    text = files["0001-set-b.patch"].decode()
    assert text.startswith("From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001")
    assert "Date: Sat, 1 Jan 2000 00:00:00 +0000\n" in text
    assert "Patch-Name" not in text and "\n-- \n" not in text
    again = tmp_path / "again"
    assert repository.run("checkout", again) == 0
    assert repository.run("export", again) == 0
    assert files == {path.name: path.read_bytes() for path in repository.folder.iterdir()}


def test_two_checkouts_have_the_same_commits(repository: Repository, tmp_path: Path) -> None:
    repository.series()
    heads = set()
    for name in ("one", "two"):
        assert repository.run("checkout", tmp_path / name) == 0
        heads.add(repository.git(tmp_path / name, "rev-parse", "HEAD"))
    assert len(heads) == 1


def test_a_new_commit_is_the_projects(repository: Repository, monkeypatch: MonkeyPatch) -> None:
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"):
        monkeypatch.delenv(name, raising=False)
    tree = repository.series()
    subprocess.run(
        ["git", "commit", "-q", "--amend", "--reset-author", "-C", "HEAD"], cwd=tree, check=True
    )
    assert repository.run("export", tree) == 0
    authors = [patch.author for patch in read_series(repository.root).patches]
    assert authors == ["A Person <person@example.invalid>", "{} <{}>".format(*AUTHOR)]


def test_git_am_takes_the_patches(repository: Repository, tmp_path: Path) -> None:
    tree = repository.series()
    repository.git(tree, "checkout", "-q", "base")
    files = [str(path) for path in sorted(repository.folder.glob("*.patch"))]
    repository.git(tree, "am", "-q", *files)
    assert "m = 1" in (tree / "tinygrad" / "__init__.py").read_text()


def test_export_takes_edits_and_drops_removed_patches(repository: Repository) -> None:
    tree = repository.series()
    repository.git(tree, "reset", "-q", "--hard", "HEAD~1")
    repository.add(tree, 7, "p")
    assert repository.run("export", tree) == 0
    names = sorted(path.name for path in repository.folder.glob("*.patch"))
    assert names == ["0001-set-b.patch", "0007-set-p.patch"]
    assert (repository.folder / "series").read_text().split() == names


def test_export_names_a_commit_without_name(repository: Repository) -> None:
    tree = repository.series()
    message = repository.git(tree, "show", "-s", "--format=%B")
    kept = [line for line in message.split("\n") if not line.startswith("Patch-Name")]
    repository.git(tree, "commit", "-q", "--amend", "-F", "-", stdin="\n".join(kept))
    assert repository.run("export", tree) == 0
    assert (repository.folder / "0002-set-m-is-1.patch").is_file()


def test_export_wants_clean_commits(repository: Repository, capsys: Capture) -> None:
    tree = repository.series()
    (tree / "tinygrad" / "__init__.py").write_text("changed = 1\n")
    before = {path.name: path.read_bytes() for path in repository.folder.iterdir()}
    capsys.readouterr()
    assert repository.run("export", tree) == 2
    assert "no commit has" in said(capsys)
    assert repository.run("export", repository.root) == 2
    assert "not a checkout" in said(capsys)
    repository.git(repository.root, "init", "--quiet")
    assert repository.run("export", repository.root) == 2
    assert "not a checkout" in said(capsys)
    assert before == {path.name: path.read_bytes() for path in repository.folder.iterdir()}


def test_checkout_wants_an_empty_folder(repository: Repository, capsys: Capture) -> None:
    assert repository.run("checkout", repository.root) == 2
    assert "not an empty folder" in said(capsys)


def test_checkout_wants_a_folder_that_can_be_written(
    repository: Repository, capsys: Capture
) -> None:
    assert repository.run("checkout", repository.sdist / "tree") == 2
    assert f"series: {repository.sdist}: " in said(capsys)


def test_failed_checkout_leaves_nothing(
    repository: Repository, edit: Edit, tmp_path: Path, capsys: Capture
) -> None:
    repository.series()
    edit("-b = 0", "-b = 9")
    capsys.readouterr()
    target = tmp_path / "place" / "tree"
    assert repository.run("checkout", target) == 1
    assert "0001-set-b.patch: does not apply: error: patch failed" in said(capsys)
    assert [*target.parent.iterdir()] == []


# *** headers ***


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("Why: fix\n", "", "0001-set-b.patch: trailer 'Why:' is missing"),
        ("Why: fix", "Why: fun", "'Why: fun', want one of enable-hw, fix, perf, packaging"),
        ("Why: fix", "Why: fix\nWhy: fix", "trailer 'Why:' appears 2 times"),
        ("Why: fix", "Whence: fix", "unknown trailer 'Whence: fix'"),
        ("Status: Pending", "Status: carried", "'Upstream-Status: carried', want one of Pending"),
        ("Depends-on: none", "Depends-on: b", "'Depends-on: b', want 'none' or numbers"),
        ("Depends-on: none", "Depends-on: 0004", "depends on 0004, which does not come before it"),
        ("Tests: tests/patches/test_b.py::test_value", "Tests: all", "'Tests: all', want a pytest"),
        ("Verified: cpu", "Verified: yes", "'Verified: yes', want 'nothing yet' or some of cpu"),
        ("2026-11-21", "yesterday", "'Last-Update: yesterday', want a date as in 2026-11-21"),
        ("Subject: [PATCH] ", "Topic: ", "0001-set-b.patch: not in git format-patch form"),
        ("Why: fix\nUpstream", "Why: fix\n\nand more\n\nUpstream", "trailer 'Why:' is missing"),
        ("set: b is 1", "set: b is 1 " + "x" * 70, "the subject 72 at most"),
        ("A Person <", "A Person ", "want 'Name <address>'"),
    ],
)
def test_wrong_header_is_one_line(
    repository: Repository, edit: Edit, capsys: Capture, old: str, new: str, line: str
) -> None:
    repository.series()
    edit(old, new)
    capsys.readouterr()
    assert repository.run("status") == 2
    assert line in said(capsys)


def test_series_and_folder_must_agree(repository: Repository, capsys: Capture) -> None:
    repository.series()
    series = repository.folder / "series"
    listed = series.read_text()
    capsys.readouterr()
    series.write_text("0001-set-b.patch\n")
    assert repository.run("status") == 2
    assert "0004-set-m.patch: not named in" in said(capsys)
    series.write_text(listed + "0009-gone.patch\n")
    assert repository.run("status") == 2
    assert "names 0009-gone.patch, which is not there" in said(capsys)
    series.write_text("0004-set-m.patch\n0001-set-b.patch\n")
    assert repository.run("status") == 2
    assert "0001-set-b.patch does not come after 0004-set-m.patch" in said(capsys)
    (repository.folder / "base.json").write_text("{}")
    assert repository.run("status") == 2
    assert 'want {"name", "version", "sha256"}' in said(capsys)


def test_status_and_its_check(repository: Repository, capsys: Capture) -> None:
    repository.series(m="0001")
    capsys.readouterr()
    assert repository.run("status") == 0
    table = capsys.readouterr().out
    assert "| [0004](tinygrad/0004-set-m.patch) | set: m is 1 | fix | Pending | 0001 |" in table
    readme = repository.root / "patches" / "README.md"
    readme.write_text(table)
    assert repository.run("status", "--check") == 0
    readme.write_text(table + "by hand\n")
    capsys.readouterr()
    assert repository.run("status", "--check") == 1
    assert "is not what the headers say" in said(capsys)


def test_hash_covers_base_series_and_patches(repository: Repository, edit: Edit) -> None:
    repository.series()
    series = read_series(repository.root)
    names = ("base.json", "series", "0001-set-b.patch", "0004-set-m.patch")
    want = hashlib.sha256(b"".join((repository.folder / n).read_bytes() for n in names))
    assert series.installed_version() == f"0.13.0+orin.{want.hexdigest()[:12]}"
    edit("What was wrong", "What went wrong")
    assert read_series(repository.root).hash() != want.hexdigest()


# *** verify ***


def test_verify_holds_and_leaves_out_what_needs_a_patch(
    repository: Repository, capsys: Capture
) -> None:
    repository.series(m="0001")
    series = read_series(repository.root)
    first, second = series.patches
    assert series.without(first) == () and series.without(second) == (first,)
    assert series.closure(second) == (first, second)
    capsys.readouterr()
    assert repository.run("verify", "-j", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("ok   ") for line in lines)
    for number in ("0001", "0004"):
        assert f"ok   {number} alone passes its tests" in lines
        assert f"ok   {number} left out fails its tests" in lines


def verdicts(repository: Repository, capsys: Capture, *args: str) -> str:
    capsys.readouterr()
    assert repository.run("verify", *args) == 1
    return "\n".join(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")
    )


def test_verify_sees_a_test_that_always_passes(repository: Repository, capsys: Capture) -> None:
    repository.series()
    (repository.root / "tests/patches/test_b.py").write_text("def test_value(): pass\n")
    found = verdicts(repository, capsys, "0001")
    assert "0001 left out fails its tests" in found and "does not notice" in found


@pytest.mark.parametrize("body", ["assert False", "import pytest; pytest.skip()"])
def test_verify_sees_a_test_that_fails_or_skips(
    repository: Repository, capsys: Capture, body: str
) -> None:
    repository.series()
    (repository.root / "tests/patches/test_b.py").write_text(f"def test_value():\n  {body}\n")
    assert "0001 alone passes its tests" in verdicts(repository, capsys, "0001-set-b.patch")


def test_verify_sees_a_hidden_dependency(repository: Repository, capsys: Capture) -> None:
    tree = repository.series()
    code = tree / "tinygrad" / "__init__.py"
    code.write_text(code.read_text() + "both = b + m\n")
    repository.git(tree, "commit", "-qa", "--amend", "--no-edit")
    test = repository.root / "tests/patches/test_m.py"
    test.write_text("import tinygrad\ndef test_value(): assert tinygrad.both == 2\n")
    assert repository.run("export", tree) == 0
    assert "0004 alone passes its tests" in verdicts(repository, capsys, "0004")


def test_verify_sees_a_prefix_that_does_not_import(repository: Repository, capsys: Capture) -> None:
    tree = repository.series()
    (tree / "tinygrad" / "__init__.py").write_text("import nothing_of_this_name\n")
    repository.git(tree, "commit", "-qa", "--amend", "--no-edit")
    assert repository.run("export", tree) == 0
    found = verdicts(repository, capsys, "--quick")
    assert "0004 applies in order and imports: ModuleNotFoundError" in found


def test_verify_sees_context_that_does_not_fit(
    repository: Repository, edit: Edit, capsys: Capture
) -> None:
    """One wrong line of context is what `patch` would call fuzz."""
    repository.series()
    edit(" c = 0\n", " c = 5\n")
    assert "0001 applies in order" in verdicts(repository, capsys, "--quick")


def test_verify_sees_a_file_that_export_would_change(
    repository: Repository, edit: Edit, capsys: Capture
) -> None:
    repository.series()
    edit("1 Jan 2000", "2 Jan 2000")
    assert "export of checkout is identical: 0001-set-b.patch" in verdicts(
        repository, capsys, "--quick"
    )


@pytest.fixture
def later(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A series on a base, and 0.14.0: it has no b to set, and m beside a line that changed."""
    repository.series(m="none")
    archive = tmp_path / "cache" / "tinygrad-orin" / "tinygrad-0.14.0.tar.gz"
    archive.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [f"{name} = 0" for name in "axcdefghijklmnop"]
    lines[10] = "k = 9"
    from tests.tools.conftest import write_sdist

    write_sdist(archive, {"tinygrad/__init__.py": "\n".join(lines) + "\n"})
    return archive


def test_forward_reports_and_never_fails(
    repository: Repository, later: Path, capsys: Capture
) -> None:
    capsys.readouterr()
    assert repository.run("verify", "--forward", "0.14.0") == 0
    out = capsys.readouterr().out
    assert "no    0001-set-b.patch: conflicts in tinygrad/__init__.py (error: patch failed" in out
    # A patch that only git's merge can place, and the state after a conflict was taken back.
    assert "merge 0004-set-m.patch\n" in out
    assert "1 of 2 go onto 0.14.0, 1 of them by a merge" in out


def test_forward_skips_what_needs_more(
    repository: Repository, later: Path, capsys: Capture
) -> None:
    path = repository.folder / "0004-set-m.patch"
    path.write_text(path.read_text().replace("Depends-on: none", "Depends-on: 0001"))
    capsys.readouterr()
    assert repository.run("verify", "--forward", "0.14.0") == 0
    out = capsys.readouterr().out
    assert "skip  0004-set-m.patch: needs 0001" in out and "0 of 2 go onto 0.14.0" in out


def test_forward_onto_a_git_tree(repository: Repository, tmp_path: Path, capsys: Capture) -> None:
    checkout = repository.series()
    capsys.readouterr()
    # The base itself, where each applies; the series' end, where each is there already.
    assert repository.run("verify", "--forward", f"{checkout}@base") == 0
    out = capsys.readouterr().out
    commit = repository.git(checkout, "rev-parse", "base").strip()
    assert out.startswith(f"tinygrad of commit {commit} (2000-01-01)\nok    0001-set-b.patch\n")
    assert "2 of 2 go onto" in out and "0 of them by a merge" in out
    assert repository.run("verify", "--forward", checkout) == 0
    assert "merge 0001-set-b.patch: changes nothing there\n" in capsys.readouterr().out
    assert repository.run("verify", "--forward", f"{checkout}@v9") == 2
    assert "@v9: no commit of a git tree; want a version, DIR" in said(capsys)
    assert repository.run("verify", "--forward", str(tmp_path / "none")) == 2
    assert "none: no such folder; want a version, DIR or DIR@REF" in said(capsys)


def test_forward_names_what_it_cannot_take(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    checkout = repository.series()
    repository.git(checkout, "rm", "-q", "tinygrad/__init__.py")
    repository.git(checkout, "commit", "-q", "--message=without")
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for target, said_of_it in (
        ("", "--forward '': no version; want a version, DIR or DIR@REF"),
        ("next one", "--forward next one: no version; want"),
        ("@base", "--forward @base: no such folder; want"),
        (".@", "--forward .@: no such folder; want"),
        (".", "--forward .: no tinygrad/__init__.py in it; want"),
        ("9.9", "--forward 9.9: cannot download it: "),
    ):
        capsys.readouterr()
        assert repository.run("verify", "--forward", target) == 2, target
        line = said(capsys)
        assert said_of_it in line and "--sdist" not in line
    for more in ("0001", "--quick"):
        assert repository.run("verify", "--forward", "0.14.0", more) == 2
        assert f"--forward 0.14.0: {more} has no meaning with it" in said(capsys)


# *** install ***


def test_install_once_and_whole(repository: Repository, tmp_path: Path, capsys: Capture) -> None:
    repository.series()
    place = tmp_path / "venv"
    venv.create(place)  # with_pip takes as long as all the rest
    (packages,) = place.glob("lib/python3*/site-packages")
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")
    capsys.readouterr()
    assert repository.run("install", place) == 0
    version = read_series(repository.root).installed_version()
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
    tree = bases.unpack(repository.sdist, tmp_path / "tree")
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

    monkeypatch.setattr(bases, "download", download)
    assert bases.fetch_sdist(base, None) == cached
    assert fetched == [f"tinygrad==0.13.0 --hash=sha256:{base.sha256}"]
    monkeypatch.setattr(bases, "download", lambda r, to, p: to.write_bytes(b"another"))
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


# *** the command line ***


@pytest.mark.parametrize(
    "args", [[], ["dance"], ["checkout"], ["verify", "0042"], ["verify", "--jobs", "0"]]
)
def test_wrong_use_is_one_line_and_two(args: list[str]) -> None:
    done = subprocess.run(
        [TOOLS / "series", *args],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("series: ") and done.stderr.count("\n") == 1


def test_the_real_series_reads_and_its_table_stands() -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "series", "status", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    authors = {patch.author for patch in read_series(TOOLS.parent).patches}
    assert authors == {"{} <{}>".format(*AUTHOR)}
