"""The command: what A and B are, and what it prints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from orinbench.benchmark.command import (
    best_tinygrad,
    check_contexts,
    model_paths,
)
from orinbench.benchmark.plan import Lane, LanePlan, check_backend_name
from orinbench.compare.revisions import Built, Revision, build, find_revision
from orinbench.compare.rounds import Bench, Measured, measure
from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, EXIT_SLOWER, BenchError
from orinbench.export.identity import differences
from orinbench.export.load import load_records
from orinbench.export.schema import Record
from orinbench.history.store import Filter, History, history_path
from orinbench.history.trend import case_key, read_trends, run_noise
from orinbench.interrupts import Interrupts
from orinbench.model import open_model
from orinbench.options import (
    case_options,
    history_option,
    keep,
    model_options,
    repetitions_option,
    tests_of,
)
from orinbench.samples.judge import (
    Judged,
    NoiseOf,
    is_slower,
    judge_saved,
    markdown,
    no_noise,
    pairs_needed,
)
from orinbench.talk import Talk, make_talk


@click.command("compare", context_settings={"max_content_width": 100})
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("-o", "--output", type=click.Choice(["md", "json"]), default="md", help="form [md]")
@history_option("database in which ids are looked up and revisions are kept")
@click.option("--no-history", is_flag=True, help="do not keep what is measured")
@model_options
@case_options
@click.option("--rounds", default=10, type=click.IntRange(1), help="pairs of processes [10]")
@repetitions_option(3, "repetitions in each round [3]")
@click.option("--backend", help="one tinygrad device [the best that opens]")
@click.option("--seed", default=0, type=click.IntRange(0), help="seed of order and token ids [0]")
@click.option("--check/--no-check", default=None, help="check the results before timing")
@click.option(
    "--timeout", default=1800.0, type=click.FloatRange(1), help="limit of a step, seconds [1800]"
)
@click.option("-v", "--verbose", is_flag=True, help="show the backends' own output")
@click.pass_context
def compare_command(
    context: click.Context,
    /,
    before: str,
    after: str,
    output: str,
    history: Path | None,
    no_history: bool,
    **options: Any,
) -> int:
    """Show for each test if B is faster or slower than A.

    A and B are two results: files of -o json or jsonl, ours or llama.cpp's, and
    ids of the history. Or they are two git revisions of this repository: then tinygrad is built as
    each has it, and both are measured in one run, interleaved. `file:`, `run:` or `rev:` before a
    name decides which it is.

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
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in options and source is ParameterSource.COMMANDLINE:
            flag = parameter.opts[0]
            raise BenchError(f"{flag}: says what to measure, which is for git revisions only")
    old, new = sides
    assert not isinstance(old, Revision) and not isinstance(new, Revision)
    judged = judge_saved(old, new, _noise_of(before, after, path))
    if not judged:
        raise BenchError(
            f"{before} and {after} have no test with samples in common (model, backend, test, -t)"
        )
    notes = [f"differs: {difference}" for difference in differences(old, new)]
    _print(judged, notes, output)
    return EXIT_SLOWER if is_slower(judged) else 0


def _noise_of(before: str, after: str, history: Path) -> NoiseOf:
    """Return how much runs differ by themselves, if both are of the history, which knows it."""
    one, other = (_run_of(name, history) for name in (before, after))
    if one is None or other is None:
        return no_noise
    with History(history) as store:
        found = run_noise(read_trends(store, Filter()), one, other)
    return lambda _, new: found.get(case_key(new))


def _run_of(name: str, history: Path) -> int | None:
    """Return the number of a run of the history that a name means, None for anything else."""
    kind, colon, rest = name.partition(":")
    text = rest if colon and kind == "run" else name
    if Path(name).exists() or not history.exists():
        return None
    with History(history) as store:
        if (pinned := store.pins().get(text)) is not None:
            return pinned
        return int(text) if text.isdecimal() and int(text) in store.ids() else None


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


def find_records(name: str, history: Path) -> list[Record]:
    """Return the records of a file or of a run of the history; raises BenchError."""
    if (records := _find_saved(name, history)) is None:
        raise BenchError(f"{name}: no such file, and no run of {history}")
    return records


def _find_saved(name: str, history: Path) -> list[Record] | None:
    kind, colon, rest = name.partition(":")
    if colon and kind == "file":
        return load_records(Path(rest))
    if colon and kind == "run":
        return _from_history(rest, history)
    if Path(name).exists():
        return load_records(Path(name))
    if (run := _run_of(name, history)) is not None:
        with History(history) as store:
            return store.records(run)
    return None


def _from_history(text: str, history: Path) -> list[Record]:
    if (run := _run_of(f"run:{text}", history)) is None and not text.isdecimal():
        raise BenchError(
            f"run:{text}: neither the number of a run nor a pinned name; `orinbench history` has "
            "them"
        )
    with History(history) as store:
        return store.records(int(text) if run is None else run)


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
    cases = tuple(tests_of(options))
    if options["rounds"] < (need := pairs_needed(len(cases))):
        raise BenchError(
            f"--rounds {options['rounds']}: a verdict on {len(cases)} tests at once takes {need}"
        )
    (path,), synthetic = _one_model(options, talk)
    model = open_model(path)
    backend = _backend(options["backend"], talk)
    check_contexts([LanePlan(Lane(backend, path), cases)], {path: model})
    names = ("rounds", "repetitions", "seed", "check", "timeout", "verbose")
    bench = Bench(backend, model, cases, **{name: options[name] for name in names})
    with Interrupts() as interrupts:
        try:
            built = (build(sides[0], talk), build(sides[1], talk))
            measured = measure(built, bench, talk, synthetic, interrupts)
        finally:
            talk.close()
        return _report(built, measured, bench, output, history)


def _report(
    built: tuple[Built, Built], measured: Measured, bench: Bench, output: str, history: Path | None
) -> int:
    """Print and keep what was measured of two revisions, and return the exit code."""
    judged = measured.judge()
    notes = [
        f"{letter}: {side.revision.name}, commit {side.revision.commit[:12]}, "
        f"tinygrad {side.version}"
        for letter, side in zip("AB", built, strict=True)
    ]
    rounds = f"{measured.rounds} rounds of fresh processes"
    notes.append(f"both: {bench.backend}, {bench.model.path.name}, {rounds}")
    if measured.run.partial:
        notes.append(f"interrupted; {bench.rounds} rounds were planned")
    notes += measured.errors()
    _print(judged, notes, output)
    if history is not None and measured.rounds:
        for side in range(len(built)):
            keep(measured.records(side), history)
    return _exit_code(measured, judged)


def _exit_code(measured: Measured, judged: Sequence[Judged]) -> int:
    if measured.run.partial:
        return EXIT_INTERRUPTED
    if is_slower(judged):
        return EXIT_SLOWER
    return EXIT_FAILED_ROWS if measured.errors() else 0


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
