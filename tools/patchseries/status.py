"""patches/README.md: a table that the headers of the patches write."""

from .model import NOT_VERIFIED, Patch, Series

_INTRO = """\
# The patch series

tinygrad {version} as released, and what this project changes in it. `tools/series status` writes
this file from the headers of the patches; edit those.

- `tinygrad/base.json` pins the release, `tinygrad/series` the order.
- `tools/series checkout DIR` makes a git tree with one commit per patch, `tools/series export DIR`
  writes edited commits back, `tools/series verify` proves the series, `tools/series install VENV`
  puts patched tinygrad into a virtual environment.
- Each header says why the patch exists, where upstream stands, what it depends on, which tests
  fail without it, where it was verified and when it last changed.

"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _patch_row(patch: Patch) -> str:
    files = sorted({test.split("::")[0] for test in patch.tests})
    tests = ", ".join(f"[{f.rsplit('/', 1)[1]}](../{f})" for f in files)
    return _row(
        f"[{patch.number}](tinygrad/{patch.file})",
        patch.subject,
        patch.why,
        patch.upstream,
        ", ".join(patch.depends_on) or "none",
        f"{tests} ({len(patch.tests)})",
        ", ".join(patch.verified) or NOT_VERIFIED,
        patch.last_update,
    )


def readme(series: Series) -> str:
    """The text of patches/README.md."""
    head = ("patch", "what it does", "why", "upstream", "needs", "fails without it", "verified on")
    lines = [_row(*head, "last update"), "|" + " --- |" * 8 + "\n"]
    lines += [_patch_row(patch) for patch in series.patches]
    return _INTRO.format(version=series.base.version) + "".join(lines)
