"""The environment that the pages tell a reader to set, and a desk at which commands run."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.pages import REPOSITORY

SCRIPT = (
    "from tinygrad import Tensor\nprint((Tensor.ones(4).contiguous().realize() + 1).tolist())\n"
)
TEST = """from tinygrad import Tensor
def test_adds() -> None:
    assert (Tensor.ones(4).contiguous().realize() + 1).tolist() == [2] * 4
"""
# Parts of the repository that commands change; all else is read in place.
COPIED = ("patches", "tools", "tests/patches", "docs/examples")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of docs/examples/env.py, caches of our own, and none of tinygrad's variables."""
    cache = tmp_path_factory.mktemp("cache")
    # The base is in the user's cache if tinygrad was installed with tools/series.
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tinygrad-orin"
    (cache / "tinygrad-orin").mkdir()
    for archive in home.glob("*.tar.gz"):
        shutil.copy(archive, cache / "tinygrad-orin")
    names = ("PATH", "HOME", "LANG", "TMPDIR", "USER")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    for who in ("AUTHOR", "COMMITTER"):
        variables |= {f"GIT_{who}_NAME": "A Reader", f"GIT_{who}_EMAIL": "reader@example.invalid"}
    variables |= {"XDG_CACHE_HOME": str(cache), "NO_COLOR": "1", "TMPDIR": str(cache)}
    variables |= {"XDG_STATE_HOME": str(cache)}  # no run of a test goes into the user's history
    done = subprocess.run(
        [sys.executable, REPOSITORY / "docs" / "examples" / "env.py"],
        env=variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line in shlex.split(done.stdout, comments=False):
        name, equals, value = line.partition("=")
        if equals:
            variables[name] = value
    assert {"PATH", "NVRTC_PATH", "NVJITLINK_PATH"} <= variables.keys(), "env.py prints too little"
    return variables


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Path]:
    """A folder with what the pages' commands name: a script, a test, a package, models, a trace."""
    folder = tmp_path_factory.mktemp("desk")
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pyc*"))
    (folder / "script.py").write_text(SCRIPT)
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text(SCRIPT)
    for test in ("test_ops", "test_jit"):
        (folder / "tests" / f"{test}.py").write_text(TEST)
    for command in (
        "orinbench synth --shape tiny --quant Q6_K model.gguf",
        "python3 -m nvgpusim --quiet --record trace.jsonl -- script.py",
    ):
        subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, check=True, capture_output=True
        )
    yield folder
    shutil.rmtree(folder)
