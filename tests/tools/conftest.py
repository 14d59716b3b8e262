"""A small base and series on which the tool does all that it does on the real one, quickly."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from patchseries.verify import MODULES

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PYPROJECT = """\
[project]
name = "tinygrad"
version = "0.13.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# Builds the wheel without a download, as PEP 517 and PEP 427 have it.
BACKEND = """\
import base64, hashlib, pathlib, tomllib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    name = f"tinygrad-{project['version']}"
    files = {str(p): p.read_bytes() for p in pathlib.Path("tinygrad").rglob("*.py")}
    metadata = f"Metadata-Version: 2.1\\nName: tinygrad\\nVersion: {project['version']}\\n"
    files[f"{name}.dist-info/METADATA"] = metadata.encode()
    wheel = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{name}.dist-info/WHEEL"] = wheel.encode()
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\\n"
    files[f"{name}.dist-info/RECORD"] = f"{record}{name}.dist-info/RECORD,,\\n".encode()
    with zipfile.ZipFile(f"{wheel_directory}/{name}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return f"{name}-py3-none-any.whl"
"""
MESSAGE = """\
{subject}

What was wrong, and what is done about it.

Why: fix
Upstream-Status: Pending
Depends-on: {depends}
Tests: tests/patches/test_{name}.py::test_value
Verified: cpu
Last-Update: 2026-11-21
Patch-Name: {file}
"""


def write_sdist(path: Path, files: dict[str, str]) -> str:
    """Write an archive as an sdist is laid out; returns its SHA-256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"tinygrad-0.13.0/{name}")
            info.size = len(text)
            info.mtime = 1_700_000_000
            info.uid = info.gid = 54321  # whoever made it
            tar.addfile(info, io.BytesIO(text.encode()))
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Repository:
    """A repository with patches/tinygrad, tests/patches and an sdist, below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sdist = root / "tinygrad-0.13.0.tar.gz"
        self.folder = root / "patches" / "tinygrad"
        self.folder.mkdir(parents=True)
        (root / "tests" / "patches").mkdir(parents=True)
        files = {"pyproject.toml": PYPROJECT, "backend.py": BACKEND}
        for module in MODULES:
            parts = module.split(".")
            for i in range(1, len(parts)):
                files.setdefault("/".join(parts[:i]) + "/__init__.py", "")
            leaf = "/".join(parts)
            if module != "tinygrad":
                files.setdefault(f"{leaf}.py", "")
        files["tinygrad/__init__.py"] = "\n".join(f"{name} = 0" for name in "abcdefghijklmnop")
        files["tinygrad/__init__.py"] += "\n"
        self.pin(write_sdist(self.sdist, files))
        (self.folder / "series").write_text("")

    def pin(self, sha256: str) -> None:
        """Write base.json."""
        base = {"name": "tinygrad", "version": "0.13.0", "sha256": sha256}
        (self.folder / "base.json").write_text(json.dumps(base))

    def run(self, *args: str | Path) -> int:
        """Run one command of the tool in this repository."""
        from patchseries.cli import main

        argv = [str(arg) for arg in args]
        if argv[0] in ("checkout", "verify", "install"):
            argv += ["--sdist", str(self.sdist)]
        return main(argv, self.root)

    def git(self, tree: Path, *args: str, stdin: str | None = None) -> str:
        """Run git in a checkout."""
        identity = ["-c", "user.name=A Person", "-c", "user.email=person@example.invalid"]
        done = subprocess.run(
            ["git", *identity, *args],
            cwd=tree,
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def add(self, tree: Path, number: int, name: str, depends: str = "none") -> None:
        """Commit to a checkout a patch that sets tinygrad.NAME to 1, and write its test."""
        code = tree / "tinygrad" / "__init__.py"
        code.write_text(code.read_text().replace(f"{name} = 0\n", f"{name} = 1\n"))
        file = f"{number:04}-set-{name}.patch"
        text = MESSAGE.format(subject=f"set: {name} is 1", depends=depends, name=name, file=file)
        self.git(tree, "commit", "-aqF", "-", stdin=text)
        test = self.root / "tests" / "patches" / f"test_{name}.py"
        test.write_text(f"import tinygrad\ndef test_value(): assert tinygrad.{name} == 1\n")

    def series(self, **depends: str) -> Path:
        """A series that sets b and m, exported from a checkout; returns the checkout."""
        tree = self.root / "checkout"
        assert self.run("checkout", tree) == 0
        self.add(tree, 1, "b", depends.get("b", "none"))
        self.add(tree, 4, "m", depends.get("m", "none"))
        assert self.run("export", tree) == 0
        return tree


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    # The little tests of the little series need none of pytest's plugins.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Repository(tmp_path / "repository")


Edit = Callable[[str, str], None]


@pytest.fixture
def edit(repository: Repository) -> Edit:
    """Replace text in the first patch."""

    def replace(old: str, new: str) -> None:
        path = repository.folder / "0001-set-b.patch"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return replace


def said(capture: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    err = capture.readouterr().err
    assert err.count("\n") == 1 and err.startswith("series: "), err
    return err
