"""Try the series on another tinygrad: a release, or a commit of a git tree."""

import re
import shutil
import tempfile
from pathlib import Path

from .process import SeriesError, error_line, git
from .series import Patch, Series
from .tree import apply_patches, cache_folder, commit_series, download_sdist, sha256_of, unpack_tar
from .verify import Say

_TARGETS = "want a version, DIR or DIR@REF"
# The form of tinygrad's versions; pip would give other words a meaning.
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.post|\.dev)\d+)?")


def try_on_other_base(series: Series, target: str, sdist: Path, say: Say) -> int:
    """Try each patch in order on top of those that applied; returns how many applied.

    A patch either applies as it is, or git's three-way merge places it, or it has conflicts. One
    whose Depends-on did not apply is not tried.

    Args:
        series: the series.
        target: a version on PyPI, or DIR or DIR@REF: a git tree, at HEAD or at a commit.
        sdist: the base, checked.
        say: called with each line of the report.

    Raises:
        SeriesError: the release or the tree cannot be read.
    """
    on: set[str] = set()
    merged = 0
    with tempfile.TemporaryDirectory(prefix="tinygrad-orin-forward-") as tmp:
        later, name = _unpack_and_name_base(series, target, Path(tmp, "later"))
        say(name)
        tree = unpack_tar(sdist, Path(tmp, "tree"))
        commit_series(tree, series.patches)
        commits = git(tree, "rev-list", "--reverse", "base..HEAD", what="series").split()
        _replace_files_and_commit(tree, later)
        for patch, commit in zip(series.patches, commits, strict=True):
            missing = [n for n in patch.depends_on if n not in on]
            if missing:
                say(f"skip  {patch.file}: needs {', '.join(missing)}: not applied")
                continue
            word, why = _apply_or_merge_patch(tree, patch, commit)
            say(f"{word:5} {patch.file}{why}")
            if word != "no":
                on.add(patch.number)
                merged += word == "merge"
    say(f"{len(on)} of {len(series.patches)} apply to {target}, {merged} of them by a merge")
    return len(on)


def _unpack_and_name_base(series: Series, target: str, to: Path) -> tuple[Path, str]:
    """Return a folder with the other tinygrad's files, and its name for the report."""
    folder, at, ref = target.partition("@")
    if folder and Path(folder).is_dir() and bool(at) == bool(ref):
        commit, day = _archive_git_ref(target, Path(folder), ref or "HEAD", to.with_suffix(".tar"))
        try:
            tree = unpack_tar(to.with_suffix(".tar"), to)
        except SeriesError:  # the commit has no file at all
            tree = to
        if not (tree / "tinygrad" / "__init__.py").is_file():
            raise SeriesError(f"--forward {target}: no tinygrad/__init__.py in it; {_TARGETS}")
        return tree, f"{series.base.name} of commit {commit} ({day})"
    if at or "/" in target:
        raise SeriesError(f"--forward {target}: no such folder; {_TARGETS}")
    if not _VERSION.fullmatch(target):
        raise SeriesError(f"--forward {target or repr(target)}: no version; {_TARGETS}")
    archive = cache_folder() / f"{series.base.name}-{target}.tar.gz"
    if not archive.is_file():
        try:
            download_sdist(f"{series.base.name}=={target}", archive, said=f"--forward {target}")
        except SeriesError as error:  # wrong input, as far as can be told
            raise SeriesError(str(error)) from error
    name = f"{series.base.name} {target} (sha256 {sha256_of(archive)})"
    return unpack_tar(archive, to), name


def _archive_git_ref(target: str, where: Path, ref: str, archive: Path) -> tuple[str, str]:
    """Write a commit of a git tree to an archive; returns its hash and its day."""
    what = f"--forward {target}: no commit of a git tree; {_TARGETS}"
    try:
        commit = git(where, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}",
                     what=what).strip()  # fmt: skip
    except SeriesError as error:
        raise SeriesError(what) from error
    day = git(where, "show", "--no-patch", "--format=%cs", commit, what=what).strip()
    git(where, "archive", "--format=tar", "--prefix=tree/", f"--output={archive.resolve()}", commit,
        what=what)  # fmt: skip
    return commit, day


def _replace_files_and_commit(tree: Path, later: Path) -> None:
    """Commit on the base: all files replaced by the later ones."""
    git(tree, "checkout", "--quiet", "--detach", "base", what="forward")
    for path in tree.iterdir():
        if path.name == ".git":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(later, tree, dirs_exist_ok=True, symlinks=True)
    git(tree, "add", "--all", "--force", what="forward")
    git(tree, "commit", "--quiet", "--allow-empty", "--message=later", what="forward")


def _apply_or_merge_patch(tree: Path, patch: Patch, commit: str) -> tuple[str, str]:
    """Apply one patch, or leave the tree as it was; returns a word of the report and the reason."""
    word, why = "ok", ""
    try:
        apply_patches(tree, [patch], "--index")
    except SeriesError as strict:
        word = "merge"
        try:
            git(tree, "cherry-pick", "--no-commit", commit, what="merge")
        except SeriesError as error:
            unmerged = git(tree, "diff", "--name-only", "--diff-filter=U", what="merge").split()
            why = f"conflicts in {', '.join(unmerged)}" if unmerged else error_line(str(error))
            git(tree, "reset", "--quiet", "--hard", what="forward")
            return "no", f": {why} ({str(strict).partition(': does not apply: ')[2]})"
    if not git(tree, "status", "--porcelain", "--untracked-files=no", what="forward"):
        why = ": changes nothing there"
    git(tree, "commit", "--quiet", "--allow-empty", f"--message={patch.file}", what="forward")
    return word, why
