"""Files that are read with care, and written whole or not at all."""

import os
import tempfile
from pathlib import Path

from orinbench.errors import BenchError

# A day of llama-bench is a few MB; anything much larger is no result, and would have to fit into
# memory several times.
MOST_BYTES = 256 << 20


def read_text(path: Path, wanted: str) -> str:
    """Return what is in a file; raises BenchError, which names what was wanted."""
    try:
        if path.exists() and not path.is_file():
            raise BenchError(f"{path}: is no regular file; want {wanted}")
        if path.stat().st_size > MOST_BYTES:
            raise BenchError(f"{path}: larger than {MOST_BYTES >> 20} MiB; want {wanted}")
        data = path.read_bytes()
        if data.startswith(b"SQLite format 3\0"):
            raise BenchError(f"{path}: is a SQLite file; want {wanted}")
        return data.decode()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise BenchError(f"{path}: cannot be read: is no text; want {wanted}") from None


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
