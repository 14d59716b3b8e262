"""Workload of `tune`: a model as its worker runs it, and the options that name it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.synth import cached_synthetic, progress_bar

_UNITS = {"s": 1, "m": 60, "h": 3600}

Command = Callable[..., Any]


def model_options(command: Command) -> Command:
    """Add the options that name a model and the device it runs on."""
    for option in (
        click.option("--general", is_flag=True, help="tinygrad's own kernels, not hand-written"),
        click.option(
            "--chunk", default=32, type=click.IntRange(1), help="prompt tokens at once [32]"
        ),
        click.option(
            "--context", default=4096, type=click.IntRange(16), help="longest context [4096]"
        ),
        click.option(
            "--device", metavar="DEV", help="tinygrad device [DEV, or the first that opens]"
        ),
        click.option(
            "--quant", default="Q6_K", help="type of the synthetic model's weights [Q6_K]"
        ),
        click.option("--shape", help="a synthetic model of this shape instead of MODEL"),
    ):
        command = option(command)
    return command


def seconds_of(text: str, flag: str) -> float:
    """Return the seconds that 90s, 30m or 1h are; raises BenchError, naming `flag`."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isdecimal() or int(number) == 0:
        raise BenchError(f"{flag} {text}: no time; right are 90s, 30m, 1h")
    return float(int(number) * _UNITS[unit])


@dataclass(frozen=True)
class Workload:
    """A model as the worker runs it; `label` is what an entry says of it."""

    path: Path
    context: int
    chunk: int
    general: bool
    label: str

    def request(self, mode: str, **more: Any) -> dict[str, Any]:
        """Return the worker's request for it."""
        return {
            "mode": mode,
            "model": str(self.path),
            "context": self.context,
            "chunk": self.chunk,
            "general": self.general,
            "skip": [],
            **more,
        }


def workload(model: str | None, options: dict[str, Any]) -> Workload:
    """Return what MODEL or --shape name; raises BenchError for both, neither, or no model."""
    if (model is None) == (options["shape"] is None):
        raise BenchError("tune: want one of MODEL and --shape, as in `orinbench tune model.gguf`")
    if model is None:
        with progress_bar("writing the synthetic model") as progress:
            path = cached_synthetic(options["shape"], options["quant"], 0, progress)
    else:
        path = Path(model)
    info = open_model(path)
    context = min(options["context"], info.context_length)
    general = " general" if options["general"] else ""
    label = f"{info.type_label}, context {context}, chunk {options['chunk']}{general}"
    return Workload(path, context, options["chunk"], options["general"], label)
