"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

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
