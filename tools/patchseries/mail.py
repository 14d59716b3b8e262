"""The patch file's form: what `git format-patch` writes, less all that differs between runs."""

import re

from .errors import SeriesError
from .model import Patch, make_patch

# git's own placeholder date (builtin/log.c) in the first line, one fixed date in the header:
# a patch file tells its age in Last-Update.
_FROM = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"
DATE = "Sat, 1 Jan 2000 00:00:00 +0000"

_MAIL = re.compile(
    r"From [0-9a-f]{40} [^\n]*\n"
    r"From: (?P<author>[^\n]*)\n"
    r"Date: [^\n]*\n"
    r"Subject: \[PATCH\] (?P<message>.*?)\n"
    r"---\n\n?"
    r"(?P<diff>.*)",
    re.DOTALL,
)


def parse_mail(file: str, text: str) -> Patch:
    """Read a patch file.

    Raises:
        SeriesError: it is not in the form that `format_mail` writes, or a trailer is wrong.
    """
    match = _MAIL.fullmatch(text)
    if match is None:
        raise SeriesError(f"{file}: not in git format-patch form (write it with series export)")
    return make_patch(file, match["author"], match["message"], match["diff"])


def format_mail(patch: Patch) -> str:
    """The text of the patch file; `git am` takes it."""
    header = f"{_FROM}\nFrom: {patch.author}\nDate: {DATE}\nSubject: [PATCH] {patch.message}\n"
    return f"{header}\n{patch.trailers}\n---\n{patch.diff}"
