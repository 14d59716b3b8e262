"""The release with patches on it: plain for building and testing, as commits for editing."""

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .process import SeriesError, git, pip
from .series import Base, Patch, Series, parse_patch

# git's own placeholder date (builtin/log.c) in the first line, one fixed date in the header:
# a patch file tells its age in Last-Update.
DATE = "Sat, 1 Jan 2000 00:00:00 +0000"
# Whose a new commit in a checkout is, unless git is told otherwise: patches are the project's.
AUTHOR = ("tinygrad-orin maintainers", "maintainers@tinygrad-orin.invalid")
# Carries a patch's file name through an edit of the checkout; export takes it off again.
_NAME = re.compile(r"(?m)^Patch-Name: (\S+)\n")
_FORMAT = (
    "format-patch", "--stdout", "--zero-commit", "--no-signature", "--no-renames",
    "--no-numbered", "--subject-prefix=PATCH", "--diff-algorithm=myers", "--indent-heuristic",
    "--unified=3", "--src-prefix=a/", "--dst-prefix=b/", "--no-ext-diff", "--no-textconv",
)  # fmt: skip


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tinygrad-orin, ~/.cache/tinygrad-orin without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinygrad-orin"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_sdist(base: Base, given: Path | None, python: Path | str = sys.executable) -> Path:
    """The sdist of the base: the given file, the cached one, or what the interpreter's pip brings.

    pip gets the hash too, so that nothing of an archive runs before its hash is known to be right.

    Raises:
        SeriesError: the file cannot be had or its hash is another.
    """
    if given is not None:
        if not given.is_file():
            raise SeriesError(f"--sdist {given}: no such file")
        if (got := sha256_of(given)) != base.sha256:
            raise SeriesError(f"--sdist {given}: sha256 is {got}, base.json wants {base.sha256}")
        return given
    cached = cache_folder() / f"{base.name}-{base.version}.tar.gz"
    if cached.is_file() and sha256_of(cached) == base.sha256:
        return cached
    download_sdist(f"{base.name}=={base.version} --hash=sha256:{base.sha256}", cached, python)
    if (got := sha256_of(cached)) != base.sha256:
        cached.unlink()
        raise SeriesError(f"{base.name} {base.version}: sha256 is {got}, want {base.sha256}", 1)
    return cached


def download_sdist(
    requirement: str, to: Path, python: Path | str = sys.executable, said: str | None = None
) -> None:
    """Download an sdist with pip; `to` appears only when it is whole.

    `said` is the flag and value that ask for it, where --sdist cannot stand in for it.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    what = f"cannot download {requirement.split(' ')[0]} (or pass --sdist FILE)"
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".download-") as tmp:
        wanted = Path(tmp, "requirements.txt")
        wanted.write_text(requirement + "\n")
        pip(python, "download", "--no-binary", ":all:", "--dest", tmp, "--requirement", wanted,
            what=f"{said}: cannot download it" if said else what)  # fmt: skip
        found = [*Path(tmp).glob("*.tar.gz")]
        if len(found) != 1:
            raise SeriesError(f"{requirement.split(' ')[0]}: pip brought no .tar.gz", 1)
        found[0].replace(to)


def unpack_tar(sdist: Path, to: Path) -> Path:
    """Unpack an sdist so that its one top folder becomes `to` (which must not exist)."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".unpack-") as tmp:
        try:
            with tarfile.open(sdist) as tar:
                # Python 3.11.2, Debian 12's, knows neither the filter nor extractall's argument.
                # Without the filter root would keep the archive's owners, which git distrusts.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                for member in tar.getmembers():
                    member.uid, member.gid = os.getuid(), os.getgid()
                    member.uname = member.gname = ""
                tar.extractall(tmp)
        except (tarfile.TarError, EOFError) as e:
            raise SeriesError(f"{sdist}: not a readable sdist: {e}") from e
        tops = [*Path(tmp).iterdir()]
        if len(tops) != 1 or not tops[0].is_dir():
            raise SeriesError(f"{sdist}: want one folder at the top, found {len(tops)} entries")
        tops[0].replace(to)
    return to


def hard_link_copy(tree: Path, to: Path) -> Path:
    """Copy a tree by hard links: `git apply` replaces files, it never writes into one."""
    return Path(shutil.copytree(tree, to, copy_function=os.link))


def apply_patches(tree: Path, patches: Iterable[Patch], *options: str) -> Path:
    """Apply patches in order. git knows no fuzz: each context line must be as it was.

    Raises:
        SeriesError: a hunk does not apply; says which file and line.
    """
    for patch in patches:
        git(tree, "apply", *options, "--whitespace=nowarn", "-", stdin=patch.text,
            what=f"{patch.file}: does not apply")  # fmt: skip
    return tree


def commit_series(tree: Path, patches: Iterable[Patch]) -> None:
    """Make an unpacked base a git repository: a commit tagged `base`, then one for each patch."""
    by = {"GIT_COMMITTER_NAME": "series checkout", "GIT_COMMITTER_EMAIL": "series@localhost"}
    by["GIT_COMMITTER_DATE"] = DATE
    seed = {name.replace("COMMITTER", "AUTHOR"): value for name, value in by.items()}
    git(tree, "init", "--quiet", "--initial-branch=series", what="checkout")
    for name, value in zip(("user.name", "user.email"), AUTHOR, strict=True):
        git(tree, "config", name, value, what="checkout")
    Path(tree, ".git", "info", "exclude").write_text("__pycache__/\n*.egg-info/\nbuild/\n")
    git(tree, "add", "--all", "--force", what="checkout")
    git(tree, "commit", "--quiet", "--message", "base", what="checkout", **by, **seed)
    git(tree, "tag", "base", what="checkout")
    for patch in patches:
        named = patch.text.replace("\n---\n", f"\nPatch-Name: {patch.file}\n---\n", 1)
        git(tree, "am", "--quiet", "--keep-non-patch", "--whitespace=nowarn", "--no-gpg-sign",
            stdin=named, what=f"{patch.file}: does not apply", **by)  # fmt: skip


def patches_of_commits(tree: Path) -> list[Patch]:
    """The patches that the commits after `base` make, as git format-patch writes them.

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
    patches: list[Patch] = []
    mails = git(tree, *_FORMAT, "base..HEAD", what=str(tree))
    for mail in re.split(r"(?m)^(?=From 0{40} )", mails)[1:]:
        patch = _patch_of_mail(mail, int(patches[-1].number) + 1 if patches else 1)
        if patches and patch.number <= patches[-1].number:
            raise SeriesError(f"{tree}: {patch.file} does not come after {patches[-1].file}")
        patches.append(patch)
    return patches


def _patch_of_mail(mail: str, number: int) -> Patch:
    """A mail of format-patch without what differs between runs, under its Patch-Name."""
    header, _, rest = mail.partition("\n---\n")
    header = re.sub(r"(?m)^Date: .*", f"Date: {DATE}", header, count=1)
    # git folds long subjects; blob names grow with the repository and say nothing.
    first, _, body = header.partition("\n\n")
    header = first.replace("\n ", " ") + "\n\n" + body + "\n"
    diff = rest[max(rest.find("diff --git "), 0) :]  # behind the count of lines by file
    diff = re.sub(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+( \d+)?\n", "", diff)
    if name := _NAME.search(header):
        file = name[1]
        header = header[: name.start()] + header[name.end() :]
    else:
        subject = header.partition("Subject: [PATCH] ")[2].split("\n", 1)[0].lower()
        file = f"{number:04}-{re.sub('[^a-z0-9]+', '-', subject).strip('-')}.patch"
    # Two mails are divided by an empty line.
    return parse_patch(file, f"{header.rstrip()}\n---\n{diff.rstrip(chr(10))}\n")


def write_patches(series: Series, patches: list[Patch]) -> list[str]:
    """Write patches and the series file; returns the names of the files that changed or went."""
    files = {patch.file: patch.text for patch in patches}
    if len(files) != len(patches):
        raise SeriesError("two commits carry one Patch-Name")
    files["series"] = "".join(f"{patch.file}\n" for patch in patches)
    there = {path.name: path.read_text() for path in series.folder.glob("*.patch")}
    there["series"] = (series.folder / "series").read_text()
    for name in there.keys() - files:
        (series.folder / name).unlink()
    changed = sorted(name for name in there.keys() | files if there.get(name) != files.get(name))
    for name in set(changed) & files.keys():
        (series.folder / name).write_text(files[name])
    return changed
