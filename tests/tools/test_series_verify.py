"""tools/series verify, and its report on other releases."""

from pathlib import Path

import pytest
from tests.tools.conftest import Edit, Repository, said

from patchseries.series import read_series

Capture = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch


# *** verify ***


def test_verify_holds_and_leaves_out_what_needs_a_patch(
    repository: Repository, capsys: Capture
) -> None:
    repository.series(m="0001")
    series = read_series(repository.root)
    first, second = series.patches
    left = [series.without_patch_and_dependents(patch) for patch in series.patches]
    assert left == [(), (first,)]
    assert series.with_dependencies(second) == (first, second)
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
    assert "1 of 2 apply to 0.14.0, 1 of them by a merge" in out


def test_forward_skips_what_needs_more(
    repository: Repository, later: Path, capsys: Capture
) -> None:
    path = repository.folder / "0004-set-m.patch"
    path.write_text(path.read_text().replace("Depends-on: none", "Depends-on: 0001"))
    capsys.readouterr()
    assert repository.run("verify", "--forward", "0.14.0") == 0
    out = capsys.readouterr().out
    assert "skip  0004-set-m.patch: needs 0001" in out and "0 of 2 apply to 0.14.0" in out


def test_forward_onto_a_git_tree(repository: Repository, tmp_path: Path, capsys: Capture) -> None:
    checkout = repository.series()
    capsys.readouterr()
    # The base itself, where each applies; the series' end, where each is there already.
    assert repository.run("verify", "--forward", f"{checkout}@base") == 0
    out = capsys.readouterr().out
    commit = repository.git(checkout, "rev-parse", "base").strip()
    assert out.startswith(f"tinygrad of commit {commit} (2000-01-01)\nok    0001-set-b.patch\n")
    assert "2 of 2 apply to" in out and "0 of them by a merge" in out
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
