"""tools/series: checkout, export, status, wrong use."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.tools.conftest import TOOLS, Edit, Repository, said

from patchseries.series import read_series
from patchseries.tree import AUTHOR

Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch


# *** checkout and export ***


def test_export_of_checkout_is_identical_and_stable(
    repository: Repository, tmp_path: Path, capsys: Capture
) -> None:
    repository.series()
    capsys.readouterr()
    files = {path.name: path.read_bytes() for path in repository.folder.iterdir()}
    text = files["0001-set-b.patch"].decode()
    assert text.startswith("From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001")
    assert "Date: Sat, 1 Jan 2000 00:00:00 +0000\n" in text
    assert "Patch-Name" not in text and "\n-- \n" not in text
    again = tmp_path / "again"
    assert repository.run("checkout", again) == 0
    assert repository.run("export", again) == 0
    out = capsys.readouterr().out
    assert out == f"{again}: tinygrad 0.13.0 and 2 patches\nnothing changed\n"
    assert files == {path.name: path.read_bytes() for path in repository.folder.iterdir()}


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


def test_a_long_subject_stays_on_its_line(repository: Repository, tmp_path: Path) -> None:
    """git format-patch folds a header line of more than 76 characters."""
    tree = repository.series()
    subject = "set: " + "a " * 33 + "b"
    message = repository.git(tree, "show", "-s", "--format=%B")
    whole = message.replace("set: m is 1", subject)
    repository.git(tree, "commit", "-q", "--amend", "-F", "-", stdin=whole)
    assert repository.run("export", tree) == 0
    assert f"Subject: [PATCH] {subject}\n\n" in (repository.folder / "0004-set-m.patch").read_text()
    assert repository.run("checkout", tmp_path / "again") == 0
    assert repository.run("export", tmp_path / "again") == 0
    assert read_series(repository.root).patches[1].subject == subject


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


def test_status_is_what_the_headers_say(repository: Repository, capsys: Capture) -> None:
    repository.series(m="0001")
    capsys.readouterr()
    assert repository.run("status") == 0
    out = capsys.readouterr().out
    assert "0004  set: m is 1\n      fix, needs 0001; upstream: Pending\n" in out


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


def test_the_real_series_reads() -> None:
    done = subprocess.run(
        [sys.executable, TOOLS / "series", "status"], capture_output=True, text=True, check=False
    )
    patches = [*(TOOLS.parent / "patches" / "tinygrad").glob("*.patch")]
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2 * len(patches) > 20
