"""The command: what A and B are, and what it prints."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from orinbench.compare.judge import EXIT_SLOWER, Judged, is_slower, judge_saved, markdown
from orinbench.compare.revisions import Revision, build, find_revision
from orinbench.compare.rounds import Bench, Measured, measure
from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, BenchError
from orinbench.history.store import History, history_path
from orinbench.identity import differences
from orinbench.llama_bench import (
    best_tinygrad,
    check_contexts,
    model_paths,
)
from orinbench.model import open_model
from orinbench.options import Command, check_repetitions, history_option, keep, with_options
from orinbench.plan import Case, Lane, LanePlan, check_backend_name, make_tests
from orinbench.ranges import parse_int_list, parse_pair
from orinbench.record import Record
from orinbench.saved import load_results
from orinbench.statistics import pairs_needed
from orinbench.talk import Talk, make_talk

# Options that say what is measured: without a meaning for results that are there already.
BENCH_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "model": (("-m", "--model"), {"multiple": True, "metavar": "FILE", "help": "GGUF file"}),
    "n_prompt": (("-p", "--n-prompt"), {"multiple": True, "metavar": "LIST", "help": "[512]"}),
    "n_gen": (("-n", "--n-gen"), {"multiple": True, "metavar": "LIST", "help": "[128]"}),
    "pairs": (("-pg",), {"multiple": True, "metavar": "PP,TG", "help": "prompt, then generation"}),
    "n_depth": (("-d", "--n-depth"), {"multiple": True, "metavar": "LIST", "help": "[0]"}),
    "rounds": (("--rounds",), {"type": click.IntRange(1), "help": "pairs of processes [10]"}),
    "repetitions": (("-r", "--repetitions"), {"metavar": "N", "help": "in each round [3]"}),
    "backend": (("--backend",), {"help": "one tinygrad device [the best that opens]"}),
    "seed": (("--seed",), {"type": click.IntRange(0), "help": "of order and token ids [0]"}),
    "shape": (("--shape",), {"help": "shape of the synthetic model used without -m [160m]"}),
    "quant": (("--quant",), {"help": "its type [Q6_K]"}),
    "check": (("--check/--no-check",), {"default": None, "help": "check the numbers first"}),
    "timeout": (("--timeout",), {"type": click.FloatRange(1), "help": "seconds a step [1800]"}),
    "verbose": (("-v", "--verbose"), {"is_flag": True, "help": "let the backends talk"}),
}


def _bench_options(command: Command) -> Command:
    options = BENCH_OPTIONS.items()
    return with_options(command, *(click.option(n, *flags, **how) for n, (flags, how) in options))


@click.command("compare", context_settings={"max_content_width": 100})
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", help="form [md]")
@history_option("where ids are looked up, and revisions are kept")
@click.option("--no-history", is_flag=True, help="do not keep what is measured")
@_bench_options
def compare_command(
    before: str, after: str, output: str, history: Path | None, no_history: bool, **options: Any
) -> int:
    """Say for each test whether B is faster or slower than A.

    A and B are two results that are there: files of -o json, jsonl or sql, ours or llama.cpp's, and
    ids of the history. Or they are two git revisions of this repository: then tinygrad is built as
    each has it, and both are measured in one run, interleaved. What is meant is found out, unless
    the name begins with file:, run: or rev:.

    Exit code 0: nothing is slower. 1: something is. 2: bad input.
    """
    path = history or history_path()
    sides = [_resolve(name, path) for name in (before, after)]
    if all(isinstance(side, Revision) for side in sides):
        talk = make_talk(False)
        kept = None if no_history else path
        return _compare_revisions(sides, output, kept, options, talk)  # type: ignore[arg-type]
    if any(isinstance(side, Revision) for side in sides):
        raise BenchError(
            f"{before}, {after}: one is a git revision and one a result; both must be of a kind"
        )
    if given := [name for name in BENCH_OPTIONS if options[name] not in (None, (), False)]:
        flag = BENCH_OPTIONS[given[0]][0][0]
        raise BenchError(f"{flag}: says what to measure, which is for git revisions only")
    old, new = sides
    assert not isinstance(old, Revision) and not isinstance(new, Revision)
    judged = judge_saved(old, new)
    if not judged:
        raise BenchError(
            f"{before} and {after} have no test with samples in common (model, backend, test, -t)"
        )
    notes = [f"differs: {difference}" for difference in differences(old, new)]
    _print(judged, notes, output)
    return EXIT_SLOWER if is_slower(judged) else 0


def _resolve(name: str, history: Path) -> list[Record] | Revision:
    """Return the records or the revision that `name` means; raises BenchError for neither."""
    kind, colon, rest = name.partition(":")
    explicit = bool(colon) and kind == "rev"
    if not explicit and (records := _find_saved(name, history)) is not None:
        return records
    if (revision := find_revision(rest if explicit else name, Path.cwd())) is not None:
        return revision
    raise BenchError(
        f"{name}: no such file, no run of {history}, and no git revision of a checkout around here"
    )


def saved_records(name: str, history: Path) -> list[Record]:
    """Return the records of a file or of a run of the history; raises BenchError."""
    if (records := _find_saved(name, history)) is None:
        raise BenchError(f"{name}: no such file, and no run of {history}")
    return records


def _find_saved(name: str, history: Path) -> list[Record] | None:
    kind, colon, rest = name.partition(":")
    if colon and kind == "file":
        return load_results(Path(rest))
    if colon and kind == "run":
        return _from_history(rest, history)
    if Path(name).exists():
        return load_results(Path(name))
    if name.isdecimal() and history.exists():
        with History(history) as store:
            if int(name) in store.ids():
                return store.records(int(name))
    return None


def _from_history(text: str, history: Path) -> list[Record]:
    if not text.isdecimal():
        raise BenchError(f"run:{text}: not the number of a run; `orinbench history` lists them")
    with History(history) as store:
        return store.records(int(text))


def _print(judged: Sequence[Judged], notes: Sequence[str], output: str) -> None:
    if output == "json":
        click.echo(json.dumps([test.plain() for test in judged], ensure_ascii=False))
    else:
        click.echo(markdown(judged, notes, "B", "A"))


def _compare_revisions(
    sides: tuple[Revision, Revision],
    output: str,
    history: Path | None,
    options: dict[str, Any],
    talk: Talk,
) -> int:
    options = _with_defaults(options)
    cases = _cases(options)
    if options["rounds"] < (need := pairs_needed(len(cases))):
        raise BenchError(
            f"--rounds {options['rounds']}: a verdict on {len(cases)} tests at once takes {need}"
        )
    (path,), synthetic = _one_model(options, talk)
    model = open_model(path)
    backend = _backend(options["backend"], talk)
    check_contexts([LanePlan(Lane(backend, path), cases)], {path: model})
    bench = Bench(
        *(backend, model, cases, options["rounds"], check_repetitions(options["repetitions"])),
        *(options["seed"], options["check"], options["timeout"], options["verbose"]),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        built = (build(sides[0], talk), build(sides[1], talk))
        measured = measure(built, bench, talk, synthetic)
    finally:
        talk.close()
    judged = measured.judge()
    notes = [
        f"{letter}: {side.revision.name}, commit {side.revision.commit[:12]}, "
        f"tinygrad {side.version}"
        for letter, side in zip("AB", built, strict=True)
    ]
    notes += [f"both: {backend}, {path.name}, {len(measured.runs)} rounds of fresh processes"]
    if measured.partial:
        notes.append(f"interrupted in round {len(measured.runs) + 1} of {bench.rounds}")
    notes += measured.errors()
    _print(judged, notes, output)
    if history is not None and measured.runs:
        for side in range(len(built)):
            keep(measured.records(side), history)
    return _exit_code(measured, judged)


def _exit_code(measured: Measured, judged: Sequence[Judged]) -> int:
    if measured.partial:
        return EXIT_INTERRUPTED
    if is_slower(judged):
        return EXIT_SLOWER
    return EXIT_FAILED_ROWS if measured.errors() else 0


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "rounds": 10,
        "repetitions": "3",
        "seed": 0,
        "shape": "160m",
        "quant": "Q6_K",
        "timeout": 1800.0,
    }
    return options | {name: value for name, value in defaults.items() if options[name] is None}


def _cases(options: dict[str, Any]) -> tuple[Case, ...]:
    def numbers(name: str, default: int) -> list[int]:
        flag = BENCH_OPTIONS[name][0][0]
        return [n for text in options[name] for n in parse_int_list(text, flag)] or [default]

    pairs = [parse_pair(pair, "-pg") for pair in options["pairs"]]
    tests = make_tests(
        numbers("n_prompt", 512), numbers("n_gen", 128), pairs, numbers("n_depth", 0)
    )
    return tuple(Case(*test) for test in tests)


def _one_model(options: dict[str, Any], talk: Talk) -> tuple[list[Path], bool]:
    paths, synthetic = model_paths(options, talk)
    if len(paths) > 1:
        raise BenchError("-m: revisions are compared on one model; give one")
    return paths, synthetic


def _backend(given: str | None, talk: Talk) -> str:
    if given is None:
        found = best_tinygrad(talk)
        if not found:
            raise BenchError("--backend: no device of tinygrad opens here")
        return found[0]
    if not given.startswith("tinygrad:") or not check_backend_name(given):
        raise BenchError(f"--backend {given}: revisions differ in tinygrad; name tinygrad:NV, "
                         "tinygrad:CUDA or tinygrad:CPU")  # fmt: skip
    return given
