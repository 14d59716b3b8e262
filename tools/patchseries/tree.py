"""A tree with the patches on it: plain for building and testing, as git commits for editing."""

import re
from collections.abc import Iterable
from pathlib import Path

from .errors import SeriesError
from .mail import DATE, format_mail
from .model import Patch, Series, make_patch
from .proc import clean_git_env, run

# Carries a patch's file name through an edit of the checkout; export takes it off again.
_NAME_TRAILER = "Patch-Name"
_SUBJECT_OF_BASE = "base"
# Whose a new commit in a checkout is, unless git is told otherwise: patches are the project's.
AUTHOR = ("tinygrad-orin maintainers", "maintainers@tinygrad-orin.invalid")


def git(tree: Path, *args: str, what: str, stdin: str | None = None, **env: str) -> str:
    """Run git in a tree, without anyone's configuration.

    Raises:
        SeriesError: git fails.
    """
    environment = clean_git_env() | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)} | env
    return run(["git", *args], what=what, cwd=tree, stdin=stdin, env=environment)


def apply(tree: Path, patch: Patch) -> None:
    """Apply one patch to a plain tree. git knows no fuzz: each context line must be as it was.

    Raises:
        SeriesError: a hunk does not apply; says which file and line.
    """
    git(tree, "apply", "--whitespace=nowarn", "-", what=f"{patch.file}: does not apply",
        stdin=patch.diff)  # fmt: skip


def apply_all(tree: Path, patches: Iterable[Patch]) -> Path:
    """Apply patches in order.

    Raises:
        SeriesError: see `apply`.
    """
    for patch in patches:
        apply(tree, patch)
    return tree


def commit_series(tree: Path, patches: Iterable[Patch]) -> None:
    """Make an unpacked base a git repository: a commit tagged `base`, then one for each patch.

    Raises:
        SeriesError: a patch does not apply.
    """
    fixed = {
        "GIT_AUTHOR_DATE": DATE,
        "GIT_COMMITTER_DATE": DATE,
        "GIT_COMMITTER_NAME": "series checkout",
        "GIT_COMMITTER_EMAIL": "series@localhost",
    }
    seed = fixed | {"GIT_AUTHOR_NAME": "series checkout", "GIT_AUTHOR_EMAIL": "series@localhost"}
    git(tree, "init", "--quiet", "--initial-branch=series", what="checkout")
    for name, value in zip(("user.name", "user.email"), AUTHOR, strict=True):
        git(tree, "config", name, value, what="checkout")
    Path(tree, ".git", "info", "exclude").write_text("__pycache__/\n*.egg-info/\nbuild/\n")
    git(tree, "add", "--all", "--force", what="checkout")
    git(tree, "commit", "--quiet", "--message", _SUBJECT_OF_BASE, what="checkout", **seed)
    git(tree, "tag", "base", what="checkout")
    for patch in patches:
        match = re.fullmatch(r"(.*) <(.*)>", patch.author)
        assert match is not None  # make_patch checked the form
        author = {"GIT_AUTHOR_NAME": match[1], "GIT_AUTHOR_EMAIL": match[2]}
        git(tree, "apply", "--index", "--whitespace=nowarn", "-", stdin=patch.diff,
            what=f"{patch.file}: does not apply")  # fmt: skip
        text = f"{patch.message}\n\n{patch.trailers}\n{_NAME_TRAILER}: {patch.file}\n"
        git(tree, "commit", "--quiet", "--cleanup=verbatim", "--file=-", stdin=text,
            what=patch.file, **fixed, **author)  # fmt: skip


def read_commits(tree: Path) -> list[Patch]:
    """The patches that the commits after `base` make.

    Raises:
        SeriesError: the tree is not a checkout, is not clean, is not linear, or a commit's
            message or trailers are not as they must be.
    """
    if not Path(tree, ".git").exists() or not git(tree, "tag", "--list", "base", what=str(tree)):
        raise SeriesError(f"{tree}: not a checkout of the series (make one with series checkout)")
    if git(tree, "status", "--porcelain", what=str(tree)):
        raise SeriesError(f"{tree}: there are changes that no commit has: commit or drop them")
    if git(tree, "rev-list", "--merges", "base..HEAD", what=str(tree)):
        raise SeriesError(f"{tree}: there is a merge after 'base': want one line of commits")
    commits = git(tree, "rev-list", "--reverse", "base..HEAD", what=str(tree)).split()
    patches: list[Patch] = []
    for commit in commits:
        patch = _read_commit(tree, commit, patches[-1].number if patches else "0000")
        if patches and patch.number <= patches[-1].number:
            raise SeriesError(f"{tree}: {patch.file} does not come after {patches[-1].file}")
        patches.append(patch)
    return patches


def _read_commit(tree: Path, commit: str, last_number: str) -> Patch:
    where = f"{tree} {commit[:12]}"
    author = git(tree, "show", "--no-patch", "--format=%an <%ae>", commit, what=where).strip()
    text = git(tree, "show", "--no-patch", "--format=%B", commit, what=where).strip("\n")
    diff = git(
        tree, "-c", "diff.algorithm=myers", "-c", "diff.indentHeuristic=true", "diff-tree",
        "--patch", "--no-commit-id", "--no-renames", "--no-ext-diff", "--no-textconv",
        "--unified=3", "--abbrev=12", "--src-prefix=a/", "--dst-prefix=b/", commit, what=where,
    )  # fmt: skip
    # Blob names in "index" lines say nothing that the hunks do not, and grow with the repository.
    diff = re.sub(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n", "", diff)
    named = re.search(rf"(?m)^{_NAME_TRAILER}: (\S+)\n?", text)
    if named:
        file = named[1]
        text = (text[: named.start()] + text[named.end() :]).rstrip("\n")
    else:
        subject = text.split("\n", 1)[0].lower()
        file = f"{int(last_number) + 1:04}-{re.sub('[^a-z0-9]+', '-', subject).strip('-')}.patch"
    return make_patch(file, author, text, diff)


def write_patches(series: Series, patches: list[Patch]) -> list[str]:
    """Write patches and the series file; returns the names of the files that changed or went.

    Raises:
        SeriesError: two commits carry one name.
    """
    files = {patch.file: format_mail(patch) for patch in patches}
    if len(files) != len(patches):
        raise SeriesError("two commits carry one Patch-Name")
    files["series"] = "".join(f"{patch.file}\n" for patch in patches)
    changed = []
    for path in series.folder.glob("*.patch"):
        if path.name not in files:
            path.unlink()
            changed.append(path.name)
    for name, text in files.items():
        path = series.folder / name
        if not path.exists() or path.read_bytes() != text.encode():
            path.write_bytes(text.encode())
            changed.append(name)
    return sorted(changed)
