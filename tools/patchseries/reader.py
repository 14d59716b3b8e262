"""Read base.json, the series file and the patches."""

import json
import re
from pathlib import Path

from .errors import SeriesError
from .mail import parse_mail
from .model import Base, Patch, Series, patch_folder


def read_base(path: Path) -> Base:
    """Read base.json.

    Raises:
        SeriesError: the file is missing, is not JSON or does not pin name, version and sha256.
    """
    try:
        data = json.loads(path.read_text())
        base = Base(data["name"], data["version"], data["sha256"])
    except OSError as e:
        raise SeriesError(f"{path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise SeriesError(f'{path}: want {{"name", "version", "sha256"}}, got {e!r}') from e
    if not re.fullmatch(r"[0-9a-f]{64}", base.sha256):
        raise SeriesError(f"{path}: sha256 is '{base.sha256}', want 64 lower-case hex digits")
    return base


def read_series(root: Path) -> Series:
    """Read base.json, series and every patch.

    Raises:
        SeriesError: names the file and what is wrong with it.
    """
    folder = patch_folder(root)
    base = read_base(folder / "base.json")
    try:
        names = (folder / "series").read_text().split("\n")
    except OSError as e:
        raise SeriesError(f"{folder / 'series'}: {e.strerror}") from e
    names = [name for name in names if name]
    on_disk = {path.name for path in folder.glob("*.patch")}
    for name in sorted(on_disk - set(names)):
        raise SeriesError(f"{folder / name}: not named in {folder / 'series'}")
    patches: list[Patch] = []
    for name in names:
        if name not in on_disk:
            raise SeriesError(f"{folder / 'series'}: names {name}, which is not there")
        text = (folder / name).read_text(encoding="utf-8", errors="strict")
        patch = parse_mail(name, text)
        if patches and patch.number <= patches[-1].number:
            raise SeriesError(f"{folder / 'series'}: {name} does not come after {patches[-1].file}")
        for number in patch.depends_on:
            if number not in (p.number for p in patches):
                raise SeriesError(f"{name}: depends on {number}, which does not come before it")
        patches.append(patch)
    return Series(root, base, tuple(patches))
