"""Files that are written whole or not at all, and JSON that people hand in."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError


def write_whole(path: Path, content: str | bytes) -> None:
    """Put `content` in the place of a file, its folder included; raises BenchError.

    A link stays one. A pipe or a device is no file: it would be one afterwards.
    """
    data = content.encode() if isinstance(content, str) else content
    said, path = path, Path(os.path.realpath(path))
    try:
        if path.exists() and not path.is_file():
            raise BenchError(f"{said}: is no regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=".orinbench-", delete=False
        ) as new:
            new.write(data)
        os.chmod(new.name, 0o644)
        os.replace(new.name, path)
    except OSError as error:
        raise BenchError(f"{said}: cannot be written: {error.strerror}") from error


def read_json(path: Path, form: str, writer: str, most_bytes: int) -> dict[str, Any]:
    """Return the object of a JSON file whose `format` is `form`, as the command `writer` makes it.

    Raises BenchError, one line, for any other file.
    """
    try:
        if path.exists() and not path.is_file():
            raise BenchError(f"{path}: is no regular file; want what {writer} writes")
        if path.stat().st_size > most_bytes:
            raise BenchError(
                f"{path}: larger than {most_bytes >> 20} MiB; want what {writer} writes"
            )
        whole = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BenchError(f"{path}: no JSON; want what {writer} writes") from None
    said = whole.get("format") if isinstance(whole, dict) else None
    if said != form:
        raise BenchError(f"{path}: format {str(said)[:60]!r}; want {form!r}, which {writer} writes")
    found: dict[str, Any] = whole
    return found
