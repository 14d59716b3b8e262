"""Options that commands of `orinllm` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orinllm.errors import BadInput

if TYPE_CHECKING:
    from orinllm.sampling import Sampling

Command = Callable[..., None]


def with_sampling(command: Command) -> Command:
    """Add the options of how tokens are drawn."""
    options = (
        click.option(
            "--temperature",
            default=0.8,
            show_default=True,
            help="0 takes the most likely token; more is more random.",
        ),
        click.option(
            "--top-k",
            default=40,
            show_default=True,
            help="Draw from this many of the likeliest tokens; 0: from all.",
        ),
        click.option(
            "--top-p",
            default=0.95,
            show_default=True,
            help="Draw from the likeliest tokens that have this probability together.",
        ),
        click.option(
            "--min-p",
            default=0.05,
            show_default=True,
            help="Leave out tokens below this share of the likeliest one's probability.",
        ),
        click.option(
            "--repeat-penalty",
            default=1.0,
            show_default=True,
            help="Above 1, tokens that came before get less likely.",
        ),
        click.option(
            "--seed", default=0, show_default=True, help="The same seed gives the same text."
        ),
        click.option(
            "-n", "--max-tokens", type=click.IntRange(1), help="Most tokens of an answer."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_sampling(given: dict[str, Any]) -> Sampling:
    """Return what the options of `with_sampling` ask for; BadInput names the flag."""
    from orinllm.sampling import Sampling

    try:
        return Sampling(**given)
    except BadInput as error:
        name, _, wrong = str(error).partition(":")
        raise BadInput(f"--{name.replace('_', '-')}:{wrong}") from None


@dataclass(frozen=True)
class Source:
    """A model, and how it is loaded. kv: the type of keys and values."""

    model: Path
    context: int | None
    device: str | None
    general: bool
    kv: str


# Types of keys and values: KEY_TYPES of launches/buffers.py, which is slow to import.
_KEYS = click.Choice(["f16", "q8_0"])


def with_keys(command: Command) -> Command:
    """Add llama.cpp's options; the command is given `kv`."""

    @functools.wraps(command)
    def with_kv(cache_type_k: str, cache_type_v: str, **given: Any) -> None:
        if cache_type_k != cache_type_v:
            raise BadInput(
                f"-ctk {cache_type_k}, -ctv {cache_type_v}: keys and values are of one type; "
                "give both the same"
            )
        command(kv=cache_type_k, **given)

    keys = click.option(
        "-ctk",
        "--cache-type-k",
        type=_KEYS,
        default="f16",
        show_default=True,
        help="Type of keys in memory.",
    )
    values = click.option(
        "-ctv",
        "--cache-type-v",
        type=_KEYS,
        default="f16",
        show_default=True,
        help="Type of values in memory.",
    )
    return keys(values(with_kv))


def with_model(command: Command) -> Command:
    """Add the options of every command that loads a model, which is given a `Source`."""

    @functools.wraps(command)
    def with_source(
        model: Path, context: int | None, device: str | None, path_: str, kv: str, **given: Any
    ) -> None:
        command(Source(model, context, device, path_ == "general", kv), **given)

    whole: Command = with_keys(with_source)
    options = (
        click.argument("model", type=click.Path(path_type=Path)),
        click.option(
            "-c",
            "--context",
            type=int,
            help="Most tokens of prompt and answer together. Default: 8192, or the model's own.",
        ),
        click.option("--device", help="NV, CUDA or CPU. Default: the best that opens."),
        click.option(
            "--path",
            "path_",
            type=click.Choice(["auto", "general"]),
            default="auto",
            show_default=True,
            help="general: without the fused kernels.",
        ),
    )
    for option in reversed(options):
        whole = option(whole)
    return whole


def with_speculation(command: Command) -> Command:
    """Add the options of who guesses tokens."""
    options = (
        click.option(
            "--lookup",
            is_flag=True,
            help="Guess tokens from earlier text; same answer.",
        ),
        click.option(
            "--draft",
            metavar="MODEL",
            type=click.Path(path_type=Path),
            help="Guess tokens with a smaller model of the same vocabulary; same answer.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
