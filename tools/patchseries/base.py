"""The base release: its sdist, fetched by pip, checked on every use, unpacked."""

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from .errors import SeriesError
from .model import Base
from .proc import pip


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/tinygrad-orin, ~/.cache/tinygrad-orin without it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tinygrad-orin"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fetch_sdist(base: Base, given: Path | None, python: Path | str = sys.executable) -> Path:
    """The sdist of the base: the given file, or the cached one, or what pip downloads.

    pip gets the hash too, so that nothing of an archive runs before its hash is known to be right.

    Args:
        base: name, version and hash.
        given: a file that the user names with --sdist.
        python: the interpreter whose pip downloads.

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
    requirement = f"{base.name}=={base.version} --hash=sha256:{base.sha256}"
    download(requirement, cached, python)
    if (got := sha256_of(cached)) != base.sha256:
        cached.unlink()
        raise SeriesError(f"{base.name} {base.version}: sha256 is {got}, want {base.sha256}", 1)
    return cached


def download(
    requirement: str, to: Path, python: Path | str = sys.executable, said: str | None = None
) -> None:
    """Download an sdist with pip; `to` appears only when it is whole.

    Args:
        requirement: a line of a requirements file.
        to: the file to write.
        python: the interpreter whose pip downloads.
        said: the flag and value that ask for it, where --sdist cannot stand in for it.

    Raises:
        SeriesError: pip cannot do it.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".download-") as tmp:
        wanted = Path(tmp, "requirements.txt")
        wanted.write_text(requirement + "\n")
        what = f"cannot download {requirement.split(' ')[0]} (or pass --sdist FILE)"
        if said:
            what = f"{said}: cannot download it"
        pip(python, "download", "--no-binary", ":all:", "--dest", tmp, "--requirement", wanted,
            what=what)  # fmt: skip
        found = [*Path(tmp).glob("*.tar.gz")]
        if len(found) != 1:
            raise SeriesError(f"{requirement.split(' ')[0]}: pip brought no .tar.gz", 1)
        found[0].replace(to)


def unpack(sdist: Path, to: Path) -> Path:
    """Unpack an sdist so that its one top folder becomes `to` (which must not exist).

    Raises:
        SeriesError: it is not an archive with one top folder.
    """
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


def link_copy(tree: Path, to: Path) -> Path:
    """Copy a tree by hard links: `git apply` replaces files, it never writes into one."""
    return Path(shutil.copytree(tree, to, copy_function=os.link))
