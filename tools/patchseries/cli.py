"""The command line of tools/series."""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .install import install_if_missing
from .other_base import try_on_other_base
from .process import SeriesError
from .series import Series, patch_summaries_text, read_series
from .tree import commit_series, fetch_sdist, patches_of_commits, unpack_tar, write_patches
from .verify import verify_series

ROOT = Path(__file__).resolve().parents[2]


class _RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SeriesError(f"{message} (see {self.prog} --help)")


def _make_parser() -> argparse.ArgumentParser:
    parser = _RaisingParser(
        prog="series",
        description="Check out, edit, prove and install the patch series on tinygrad.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, sdist: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        if sdist:
            command.add_argument(
                "--sdist", type=Path, metavar="FILE", help="tinygrad's release, already downloaded"
            )
        return command

    checkout = add("checkout", "Make DIR a git tree: the base, one commit per patch.", sdist=True)
    checkout.add_argument("dir", type=Path, metavar="DIR", help="a new or empty folder")
    export = add("export", "Write the commits of DIR back as patches.")
    export.add_argument("dir", type=Path, metavar="DIR", help="a tree that checkout made")
    proof = add(
        "verify",
        "Run the tests of each patch with and without it; exit code 1 if one is not proven.",
        sdist=True,
    )
    proof.add_argument(
        "patches", nargs="*", metavar="PATCH", help="run the tests of these patches only"
    )
    proof.add_argument(
        "--quick", action="store_true", help="apply and import the patches, but run no tests"
    )
    forward_help = "only report which patches apply to a VERSION, or to a git tree: DIR[@REF]"
    proof.add_argument("--forward", metavar="TARGET", help=forward_help)
    jobs_help = "test so many patches at once (default: one per CPU)"
    proof.add_argument(
        "-j", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help=jobs_help
    )
    add("status", "Print each patch's reason, what it needs, and where upstream stands.")
    setup = add("install", "Install the patched base into a virtual environment.", sdist=True)
    setup.add_argument("venv", type=Path, metavar="VENV", help="its folder")
    return parser


def _checkout(series: Series, args: argparse.Namespace) -> None:
    to: Path = args.dir
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise SeriesError(f"{to}: exists and is not an empty folder")
    archive = fetch_sdist(series.base, args.sdist)
    to.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.resolve().parent, prefix=".checkout-") as tmp:
        tree = unpack_tar(archive, Path(tmp, "tree"))
        commit_series(tree, series.patches)
        if to.exists():
            to.rmdir()
        shutil.move(tree, to)
    print(f"{to}: {series.base.name} {series.base.version} and {len(series.patches)} patches")


def _export(series: Series, args: argparse.Namespace) -> None:
    for name in (changed := write_patches(series, patches_of_commits(args.dir))):
        print(series.folder.relative_to(series.root) / name)
    if not changed:
        print("nothing changed")


def _verify(series: Series, args: argparse.Namespace) -> int:
    def say(line: str) -> None:
        print(line, flush=True)

    if args.jobs < 1:
        raise SeriesError(f"--jobs {args.jobs}: want 1 or more")
    if args.forward is not None and (args.patches or args.quick):
        with_it = "--quick" if args.quick else args.patches[0]
        raise SeriesError(
            f"--forward {args.forward}: {with_it} has no meaning with it, leave it out"
        )
    archive = fetch_sdist(series.base, args.sdist)
    if args.forward is not None:
        try_on_other_base(series, args.forward, archive, say)
        return 0
    held = verify_series(series, archive, args.patches, args.quick, args.jobs, say)
    return 0 if held else 1


def _install(series: Series, args: argparse.Namespace) -> None:
    done = install_if_missing(series, args.venv, args.sdist)
    word = "installed" if done else "already there"
    print(f"{series.base.name} {series.patched_version()}: {word} in {args.venv}")


COMMANDS: dict[str, Callable[[Series, argparse.Namespace], int | None]] = {
    "checkout": _checkout,
    "export": _export,
    "verify": _verify,
    "status": lambda series, _: print(patch_summaries_text(series)),
    "install": _install,
}


def main(argv: Sequence[str], root: Path = ROOT) -> int:
    """Run one command; returns the exit code."""
    try:
        args = _make_parser().parse_args(argv)
        return COMMANDS[args.command](read_series(root), args) or 0
    except SeriesError as e:
        print(f"series: {e}", file=sys.stderr)
        return e.exit_code
    except OSError as e:  # a folder that cannot be written, a disk that is full
        where = f"{e.filename}: " if e.filename else ""
        print(f"series: {where}{e.strerror or e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("series: interrupted", file=sys.stderr)
        return 130
