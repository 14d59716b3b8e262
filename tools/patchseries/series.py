"""patches/tinygrad as data: the base, the order, each patch with its trailers; their table."""

import datetime
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from .process import SeriesError

WHY = ("enable-hw", "fix", "perf", "packaging")
# The words of Yocto's patch guidelines ("Upstream-Status"); a reason in brackets may follow.
UPSTREAM = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate")
VERIFIED = ("cpu", "sim", "h200")
NOT_VERIFIED = "nothing yet"
# What each trailer may be, and how that is said; a date is checked by the calendar, too.
TRAILERS = {
    "Why": ("|".join(WHY), f"one of {', '.join(WHY)}"),
    "Upstream-Status": (
        rf"({'|'.join(UPSTREAM)})( .*)?",
        f"one of {', '.join(UPSTREAM)}, then a [reason]",
    ),
    "Depends-on": (r"none|\d{4}(, \d{4})*", "'none' or numbers as in '0001, 0002'"),
    "Tests": (
        r"tests/patches/[\w/]+\.py(::[\w\[\]., :+-]+)+",
        "a pytest id as in tests/patches/test_x.py::test_y",
    ),
    "Verified": (
        rf"{NOT_VERIFIED}|({'|'.join(VERIFIED)})(, ({'|'.join(VERIFIED)}))*",
        f"'{NOT_VERIFIED}' or some of {', '.join(VERIFIED)}",
    ),
    "Last-Update": (r"\d{4}-\d\d-\d\d", "a date as in 2026-11-21"),
}
_TRAILER = re.compile(r"([A-Z][A-Za-z-]*): +(\S.*)")
_MAIL = re.compile(
    r"From [0-9a-f]{40} [^\n]*\nFrom: ([^\n]*)\nDate: [^\n]*\nSubject: \[PATCH\] (.*?)\n---\n\n?"
    r"(.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Base:
    """The release that the series stands on, as base.json pins it."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Patch:
    """One file of the series, `text`, and what its header says."""

    file: str
    text: str
    author: str
    subject: str
    trailers: dict[str, list[str]]

    @property
    def number(self) -> str:
        """The four digits that name the patch."""
        return self.file[:4]

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that fail without it, as pytest ids."""
        return tuple(self.trailers["Tests"])

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Numbers of the patches that it needs."""
        return tuple(d for d in self.trailers["Depends-on"][0].split(", ") if d != "none")


@dataclass(frozen=True)
class Series:
    """The base and its patches in the order in which they apply."""

    root: Path
    base: Base
    patches: tuple[Patch, ...]

    @property
    def folder(self) -> Path:
        """Folder of the patches."""
        return self.root / "patches" / "tinygrad"

    def sha256(self) -> str:
        """SHA-256 over base.json, the series file and each patch in order, in hex."""
        digest = hashlib.sha256()
        for name in ("base.json", "series", *(patch.file for patch in self.patches)):
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()

    def patched_version(self) -> str:
        """The version of the patched distribution, e.g. 0.13.0+orin.0123456789ab (PEP 440)."""
        return f"{self.base.version}+orin.{self.sha256()[:12]}"

    def with_dependencies(self, patch: Patch) -> tuple[Patch, ...]:
        """`patch` and all it depends on, in the order of the series."""
        wanted = {patch.number}
        for earlier in reversed(self.patches):
            if earlier.number in wanted:
                wanted.update(earlier.depends_on)
        return tuple(p for p in self.patches if p.number in wanted)

    def without_patch_and_dependents(self, patch: Patch) -> tuple[Patch, ...]:
        """The series without `patch` and without what depends on it."""
        dropped = {patch.number}
        for later in self.patches:
            if dropped.intersection(later.depends_on):
                dropped.add(later.number)
        return tuple(p for p in self.patches if p.number not in dropped)

    def select_patches(self, names: list[str]) -> tuple[Patch, ...]:
        """The patches that `names` (four digits or file names) mean; all without names."""
        for name in names:
            if not any(name in (p.number, p.file) for p in self.patches):
                numbers = ", ".join(p.number for p in self.patches)
                raise SeriesError(f"no patch '{name}' in the series: there are {numbers}")
        return tuple(p for p in self.patches if not names or {p.number, p.file} & set(names))


def parse_trailers(message: str, where: str) -> dict[str, list[str]]:
    """The last paragraph of a message, each value checked; raises SeriesError."""
    last = message.rstrip("\n").rpartition("\n\n")[2]
    matches = [_TRAILER.fullmatch(line) for line in last.split("\n")]
    found: dict[str, list[str]] = {}
    for match in matches:
        if match is None:
            wanted = ", ".join(TRAILERS)
            raise SeriesError(f"{where}: no trailers at the end of the message, want {wanted}")
        if match[1] not in TRAILERS:
            known = ", ".join(TRAILERS)
            raise SeriesError(f"{where}: unknown trailer '{match[0]}', known are {known}")
        found.setdefault(match[1], []).append(match[2].strip())
    for key, (form, want) in TRAILERS.items():
        if key not in found:
            raise SeriesError(f"{where}: trailer '{key}:' is missing")
        if len(found[key]) > 1 and key != "Tests":
            raise SeriesError(f"{where}: trailer '{key}:' appears {len(found[key])} times")
        for value in found[key]:
            if not re.fullmatch(form, value) or (key == "Last-Update" and not _is_date(value)):
                raise SeriesError(f"{where}: '{key}: {value}', want {want}")
    return found


def _is_date(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def parse_patch(file: str, text: str) -> Patch:
    """Read a patch as git format-patch writes it; raises SeriesError."""
    match = _MAIL.fullmatch(text)
    if match is None:
        raise SeriesError(f"{file}: not in git format-patch form (write it with series export)")
    author, message, diff = match.groups()
    subject = message.split("\n", 1)[0]
    if not re.fullmatch(r"(\d{4})-[a-z0-9][a-z0-9-]*\.patch", file):
        raise SeriesError(f"{file}: want a name as in 0006-topic.patch")
    # Longer subjects and other alphabets would need RFC 2047 folding in the mail header.
    if not (author + subject).isascii() or len(subject) > 72:
        raise SeriesError(f"{file}: author and subject must be ASCII, the subject 72 at most")
    if not re.fullmatch(r"[^<>\n]+ <[^<>\s]+>", author):
        raise SeriesError(f"{file}: author is '{author}', want 'Name <address>'")
    if not diff.startswith("diff --git "):
        raise SeriesError(f"{file}: it changes nothing (no 'diff --git' after '---')")
    return Patch(file, text, author, subject, parse_trailers(message, file))


def _read_base(path: Path) -> Base:
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
    """Read base.json, series and every patch; raises SeriesError with file and reason."""
    folder = root / "patches" / "tinygrad"
    base, order = _read_base(folder / "base.json"), folder / "series"
    try:
        names = order.read_text().split()
    except OSError as e:
        raise SeriesError(f"{order}: {e.strerror}") from e
    there = {path.name for path in folder.glob("*.patch")}
    for name in sorted(there - set(names)):
        raise SeriesError(f"{folder / name}: not named in {order}")
    patches: list[Patch] = []
    for name in names:
        if name not in there:
            raise SeriesError(f"{order}: names {name}, which is not there")
        patch = parse_patch(name, (folder / name).read_text(encoding="utf-8"))
        if patches and patch.number <= patches[-1].number:
            raise SeriesError(f"{order}: {name} does not come after {patches[-1].file}")
        for number in patch.depends_on:
            if number not in (p.number for p in patches):
                raise SeriesError(f"{name}: depends on {number}, which does not come before it")
        patches.append(patch)
    return Series(root, base, tuple(patches))


def patch_summaries_text(series: Series) -> str:
    """The words of the headers: two lines a patch."""
    lines = []
    for patch in series.patches:
        said = {key: values[0] for key, values in patch.trailers.items()}
        lines.append(f"{patch.number}  {patch.subject}")
        needs, upstream = said["Depends-on"], said["Upstream-Status"]
        lines.append(f"      {said['Why']}, needs {needs}; upstream: {upstream}")
    return "\n".join(lines)
