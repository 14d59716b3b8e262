"""Make the secrets that a board needs and nobody has set: `make_secrets.py FOLDER NAME...`.

A file that is there stays as it is. A name that ends in `-password` is said once on the console,
where its owner is. Runs as root, before the services that read them. Standard library only.
"""

import os
import secrets
import sys
from pathlib import Path

#: Bytes of randomness of each: 256 bits.
N_BYTES = 32
CONSOLE = Path("/dev/console")


def make(folder: Path, name: str) -> str | None:
    """Write a new secret and return it; None where there is one already."""
    path = folder / name
    if path.exists() and path.stat().st_size:
        return None
    secret = secrets.token_urlsafe(N_BYTES)
    new = folder / f".{name}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    return secret


def main(folder: Path, names: list[str]) -> None:
    """Make each; the log has where, the console alone has what."""
    for name in names:
        secret = make(folder, name)
        if secret is None:
            continue
        print(f"wrote {folder / name}")
        if name.endswith("-password"):
            said = f"{name}: {secret} (said this once; kept in {folder / name})\n"
            CONSOLE.write_text(said)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
