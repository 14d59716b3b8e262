"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

from orinbench.errors import BenchError


def write_whole(path: Path, content: str | bytes) -> None:
    """Put `content` in the place of a file, its folder included; raises BenchError."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=".orinbench-", delete=False
        ) as new:
            new.write(data)
        os.chmod(new.name, 0o644)
        os.replace(new.name, path)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error
