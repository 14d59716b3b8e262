"""The options of commands with help and defaults, those of `orinllm serve` too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orinllm.errors import BadInput, escape_unprintable
from orinllm.server.options import EngineOptions, HttpOptions

if TYPE_CHECKING:
    from orinllm.choose.sampling import Sampling

Command = Callable[..., None]
Decorator = Callable[[Command], Command]
# What a command's context keeps the model's name under, as it was given.
_NAMED = "orinllm.model"


class ModelPathParam(click.Path):
    """A GGUF file, by its path or by its name on the hub, which is fetched if it is not here."""

    name = "MODEL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the file's path; raises BadInput for a name that the hub does not know."""
        from orinllm.file.hub import find_or_fetch_model

        if ctx is not None:
            ctx.meta[_NAMED] = str(value)
        return find_or_fetch_model(value, _print_to_stderr)


class DraftPathParam(click.Path):
    """A file that guesses tokens: another model's, or the block of the model's own."""

    name = "MODEL"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path | str:
        """Return the file's path, or the block's name."""
        from orinllm.file.hub import find_or_fetch_model
        from orinllm.loader import MTP

        return MTP if value == MTP else find_or_fetch_model(value, _print_to_stderr)


class MmprojPathParam(click.Path):
    """An mmproj file, by its path, or by the name of a repository on the hub that has one."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the file's path; raises BadInput where the repository has none."""
        from orinllm.file.hub import find_or_fetch_mmproj

        return find_or_fetch_mmproj(value, _print_to_stderr)


def _print_to_stderr(text: str) -> None:
    click.echo(escape_unprintable(text), err=True)


def _find_or_fetch_hub_mmproj() -> Path | None:
    """Return the mmproj of the repository that the model was named by; None: it was a path."""
    from orinllm.file.hub import HubName, find_or_fetch_mmproj

    named = click.get_current_context().meta.get(_NAMED, "")
    if Path(named).exists() or (name := HubName.parse_unless_path(named)) is None:
        return None
    return find_or_fetch_mmproj(f"hf.co/{name.repository}", _print_to_stderr)


def _option(name: str, default: Any, text: str, **more: Any) -> Decorator:
    """Return an option whose default is shown."""
    return click.option(name, default=default, show_default=True, help=text, **more)


def _flag(name: str, text: str) -> Decorator:
    return click.option(name, is_flag=True, help=text)


def _with_options(command: Command, *options: Decorator) -> Command:
    """Return a command with options, in the order of its help."""
    for option in reversed(options):
        command = option(command)
    return command


def with_sampling(command: Command) -> Command:
    """Add the options of how tokens are drawn."""
    return _with_options(
        command,
        _option("--temperature", 0.8, "Randomness: 0 takes the most likely token."),
        _option("--top-k", 40, "Draw from this many of the likeliest tokens; 0: from all."),
        _option(
            *("--top-p", 0.95),
            "Draw from the likeliest tokens that have this probability together.",
        ),
        _option(
            *("--min-p", 0.05),
            "Leave out tokens below this share of the likeliest one's probability.",
        ),
        _option("--repeat-penalty", 1.0, "Above 1, tokens that came before become less likely."),
        _option(
            *("--presence-penalty", 0.0),
            "Above 0, tokens that came before become less likely, however often.",
        ),
        _option(
            *("--frequency-penalty", 0.0),
            "Above 0, tokens become less likely with each time that they came before.",
        ),
        _option("--seed", 0, "Seed of the draw: the same seed gives the same text."),
        click.option(
            *("-n", "--max-tokens"),
            type=click.IntRange(1),
            help="Maximum tokens of an answer. Default: what the context holds.",
        ),
    )


def read_sampling(given: dict[str, Any]) -> Sampling:
    """Return what the options of `with_sampling` ask for; BadInput names the flag."""
    from orinllm.choose.sampling import Sampling

    try:
        return Sampling(**given)
    except BadInput as error:
        name, _, wrong = str(error).partition(":")
        raise BadInput(f"--{name.replace('_', '-')}:{wrong}") from None


@dataclass(frozen=True)
class ModelLoadOptions:
    """A model, and how it is loaded. kv: the type of keys and values. mmproj: how it sees."""

    model: Path
    context: int | None
    device: str | None
    general: bool
    kv: str
    mmproj: Path | None = None


# Types of keys and values: KEY_TYPES of launches/buffers.py, which is slow to import.
_KEYS = click.Choice(["f16", "q8_0"])


def with_cache_type(command: Command) -> Command:
    """Add llama.cpp's options; the command is given `kv`."""

    @functools.wraps(command)
    def with_kv(cache_type_k: str, cache_type_v: str, **given: Any) -> None:
        if cache_type_k != cache_type_v:
            raise BadInput(
                f"-ctk {cache_type_k}, -ctv {cache_type_v}: keys and values are of one type; "
                "give both the same"
            )
        command(kv=cache_type_k, **given)

    shared: dict[str, Any] = {"type": _KEYS, "default": "f16", "show_default": True}
    return _with_options(
        with_kv,
        click.option("-ctk", "--cache-type-k", help="Type of the keys in the cache.", **shared),
        click.option(
            "-ctv", "--cache-type-v", help="Type of the values in the cache; as -ctk.", **shared
        ),
    )


def with_model(command: Command) -> Command:
    """Add the options of every command that loads a model, which is given a `ModelLoadOptions`."""

    @functools.wraps(command)
    def with_source(
        model: Path, context: int | None, device: str | None, path_: str, kv: str, **given: Any
    ) -> None:
        mmproj = given.pop("mmproj")
        if mmproj is None and given.get("images"):
            mmproj = _find_or_fetch_hub_mmproj()
        command(ModelLoadOptions(model, context, device, path_ == "general", kv, mmproj), **given)

    return _with_options(
        with_cache_type(with_source),
        click.argument("model", type=ModelPathParam()),
        click.option(
            *("-c", "--context"),
            type=int,
            help="Maximum tokens of prompt and answer together. Default: 8192, or the model's.",
        ),
        click.option("--device", help="Device: NV, CUDA or CPU. Default: the best that opens."),
        click.option(
            "--mmproj",
            metavar="FILE",
            type=MmprojPathParam(),
            help="File with which the model sees pictures: llama.cpp's mmproj of the same model.",
        ),
        click.option(
            *("--path", "path_"),
            type=click.Choice(["auto", "general"]),
            default="auto",
            show_default=True,
            help="auto uses the fused CUDA kernels if they support the model; general never does.",
        ),
    )


def with_speculation(command: Command) -> Command:
    """Add the options of who guesses tokens."""
    return _with_options(
        command,
        _flag("--lookup", "Guess tokens from earlier text; same answer."),
        click.option(
            "--draft",
            metavar="MODEL",
            type=DraftPathParam(),
            help="Guess tokens with a smaller model of the same vocabulary, or with the block that "
            "the model's own file has for it: mtp; same answer.",
        ),
    )


def with_conversation(command: Command) -> Command:
    """Add the options of what a template is told beside the messages."""
    return _with_options(
        command,
        click.option("--system", help="System message that begins the conversation."),
        click.option(
            *("--think/--no-think", "thinking"),
            default=None,
            help="Let the model think before it answers, or not. Default: the template's.",
        ),
    )


def with_answer_form(command: Command) -> Command:
    """Add the options of the form that an answer has."""
    return _with_options(
        command,
        click.option(
            "--json-schema",
            metavar="SCHEMA",
            help="Answer in JSON of this schema: its text, or @FILE.",
        ),
        click.option(
            "--grammar",
            metavar="GRAMMAR",
            help="Answer in texts of this grammar, GBNF or Lark: its text, or @FILE.",
        ),
    )


def with_server(command: Command) -> Command:
    """Add the options of how a model is served."""
    path = click.Path(path_type=Path)
    return _with_options(
        command,
        _option("--host", "127.0.0.1", "Address to listen on."),
        _option("--port", 8000, "Port to listen on.", type=click.IntRange(0, 65535)),
        click.option("--api-key-file", type=path, help="File of accepted keys, one a line."),
        _flag("--insecure", "Listen for other machines without a key."),
        _flag("--strict", "Refuse fields of requests that have no effect."),
        click.option(
            "--allow-host", multiple=True, help="Another name of this server; may be repeated."
        ),
        click.option(
            "--allow-origin",
            multiple=True,
            help="Origin of web pages that may ask (CORS); may be repeated.",
        ),
        click.option(
            "--allow-image-host",
            multiple=True,
            metavar="HOST",
            help="Host of which pictures are fetched for requests; may be repeated.",
        ),
        click.option(
            "--alias", help="Name of the model in the API. Default: the file's, without .gguf."
        ),
        click.option(
            *("--chat-template", "template"),
            type=path,
            help="Jinja file to use instead of the model's template.",
        ),
        click.option(
            "--pooling",
            type=click.Choice(["mean", "last"]),
            help="Pooling of embeddings. Default: the file's, else mean.",
        ),
        click.option(
            "--slots",
            type=click.IntRange(1),
            help="Answers computed at once. Default: 32, on a CPU 8; the general path has 1.",
        ),
        _option("--memory", "70%", "Share of the free memory that keys and values may take."),
        _option(
            *("--queue", EngineOptions.queue, "Requests that may wait; others get status 429."),
            type=click.IntRange(0),
        ),
        _option(
            "--grace", HttpOptions.grace, "Seconds that running answers may take after SIGTERM."
        ),
        _flag("--deterministic", "Give the same answer whatever other requests run; slower."),
    )
