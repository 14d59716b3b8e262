"""Compatibility of `orinbench llama-bench` with llama-bench's own command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orinbench.child import run
from orinbench.errors import BenchError
from orinbench.measure.backends.tinygrad_backend import probe_device
from orinbench.measure.environment import package_version
from orinbench.measure.plan import KNOBS, TINYGRAD_DEVICES
from orinbench.options import (
    OFFLINE,
    CaseOptions,
    Command,
    ModelOptions,
    RunOptions,
    option,
    with_options,
)

# `--numa` and `--prio` of llama-bench 0.5.0 (tools/llama-bench).
NUMA = ("distribute", "isolate", "numactl")
LIST_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class LlamaBenchOptions(RunOptions, ModelOptions, CaseOptions):
    """Options of llama-bench; `knobs` are the LISTs of each setting of KNOBS, by field."""

    backends: tuple[str, ...]
    llama_bench: str | None
    n_parallel: tuple[str, ...]
    texts: tuple[str, ...]
    sampling: tuple[str, ...]
    mmproj: Path | None
    pictures: tuple[str, ...]
    path_: str
    sms: int | None
    check: bool | None
    cold_start: bool | None
    no_warmup: bool
    textfile: Path | None
    list_devices: bool
    numa: str | None
    prio: int | None
    rpc: str | None
    knobs: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, given: dict[str, Any]) -> "LlamaBenchOptions":
        """Return them by the names that click gives."""
        knobs = {knob.field: given.pop(knob.field) for knob in KNOBS}
        return cls(knobs=knobs, **given)


class WholeFlags(click.Command):
    """A command whose flags are whole words, as llama-bench's: `-rpcx` is no `-r` with a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raise NoSuchOption, with all of what was typed, for a flag that there is not."""
        known = {
            name: parameter
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if isinstance(parameter, click.Option)
        }
        rest = iter(args)
        for word in rest:
            if word == "--":
                break
            if not word.startswith("-") or word == "-":
                continue
            flag, equals, _ = word.partition("=") if word.startswith("--") else (word, "", "")
            if flag not in known:
                raise click.NoSuchOption(flag, ctx=ctx)
            option = known[flag]
            assert isinstance(option, click.Option)
            if not equals and not option.is_flag and not option.count:
                next(rest, None)
        return super().parse_args(ctx, args)


def _version(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(f"orinbench {package_version('tinygrad-orin') or 'unknown'}")
        click.echo(f"tinygrad {package_version('tinygrad') or 'unknown'}")
        ctx.exit()


def _offline(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    ctx.meta[OFFLINE] = given


def _of_hub(ctx: click.Context, parameter: click.Parameter, given: str | None) -> None:
    if given is not None:
        raise BenchError(f"{parameter.opts[0]}: not read here; {_INSTEAD[str(parameter.name)]}")


_INSTEAD = {
    "hf_file": "name the file's type, as in -hf OWNER/REPO:Q4_K_M",
    "hf_token": "set HF_TOKEN, which other users of the machine cannot see",
}


def parity_options(command: Command) -> Command:
    """Add the flags of llama-bench that are not settings of a test."""
    eager: dict[str, Any] = {"expose_value": False, "is_eager": True}
    refused: dict[str, Any] = {"metavar": "X", "callback": _of_hub, **eager}
    instead = "Refused, with what does the same."
    no_hub, versions = "Ask no hub: -hf takes what is here.", "Print the versions and exit."
    return with_options(
        command,
        option("--list-devices", "List the devices and exit.", is_flag=True),
        option("--offline", no_hub, is_flag=True, callback=_offline, **eager),
        option("--version", versions, is_flag=True, callback=_version, **eager),
        option("hf_file -hff --hf-file", instead, **refused),
        option("hf_token -hft --hf-token", instead, **refused),
        option("--numa", "Passed to llama.cpp.", type=click.Choice(NUMA)),
        option("--prio", "Passed to llama.cpp.", type=click.IntRange(-1, 3)),
        option("rpc -rpc --rpc", "Passed to llama.cpp.", metavar="LIST"),
    )


def check_passed_on(options: LlamaBenchOptions) -> None:
    """Raise BenchError for a value that llama-bench would not take."""
    rpc = options.rpc
    for server in rpc.split(",") if rpc is not None else ():
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise BenchError(f"-rpc {rpc}: '{server}' is no HOST:PORT")


def passed_on(options: LlamaBenchOptions) -> list[str]:
    """Return the arguments for llama.cpp's binary."""
    given = [(f"--{name}", getattr(options, name)) for name in ("numa", "prio", "rpc")]
    return [word for flag, value in given if value is not None for word in (flag, str(value))]


def list_all_devices(binary: Path | None) -> str:
    """Return tinygrad's devices, each with why it does not open, and what llama-bench lists."""
    lines = []
    for device in TINYGRAD_DEVICES:
        reason = probe_device(device)
        lines.append(f"tinygrad:{device}: " + (f"does not open: {reason}" if reason else "opens"))
    lines += _llama_cpp_devices(binary) if binary else ["llama.cpp: no llama-bench on PATH"]
    return "\n".join(lines)


def _llama_cpp_devices(binary: Path) -> Sequence[str]:
    try:
        done = run([binary, "--list-devices"], LIST_SECONDS)
    except OSError as error:
        return [f"llama.cpp: {binary} --list-devices: {error}"]
    if done.status is None:
        return [f"llama.cpp: {binary} --list-devices did not end in {LIST_SECONDS} s"]
    if done.status:
        return [f"llama.cpp: {binary} --list-devices ended with status {done.status}"]
    return ["llama.cpp:", *(f"  {line.strip()}" for line in done.out.splitlines() if line)]
