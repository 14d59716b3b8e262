"""Assemble every kernel of upstream's test_ops for the Orin's GPU; nothing runs, no GPU needed.

    python -m experiments.assemble_test_ops --upstream DIR [--tree DIR] [-n WORKERS] [-k TESTS]

DIR of --upstream is a checkout of tinygrad at its release tag, for its tests alone; --tree is the
tinygrad to test (the installed one without it). Both NVIDIA renderers are tried: PTX through
nvJitLink, CUDA C through NVRTC, both to code for sm_87, with the libraries of the cuda-tools extra
(12.6). Every vector access of the PTX is checked to be aligned. It needs pytest, pytest-xdist,
hypothesis and torch, which upstream's tests import.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.patches.conftest import COMPILERS, CUDA_HEADER, REPOSITORY, wheel_file

TARGETS = ("NULL:PTX:sm_87", "NULL:CUDA:sm_87")


def pytest_configure(config: Any) -> None:
    """As a pytest plugin: note what the compilers are given and what they say."""
    from experiments.ptx_alignment import accesses
    from tinygrad.runtime.support import compiler_cuda as compilers

    seen: dict[str, Any] = {"kernels": 0, "errors": [], "vectors": 0, "misaligned": []}
    sources: set[str] = set()
    to_ptx = compilers.NVRTCCompiler("sm_87", ptx=True)

    def noted(kind: Any, ptx_of: Any) -> None:
        original = kind.compile

        def compile(self: Any, source: str) -> bytes:
            if self is to_ptx or source in sources:
                return bytes(original(self, source))
            sources.add(source)
            seen["kernels"] += 1
            try:
                binary = bytes(original(self, source))
            except Exception as e:
                seen["errors"].append(str(e)[:500])
                raise
            for access in accesses(ptx_of(self, source)):
                seen["vectors"] += 1
                if not access.aligned:
                    seen["misaligned"].append(f"{access.kernel}: {access.statement}")
            return binary

        kind.compile = compile

    text = compilers.PTXCompiler.compile
    noted(compilers.NVPTXCompiler, lambda self, source: text(self, source).decode())
    noted(
        compilers.NVRTCCompiler,
        lambda self, source: to_ptx.compile(source).decode().rstrip("\0"),
    )

    class Writer:
        def pytest_sessionfinish(self) -> None:
            name = f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
            Path(os.environ["ASSEMBLE_OUT"], name).write_text(json.dumps(seen))

    config.pluginmanager.register(Writer())


def assemble(target: str, args: argparse.Namespace) -> bool:
    """Run test_ops on one target; print a line of figures; True when all is well."""
    with tempfile.TemporaryDirectory(prefix="assemble-") as tmp:
        trees = [args.tree.resolve()] if args.tree else []
        environment = os.environ | {
            "DEV": target,
            "NULL_ALLOW_COPYOUT": "1",
            "CCACHE": "0",
            "PARALLEL": "0",
            "XDG_CACHE_HOME": tmp,
            "ASSEMBLE_OUT": tmp,
            "PYTHONPATH": os.pathsep.join(map(str, [*trees, REPOSITORY, tmp])),
            **{name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()},
            "CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]),
        }
        # The checkout's own tinygrad/ must not be found before the tree: only its tests are linked.
        Path(tmp, "test").symlink_to(args.upstream.resolve() / "test")
        Path(tmp, "extra").symlink_to(args.upstream.resolve() / "extra")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line"]
        command += ["-p", "experiments.assemble_test_ops"]
        command += ["-p", "no:cacheprovider", "-n", str(args.workers), "--rootdir", tmp]
        done = subprocess.run(
            [*command, "-k", args.select, "test/backend/test_ops.py"],
            cwd=tmp, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        parts = [json.loads(path.read_text()) for path in Path(tmp).glob("*.json")]
    kernels, vectors = (sum(part[key] for part in parts) for key in ("kernels", "vectors"))
    errors = [e for part in parts for e in part["errors"]]
    misaligned = [m for part in parts for m in part["misaligned"]]
    summary = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    print(f"{target}: {kernels} kernels, {len(errors)} errors, {vectors} vector accesses, ", end="")
    print(f"{len(misaligned)} not aligned; pytest: {summary}", flush=True)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    for line in [*errors, *misaligned, *failed][:20]:
        print(f"  {line}")
    return kernels > 0 and not errors and not misaligned and done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Assemble for both renderers; exit code 1 when something fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--upstream", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tree", type=Path, metavar="DIR")
    parser.add_argument("-n", "--workers", type=int, default=1)
    parser.add_argument("-k", dest="select", default="", help="only these tests, as pytest's -k")
    args = parser.parse_args(argv)
    if not (args.upstream / "test" / "backend" / "test_ops.py").is_file():
        print(f"assemble_test_ops: {args.upstream} has no test/backend/test_ops.py: want a "
              "checkout of tinygrad at its release tag", file=sys.stderr)  # fmt: skip
        return 2
    good = [assemble(target, args) for target in TARGETS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
