"""`orinbench serve-bench`: load on one or several servers of OpenAI's protocol."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx

from orinbench.errors import EXIT_FAILED_ROWS, EXIT_INTERRUPTED, BenchError
from orinbench.interrupts import Interrupts
from orinbench.measure.backends.backend import CaseLeftOutError
from orinbench.measure.number_lists import parse_int_list
from orinbench.measure.prompt_text import random_prompt_text, random_words_text
from orinbench.options import (
    ABOVE_0,
    ANY_PATH,
    AT_LEAST_1,
    combined_field,
    option,
    option_field,
    output_option,
    seed_option,
    timeout_option,
    with_options,
)
from orinbench.pictures import RandomPictures
from orinbench.progress import Progress
from orinbench.serve.client import PATHS
from orinbench.serve.load import Load
from orinbench.serve.load_statistics import parse_goals
from orinbench.serve.output import render_json, render_md
from orinbench.serve.run import LoadPlan, Server, ServeResults, run_rounds
from orinbench.serve.servers import STARTED, ServerCapacity, server_argv, started_server

# Seeds of the run's texts lie so far apart; a request takes one.
_SEED_STEP = 1_000_003
_HTTP = ("http", "https")


_FILE: dict[str, Any] = {"type": ANY_PATH, "metavar": "FILE"}


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the command; `flags` are those of each server that can be started."""

    urls: tuple[str, ...] = option_field(
        "--url", "A running server; may be repeated.", multiple=True, metavar="URL"
    )
    start: str | None = option_field(
        "--start", f"Servers to start, in turns: {', '.join(STARTED)}.", metavar="LIST"
    )
    model: Path | None = option("-m --model", "GGUF file to serve.", **_FILE).as_field
    model_name: str | None = option_field(
        "--model-name",
        "The model's name. [default: the first that the server lists]",
        metavar="NAME",
    )
    api_key_file: Path | None = option("--api-key-file", "File with the key.", **_FILE).as_field
    endpoint: str = option_field(
        "--endpoint", "The path that is asked.", type=click.Choice([*PATHS]), default="completions"
    )
    flags: Mapping[str, str] = combined_field(
        {
            name: option(
                f"--{name}-flags", f"Flags of {name}, for --start.", default="", metavar="FLAGS"
            )
            for name in STARTED
        }
    )
    input_len: int = option_field(
        "-p --input-len", "Tokens of a prompt.", type=AT_LEAST_1, default=512
    )
    output_len: int = option_field(
        "-n --output-len", "Tokens of an answer.", type=AT_LEAST_1, default=128
    )
    picture: str | None = option_field(
        "--picture",
        "A picture of so many pixels before each prompt, drawn; with --endpoint chat.",
        metavar="WxH",
    )
    mmproj: Path | None = option(
        "--mmproj", "File with which servers of --start see pictures.", **_FILE
    ).as_field
    concurrency: str | None = option_field(
        "--concurrency", "Closed loop: requests at once. [default: 1,8]", metavar="LIST"
    )
    rate: str | None = option_field("--rate", "Open loop: requests a second.", metavar="LIST")
    burstiness: float = option_field(
        "--burstiness",
        "Arrivals of --rate: below 1 in bursts, at 1 Poisson, above 1 more evenly.",
        type=ABOVE_0,
        default=1.0,
    )
    requests: int | None = option_field(
        "--requests",
        "Requests of each load. [default: 4 a user, at least 16]",
        type=AT_LEAST_1,
        metavar="N",
    )
    goodput: str | None = option_field(
        "--goodput", "Limits in ms for goodput, as ttft:200,tpot:20,e2el:5000.", metavar="LIMITS"
    )
    rounds: int = option_field(
        "-r --rounds",
        "Rounds. A verdict takes 7, with several loads up to 10.",
        type=AT_LEAST_1,
        default=3,
    )
    seed: int = seed_option("texts and arrivals").as_field
    timeout: float = timeout_option("a step", 600.0).as_field
    output: str = output_option(["md", "json"]).as_field
    verbose: bool = option_field("-v --verbose", "Show the servers' own output.", is_flag=True)


@click.command("serve-bench", context_settings={"max_content_width": 100})
@with_options(ServeOptions)
def serve_bench_command(options: ServeOptions) -> int:
    """Measure servers that speak OpenAI's protocol, under load.

    Prints latencies, throughput and goodput. Give --url, or --start with -m FILE. Each request has
    another random text, with -m of exactly -p tokens, else of -p words. Results go to standard
    output, the rest to standard error. Ctrl-C and SIGTERM print what was measured until then.
    """
    loads = _parse_loads(options)
    plan = _make_plan(options, loads)
    servers = _make_servers(options, plan)
    talk = Progress()
    with Interrupts() as interrupts:
        try:
            results = run_rounds(plan, servers, talk, interrupts)
        finally:
            talk.close()
        click.echo((render_json if options.output == "json" else render_md)(results), nl=False)
    if results.fault is not None:
        raise BenchError(results.fault)
    return EXIT_INTERRUPTED if results.partial else EXIT_FAILED_ROWS * _any_failed(results)


def _any_failed(results: ServeResults) -> bool:
    stretches = [s for rounds in results.stretches.values() for s in rounds.values()]
    return any(answer.error for stretch in stretches for answer in stretch.answers)


def _parse_loads(options: ServeOptions) -> tuple[Load, ...]:
    if options.burstiness != 1 and not options.rate:
        raise BenchError(f"--burstiness {options.burstiness:g}: is of --rate, which is not given")
    given = options.concurrency or (None if options.rate else "1,8")
    loads = [Load(n) for n in parse_int_list(given, "--concurrency", 1)] if given else []
    for text in options.rate.split(",") if options.rate else ():
        try:
            rate = float(text)
        except ValueError:
            rate = -1.0
        if not 0 < rate < float("inf"):
            raise BenchError(f"--rate {options.rate}: '{text}' is no number of requests a second")
        loads.append(Load(rate=rate, burstiness=options.burstiness))
    return tuple(dict.fromkeys(loads))


def _make_plan(options: ServeOptions, loads: tuple[Load, ...]) -> LoadPlan:
    headers = {}
    if (path := options.api_key_file) is not None:
        try:
            keys = path.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"--api-key-file {path}: cannot be read: {error}") from None
        if not keys:
            raise BenchError(f"--api-key-file {path}: is empty; a key was expected")
        headers["Authorization"] = f"Bearer {keys[0]}"
    pictures, rows = _pictures_and_token_count(options)
    return LoadPlan(
        loads=loads,
        rounds=options.rounds,
        requests=options.requests,
        max_tokens=options.output_len,
        prompt=_prompt_maker(options.model, options.input_len, options.seed),
        endpoint=options.endpoint,
        model_name=options.model_name,
        headers=headers,
        timeout=options.timeout,
        seed=options.seed,
        goals=parse_goals(options.goodput),
        pictures=pictures,
        rows=rows,
    )


def _pictures_and_token_count(options: ServeOptions) -> tuple[RandomPictures | None, int | None]:
    if options.picture is None:
        if options.mmproj is not None:
            raise BenchError(f"--mmproj {options.mmproj}: is of --picture, which is not given")
        return None, None
    if options.endpoint != "chat":
        raise BenchError(f"--picture {options.picture}: is of chats; give --endpoint chat")
    if options.start and options.mmproj is None:
        raise BenchError(f"--start {options.start}: sees with --mmproj FILE, which is not given")
    pictures = RandomPictures.parse(options.picture, options.seed)
    return pictures, None if options.mmproj is None else pictures.token_count(options.mmproj)


def _prompt_maker(model: Path | None, length: int, seed: int) -> Callable[[int], str]:
    base = seed * _SEED_STEP
    if model is None:
        return lambda i: random_words_text(length, base + i)
    try:
        random_prompt_text(model, length, base)
    except CaseLeftOutError as error:
        raise BenchError(str(error)) from None
    return lambda i: random_prompt_text(model, length, base + i)


def _url_as_context(url: str) -> AbstractContextManager[str]:
    return nullcontext(url)


def _require_http_url(text: str) -> None:
    try:
        url = httpx.URL(text)
        good = url.scheme in _HTTP and url.host and (url.port or 1) < 1 << 16
    except httpx.InvalidURL:
        good = False
    if not good or url.query or url.fragment:
        raise BenchError(f"--url {text!r}: no address; right is http://127.0.0.1:8000")


def _make_servers(options: ServeOptions, plan: LoadPlan) -> tuple[Server, ...]:
    names = [name for name in (options.start or "").split(",") if name]
    if unknown := [name for name in names if name not in STARTED]:
        raise BenchError(f"--start {unknown[0]}: unknown; there are {', '.join(STARTED)}")
    for name in set(STARTED) - set(names):
        if more := options.flags[name]:
            raise BenchError(f"--{name}-flags {more}: are for --start {name}, which is not given")
    for url in options.urls:
        _require_http_url(url)
    if not names and not options.urls:
        raise BenchError("--url or --start: no server; give --url URL, or --start with -m FILE")
    found = [Server(url, partial(_url_as_context, url)) for url in dict.fromkeys(options.urls)]
    for name in dict.fromkeys(names):
        if options.model is None:
            raise BenchError(f"--start {options.start}: serves a file; name it with -m FILE")
        most = max(load.concurrency or 0 for load in plan.loads) or 8
        queue = max(map(plan.request_count, plan.loads))
        tokens = options.input_len + plan.max_tokens + (plan.rows or 0)
        room = ServerCapacity(options.model, most, tokens, queue)
        more = options.flags[name]
        if options.mmproj is not None:
            more += f" --mmproj {shlex.quote(str(options.mmproj))}"
        server_argv(name, room, 0, more)  # raises where there is no program
        serve = partial(started_server, name, room, more, options.timeout, options.verbose)
        found.append(Server(name, serve, fresh=True))
    return tuple(found)
