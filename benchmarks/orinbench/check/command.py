"""`orinbench check`: the correctness gate on its own."""

import itertools
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from orinbench.check import EngineVerdict, judge_engine, long_prompts, random_prompts
from orinbench.check.gate import llama_cpp_engine_to_check, tinygrad_engine_to_check
from orinbench.check.vision import EncoderVerdict, judge_encoder
from orinbench.errors import EXIT_INTERRUPTED, BenchError, CheckFailed
from orinbench.measure.backends.tinygrad_backend import DeviceBackend
from orinbench.measure.models_and_backends import choose_backends, find_or_make_models
from orinbench.measure.plan import KEY_TYPES
from orinbench.model import ModelInfo, open_model
from orinbench.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    BackendOptions,
    ModelOptions,
    option_field,
    output_option,
    seed_option,
    timeout_option,
    with_options,
)
from orinbench.progress import Progress
from orinllm.mmproj import make_encode_function, read_mmproj

_TYPES: dict[str, Any] = {"type": click.Choice(KEY_TYPES), "default": "f16"}


@dataclass(frozen=True, kw_only=True)
class CheckOptions(BackendOptions, ModelOptions):
    """Options of the command."""

    n_tokens: int = option_field(
        "-n", "Tokens to decode after each prompt.", default=12, type=AT_LEAST_1
    )
    n_depth: int | None = option_field(
        "-d --n-depth",
        "Also judge tinygrad's layers behind a prompt of N tokens. [default: 552 on a GPU, if the "
        "context has 1024 and no layer a state]",
        type=AT_LEAST_0,
        metavar="N",
    )
    seed: int = seed_option("the prompts").as_field
    timeout: float = timeout_option("an answer").as_field  # seconds
    cache_type_k: str = option_field("-ctk --cache-type-k", "Type of the K cache.", **_TYPES)
    cache_type_v: str = option_field("-ctv --cache-type-v", "Type of the V cache.", **_TYPES)
    mmproj: str | None = option_field(
        "--mmproj", "Check the encoder of pictures of this file, too.", metavar="FILE"
    )
    output: str = output_option(["text", "json"]).as_field


@click.command("check", context_settings={"max_content_width": 100})
@with_options(CheckOptions)
def check_command(options: CheckOptions) -> int:
    """Check tokens and logits against a float64 reference.

    Exit code 3 says that numbers are wrong, 1 that an engine did not answer, 130 that Ctrl-C left
    some out.
    """
    if (key := options.cache_type_k) != (value := options.cache_type_v):
        raise BenchError(f"-ctk {key}, -ctv {value}: of one type in tinygrad; give both the same")
    talk = Progress()
    if options.mmproj is not None:
        read_mmproj(options.mmproj)
    paths, _ = find_or_make_models(options, talk)
    models = [open_model(path) for path in paths]
    for model in models:
        random_prompts(model, options.n_tokens, options.seed)
        long_prompts(model, options.n_depth or 0, options.n_tokens, options.seed)
    names, llama_bench = choose_backends(options.backends, options.llama_bench, talk)
    if key != "f16" and (plain := [name for name in names if name.startswith("tinygrad:CPU")]):
        raise BenchError(f"-ctk {key}: {plain[0]} keeps keys and values as f16; leave it out")
    reports: list[dict[str, Any]] = []
    died = interrupted = False
    try:
        for name in names if options.mmproj else ():
            if name.startswith("tinygrad:"):
                talk.show_phase(f"{name}: checking {options.mmproj}")
                seen = _judge_encoder(name, str(options.mmproj), options.seed)
                reports.append({"seed": options.seed, **asdict(seen)})
                talk.close()
                if options.output == "text":
                    click.echo(f"{options.mmproj}: {seen.summary_line()}")
        for model, name in itertools.product(models, names):
            talk.show_phase(f"{name}: checking {model.path}")
            try:
                verdict = _judge_backend(name, model, llama_bench, options, talk)
            except BenchError as error:
                died = True
                talk.print_line(f"{name}: {error}")
                continue
            seed = options.seed
            reports.append({"model": str(model.path), "seed": seed, **asdict(verdict)})
            talk.close()
            if options.output == "text":
                click.echo(f"{model.path}: {verdict.summary_line()}")
    except KeyboardInterrupt:
        interrupted = True
        talk.print_line(
            f"interrupted; {len(reports)} of {len(models) * len(names)} checks are done"
        )
    finally:
        talk.close()
    if options.output == "json":
        click.echo(json.dumps(reports, indent=2))
    if failed := sum(not report["passed"] for report in reports):
        raise CheckFailed(f"{failed} of {len(reports)} checks failed")
    if interrupted:
        return EXIT_INTERRUPTED
    return 1 if died else 0


def _judge_encoder(name: str, mmproj: str, seed: int) -> EncoderVerdict:
    clip, projector = read_mmproj(mmproj)
    encode = make_encode_function(name.removeprefix("tinygrad:"), clip, projector)
    return judge_encoder(name, Path(mmproj), encode, seed)


def _judge_backend(
    name: str, model: ModelInfo, llama_bench: Path | None, options: CheckOptions, talk: Progress
) -> EngineVerdict:
    def say(text: str) -> None:
        talk.show_detail(f"{name}: {text}")

    timeout, n_tokens, seed = options.timeout, options.n_tokens, options.seed
    if name == "llama.cpp":
        if (found := llama_cpp_engine_to_check(model, llama_bench, timeout, say)) is None:
            raise BenchError("no llama-server beside llama-bench or on PATH")
        return judge_engine(model, found, n_tokens, seed, say)
    with DeviceBackend(name.removeprefix("tinygrad:"), timeout) as device:
        candidate = tinygrad_engine_to_check(name, model, device, say, options.cache_type_k)
        if options.n_depth is not None:
            candidate = replace(candidate, long=options.n_depth)
        return judge_engine(model, candidate, n_tokens, seed, say)
