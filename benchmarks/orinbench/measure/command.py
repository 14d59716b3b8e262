"""`orinbench llama-bench`: llama.cpp's benchmark, on tinygrad's devices and llama.cpp at once."""

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from orinbench.check.gate import CorrectnessGate
from orinbench.check.nonfinite import require_tensors
from orinbench.check.reference import unsupported_feature
from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, BenchError
from orinbench.interrupts import Interrupts
from orinbench.judge.history.store import history_path
from orinbench.judge.make_records import make_records
from orinbench.judge.verdict import rounds_needed
from orinbench.measure.backends.backend import Backend, CaseLeftOutError
from orinbench.measure.backends.llama_cpp import LlamaCppBackend, find_llama_bench
from orinbench.measure.backends.sm_limit import GreenContextPreload
from orinbench.measure.backends.tinygrad_backend import TinygradBackend, measure_copy_bandwidth
from orinbench.measure.board import parse_rails, require_textfile_directory, write_metrics_file
from orinbench.measure.journal import Journal, journal_directory, rename_lost_journals
from orinbench.measure.llama_flags import (
    LlamaBenchOptions,
    WholeWordFlagsCommand,
    all_devices_text,
    passed_on_arguments,
    require_rpc_addresses,
    with_version_and_hub_flags,
)
from orinbench.measure.models_and_backends import choose_backends, find_or_make_models
from orinbench.measure.plan import (
    KEY_TYPES,
    KNOBS,
    Case,
    Lane,
    Plan,
    lanes_for_each_environment,
    make_lanes,
    parse_settings,
    parse_variables,
)
from orinbench.measure.prompt_text import random_prompt_text
from orinbench.measure.results import RunResult
from orinbench.measure.runner import PlanRunner
from orinbench.measure.token_sampling import parse_sampling
from orinbench.model import ModelInfo, open_model
from orinbench.options import (
    PROCESSES,
    checked_process_count,
    kept_cache_environment,
    parse_numbers,
    print_and_keep_records,
    require_asked_board,
    require_output_paths,
    with_options,
)
from orinbench.pictures import RandomPictures, VisionModel
from orinbench.progress import Progress
from orinboard.files import Roots
from orinllm.cpu.program import MOST_ROWS
from orinllm.errors import BadInput
from orinllm.gpu.host_compiler import reason_clang_skipped

# Sequences that a decoder of the engine takes at most (orinllm/gpu/kernels/batch.py, which imports
# tinygrad, as this process does not).
MOST_SEQUENCES = 32
# A beam search takes minutes; repeating it for the sake of a cold start is nobody's wish.
SEARCH_VARIABLES = ("BEAM", "JITBEAM")
# If the starts of all processes together take longer, there are fewer.
FIT_SECONDS = 90.0
# Note after a run on a CPU without llama.cpp.
FIRST_RUN = "everything works here; the kernels are made for GPUs (docs/measure/performance.md)"


@click.command(
    "llama-bench",
    cls=WholeWordFlagsCommand,
    short_help="Measure a model on tinygrad and llama.cpp.",
    context_settings={"max_content_width": 100},
)
@with_version_and_hub_flags
@with_options(LlamaBenchOptions)
def llama_bench_command(options: LlamaBenchOptions) -> int:
    """Measure a model on tinygrad and llama.cpp, with llama-bench's flags.

    It measures prompts (pp), generation (tg) and the time from a prompt's text to the answer's
    first text (ttft). A LIST is 128,256 or 1-4 or 64-512+64 or 32-512*2; its flag may be repeated.
    Results go to standard output, everything else to standard error.
    """
    if options.list_devices:
        click.echo(all_devices_text(find_llama_bench(options.llama_bench)))
        return 0
    roots = Roots()
    require_possible_options(options, roots)
    plan_options = PlanOptions(options)
    talk, sms = Progress(options.progress), options.sms
    for path, samples in rename_lost_journals(journal_directory()):
        talk.print_line(f"an earlier run was killed; its samples are in {path} ({samples})")
    paths, synthetic = find_or_make_models(options, talk)
    models = {path: open_model(path) for path in paths}
    for model in models.values():
        if unsupported_feature(model) is None:
            require_tensors(model)
    tests, settings = plan_options.tests + picture_tests(options, paths), plan_options.settings
    if not tests:
        raise BenchError("-p 0 -n 0: nothing to run; give -p, -n or -pg a number above 0")
    asked = plan_options.texts if plan_options.asks_text else []
    require_contexts([*tests, *(Case(n, 0, 0, text=True) for n in asked)], models.values())
    backends, binary = choose_backends(options.backends, options.llama_bench, talk, sms)
    require_possible_plan(options, plan_options, backends)
    texts = timed_text_lengths(plan_options, models.values(), talk)
    lanes = make_lanes(backends, paths, tests, settings, texts, sms, options.sampling)
    lanes = lanes_for_each_environment(
        tuple(replace(lane, mmproj=options.mmproj) for lane in lanes), options.variables
    )
    if note := reason_clang_skipped(os.environ):
        talk.print_line(note)
    plan = Plan(lanes, plan_options.repetitions, options.seed, plan_options.processes)
    with (
        Interrupts() as interrupts,
        Journal(journal_directory()) as journal,
        temporary_preload(sms, binary if "llama.cpp" in backends else None) as preload,
    ):
        runner = PlanRunner(
            plan,
            [make_backend(lane, binary, options, preload) for lane in lanes],
            [models[lane.model] for lane in lanes if lane.model],
            talk,
            gate=CorrectnessGate(options.check, talk, binary, options.timeout),
            probe=None if sms else lambda device: measure_copy_bandwidth(device, options.timeout),
            delay=options.delay,
            warm_up=not options.no_warmup,
            cooldown=options.cooldown,
            roots=roots,
            journal=journal,
            rails=parse_rails(options.rails, roots),
            interrupts=interrupts,
            fit_seconds=None if options.processes else FIT_SECONDS,
            least_processes=rounds_needed(sum(len(lane.cases) for lane in lanes[1:])),
        )
        made_up = all(model.name.startswith("synthetic ") for model in models.values())
        runner.result.synthetic = synthetic or made_up
        is_first = is_first_run(options)
        run = run_and_report(runner, options, journal)
        if words := newcomer_note(run) if is_first else None:
            talk.print_line(words)
    return EXIT_INTERRUPTED if run.partial else EXIT_FAILED_ROWS if run.has_failures else 0


def require_possible_options(options: LlamaBenchOptions, roots: Roots) -> None:
    """Raise BenchError for what cannot be, before anything is written or opened."""
    require_output_paths(options)
    require_rpc_addresses(options)
    parse_variables(options.variables)
    if kept_cache_environment(options.kept) and options.cold_start:
        raise BenchError("--kept with --cold-start: a cold start has nothing kept; choose one")
    for text in options.sampling:
        parse_sampling(text)
        if options.path_ == "general":
            raise BenchError(f"--sampling {text}: tinygrad.llm's network draws in its own way")
    require_asked_board(options, roots)
    if options.textfile is not None:
        require_textfile_directory(options.textfile)


def run_and_report(runner: PlanRunner, options: LlamaBenchOptions, journal: Journal) -> RunResult:
    """Run and hand out what was measured, also where something unexpected is raised."""
    try:
        run = runner.run_plan()
    except Exception:
        if any(row.samples for lane in runner.result.lanes for row in lane.rows):
            runner.result.partial = True
            write_results(runner.result, options)
            journal.mark_not_needed()
        raise
    write_results(run, options)
    journal.mark_not_needed()
    return run


class PlanOptions:
    """The options that make the plan, parsed; raises BenchError for what cannot be run."""

    def __init__(self, options: LlamaBenchOptions) -> None:
        self.repetitions = options.repetitions
        self.processes = checked_process_count(options.processes, self.repetitions, PROCESSES)
        n_prompt = parse_numbers(options.n_prompt, "-p", 512)
        self.asks_text = bool(options.texts)
        self.texts = [n for n in parse_numbers(options.texts, "--ttft", max(n_prompt)) if n]
        self.parallel = parse_numbers(options.n_parallel, "-npl", 1, 1, MOST_SEQUENCES)
        self.tests = options.tests(self.parallel)
        self.settings = parse_settings(options.knobs)


def require_possible_plan(
    options: LlamaBenchOptions, plan: PlanOptions, backends: Sequence[str]
) -> None:
    """Raise BenchError for what no test or no backend of the run can do."""
    most = max(plan.parallel)
    if most > 1 and not any(test.n_gen for test in plan.tests):
        raise BenchError(f"-npl {most}: sequences decode -n tokens each, and -n is 0")
    general = options.path_ == "general"
    plain = [b for b in backends if b.startswith("tinygrad:" if general else "tinygrad:CPU")]
    if plain and most > (at_once := 1 if general else MOST_ROWS):
        path = f"the {'general' if general else 'cpu'} path"
        raise BenchError(f"-npl {most}: {plain[0]} decodes at most {at_once} at once on {path}")
    if "llama.cpp" in backends:
        return
    type_k, type_v = (",".join(options.knobs[name]).split(",") for name in ("type_k", "type_v"))
    keys = {*type_k, *type_v} - {""}
    if other := keys - {*(KEY_TYPES if not plain else ["f16"])}:
        raise BenchError(
            f"-ctk, -ctv {min(other)}: tinygrad keeps keys and values as f16, and as q8_0 on its "
            "fused kernels; llama.cpp, which takes other types, is not in this run"
        )
    if type_k != type_v and keys != {"f16"}:
        raise BenchError("-ctk, -ctv: keys and values are of one type in tinygrad; give both")


def timed_text_lengths(plan: PlanOptions, models: Iterable[ModelInfo], talk: Progress) -> list[int]:
    """Return the lengths of the texts to time, none where a model cannot answer such a text.

    Raises BenchError if they were asked for.
    """
    try:
        for model, n_tokens in itertools.product(models, plan.texts):
            if n_tokens >= model.context_length:
                raise CaseLeftOutError(
                    f"a text of {n_tokens} tokens leaves no room for an answer in the "
                    f"{model.context_length} of {model.path}"
                )
            random_prompt_text(model.path, n_tokens, 0)
    except CaseLeftOutError as error:
        if plan.asks_text:
            raise BenchError(f"--ttft: {error}") from None
        talk.print_line(f"time to the first text (--ttft) left out: {error}")
        return []
    return list(dict.fromkeys(plan.texts))


def picture_tests(options: LlamaBenchOptions, models: Sequence[Path]) -> list[Case]:
    """Return the tests of --mmproj: each picture alone, and before a question.

    Raises BenchError for files and sizes that cannot be.
    """
    sizes = [size for text in options.pictures for size in text.split(",")] or ["640x480"]
    if options.mmproj is None:
        if options.pictures:
            raise BenchError(f"--picture {sizes[0]}: the model sees with --mmproj FILE")
        return []
    if len(models) > 1 or options.path_ == "general":
        why = "the engine sees, not tinygrad.llm" if options.path_ == "general" else "it is of one"
        raise BenchError(f"--mmproj {options.mmproj}: {why}; leave the others out")
    drawn = [RandomPictures.parse(size, options.seed) for size in sizes]
    try:
        seeing = VisionModel.read(models[0], options.mmproj)
        seen = [seeing.encoder.prepare_picture(pictures.jpeg(0)) for pictures in drawn]
        prompts = [len(seeing.picture_prompt(picture)) for picture in seen]
    except BadInput as error:
        raise BenchError(f"--mmproj: {error}") from None
    ways = [
        (Case(picture.n_rows, 0, 0), Case(n, 0, 0, text=True))
        for picture, n in zip(seen, prompts, strict=True)
    ]
    return [
        replace(case, picture=size, encoder=seeing.projector_label)
        for size, both in zip(sizes, ways, strict=True)
        for case in both
    ]


def require_contexts(tests: Iterable[Case], models: Iterable[ModelInfo]) -> None:
    """Raise BenchError for a test that does not fit into a model's context."""
    for model, case in itertools.product(models, tests):
        if case.context_length > model.context_length:
            raise BenchError(
                f"{case.label} needs a context of {case.context_length} tokens; {model.path} has "
                f"{model.context_length}; use a smaller -p, -n, -pg or -d"
            )


@contextmanager
def temporary_preload(sms: int | None, binary: Path | None) -> Iterator[GreenContextPreload | None]:
    """Give the library that keeps llama.cpp to so many multiprocessors, where that is asked for.

    Raises BenchError, one line, where it cannot be built.
    """
    if sms is None or binary is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="orinbench-") as folder:
        yield GreenContextPreload(sms, Path(folder))


def make_backend(
    plan: Lane,
    binary: Path | None,
    options: LlamaBenchOptions,
    preload: GreenContextPreload | None = None,
) -> Backend:
    """Return the backend of a lane; nothing is started yet."""
    if plan.is_tinygrad:
        cold = options.cold_start
        cache = kept_cache_environment(options.kept)
        if cold is None:
            variables = {**os.environ, **dict(plan.variables)}
            cold = not cache and all(variables.get(name, "0") == "0" for name in SEARCH_VARIABLES)
        general = options.path_ == "general"
        made = TinygradBackend(plan, cold, options.timeout, options.verbose, general)
        made.environment |= cache
        return made
    assert binary is not None
    extra = ["--no-warmup"] if options.no_warmup else []
    extra += passed_on_arguments(options)
    return LlamaCppBackend(binary, plan, options.timeout, extra, options.verbose, preload)


def is_first_run(options: LlamaBenchOptions) -> bool:
    """Return whether this run begins the history: a note for newcomers is for once."""
    return not options.no_history and not (options.history or history_path()).exists()


def newcomer_note(run: RunResult) -> str | None:
    """Return a note for newcomers behind a whole run on CPUs without llama.cpp, else None."""
    others = any(lane.ran_on_gpu or not lane.plan.is_tinygrad for lane in run.lanes)
    return None if run.partial or run.has_failures or others else FIRST_RUN


def write_results(run: RunResult, options: LlamaBenchOptions) -> None:
    """Hand out the results, whole or not."""
    records = make_records(run)
    for record in records:
        record.ignored_flags = ignored_flags(record.backend, record.decode_path, options)
    print_and_keep_records(records, options)
    if options.textfile:
        write_metrics_file(map(vars, records), options.textfile)


def ignored_flags(backend: str, path: str | None, options: LlamaBenchOptions) -> list[str]:
    """Return the flags that were given and mean nothing to this backend, with their values.

    `path` is tinygrad's decode path: fused alone takes -ctk.
    """
    if backend == "llama.cpp":
        return []
    types = set(",".join(options.knobs["type_k"]).split(","))
    keys = options.knobs["type_k"] == options.knobs["type_v"] and types <= {*KEY_TYPES}
    flags = [
        f"{knob.flags[0]} {','.join(options.knobs[knob.field])}"
        for knob in KNOBS
        if options.knobs[knob.field]
        and not (knob.field == "n_threads" and backend.startswith("tinygrad:CPU"))
        and not (knob.field in ("type_k", "type_v") and path == "fused" and keys)
    ]
    words = iter(passed_on_arguments(options))
    return flags + [f"{flag} {value}" for flag, value in zip(words, words, strict=True)]
