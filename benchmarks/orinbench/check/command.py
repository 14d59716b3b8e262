"""`orinbench check`: the correctness gate on its own."""

import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from orinbench.benchmark.command import choose_backends, model_paths
from orinbench.benchmark.plan import KEY_TYPES
from orinbench.benchmark.process import WorkerProcess
from orinbench.benchmark.tinygrad_backend import worker_environment
from orinbench.check import Candidate, CheckReport, run_check
from orinbench.check.gate import ARITHMETICS, llama_cpp_candidate
from orinbench.check.greedy import Say, tinygrad_engine
from orinbench.errors import EXIT_INTERRUPTED, BenchError, CheckFailed
from orinbench.model import ModelInfo, open_model
from orinbench.options import Finite, backend_options, model_options
from orinbench.talk import make_talk


@click.command("check", context_settings={"max_content_width": 100})
@model_options
@backend_options
@click.option(
    "n_tokens",
    "-n",
    default=12,
    type=click.IntRange(1),
    help="Tokens to decode after each prompt. [default: 12]",
)
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of the prompts. [default: 0]")
@click.option(
    "--timeout",
    default=1800.0,
    type=Finite(1),
    help="Seconds that an answer may take. [default: 1800]",
)
@click.option(
    "-ctk",
    "--cache-type-k",
    type=click.Choice(KEY_TYPES),
    default="f16",
    help="Type of the K cache. [default: f16]",
)
@click.option(
    "-ctv",
    "--cache-type-v",
    type=click.Choice(KEY_TYPES),
    default="f16",
    help="Type of the V cache. [default: f16]",
)
@click.option(
    "output",
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    help="Form of the output. [default: text]",
)
def check_command(**options: Any) -> int:
    """Check tokens and logits against a float64 reference.

    Exit code 3 says that numbers are wrong, 1 that an engine did not answer, 130 that Ctrl-C left
    some out.
    """
    if (key := options["cache_type_k"]) != (value := options["cache_type_v"]):
        raise BenchError(f"-ctk {key}, -ctv {value}: of one type in tinygrad; give both the same")
    talk = make_talk(False)
    paths, _ = model_paths(options, talk)
    models = [open_model(path) for path in paths]
    names, llama_bench = choose_backends(options["backends"], options["llama_bench"], talk)
    reports: list[CheckReport] = []
    died = interrupted = False
    try:
        with tempfile.TemporaryDirectory(prefix="orinbench-") as directory:
            for model, name in itertools.product(models, names):
                talk.phase(f"{name}: checking {model.path}")

                def say(text: str, name: str = name) -> None:
                    talk.detail(f"{name}: {text}")

                try:
                    candidate = _candidate(name, model, llama_bench, Path(directory), options, say)
                    report = run_check(
                        model, [candidate], options["n_tokens"], options["seed"], say
                    )
                except BenchError as error:
                    died = True
                    talk.line(f"{name}: {error}")
                    continue
                reports.append(report)
                talk.close()  # a spinner would share the line on a terminal
                if options["output"] == "text":
                    click.echo(f"{model.path}: {report.verdicts[0].line()}")
    except KeyboardInterrupt:
        interrupted = True
        talk.line(f"interrupted; {len(reports)} of {len(models) * len(names)} checks are done")
    finally:
        talk.close()
    if options["output"] == "json":
        click.echo(json.dumps([report.to_dict() for report in reports], indent=2))
    if failed := sum(not report.passed for report in reports):
        raise CheckFailed(f"{failed} of {len(reports)} checks failed")
    if interrupted:
        return EXIT_INTERRUPTED
    return 1 if died else 0


def _candidate(
    name: str,
    model: ModelInfo,
    llama_bench: Path | None,
    directory: Path,
    options: dict[str, Any],
    say: Say,
) -> Candidate:
    if name == "llama.cpp":
        if (found := llama_cpp_candidate(model, llama_bench, options["timeout"], say)) is None:
            raise BenchError("no llama-server beside llama-bench or on PATH")
        return found
    environment = worker_environment(name.removeprefix("tinygrad:"), directory)
    key_type = options["cache_type_k"]
    start = partial(WorkerProcess, environment, options["timeout"])
    return Candidate(
        name, tinygrad_engine(model.path, start, say, key_type=key_type), ARITHMETICS[key_type]
    )
