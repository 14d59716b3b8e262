"""Compatibility of `orinbench llama-bench` with llama-bench's own command lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from orinbench.child import run_command
from orinbench.errors import BenchError
from orinbench.measure.backends.tinygrad_backend import open_failure_reason
from orinbench.measure.environment import package_version
from orinbench.measure.plan import KNOBS, TINYGRAD_DEVICES, ListSetting
from orinbench.options import (
    ANY_PATH,
    AT_LEAST_1,
    LISTS,
    OFFLINE,
    BackendOptions,
    CaseOptions,
    Command,
    ModelOptions,
    Option,
    RunOptions,
    combined_field,
    option,
    option_field,
)

# `--numa` and `--prio` of llama-bench 0.5.0 (tools/llama-bench).
NUMA = ("distribute", "isolate", "numactl")
LIST_SECONDS = 60


# Settings of llama-bench that mean something to tinygrad, too.
_OF_BOTH = ("n_threads", "type_k", "type_v")


def _setting_option(knob: ListSetting) -> Option:
    where = "" if knob.field in _OF_BOTH else " (llama.cpp)"
    return option(" ".join(knob.flags), f"{knob.help}{where}.", **LISTS)


@dataclass(frozen=True, kw_only=True)
class LlamaBenchOptions(RunOptions, BackendOptions, CaseOptions, ModelOptions):
    """Options of llama-bench; `knobs` are the LISTs of each setting of KNOBS, by field."""

    n_parallel: tuple[str, ...] = option_field(
        "-npl", "Sequences that -n decodes at once. [default: 1]", **LISTS
    )
    texts: tuple[str, ...] = option_field(
        "--ttft",
        "Measure the time to the first text, of prompts of so many tokens; 0: do not. [default: "
        "the largest -p]",
        **LISTS,
    )
    sampling: tuple[str, ...] = option_field(
        "--sampling",
        "Repeat generation tests with tokens drawn by temperature, top_p, top_k, min_p; "
        "temperature=0: the most likely ones.",
        multiple=True,
        metavar="FIELD=NUMBER,...",
    )
    mmproj: Path | None = option(
        "--mmproj",
        "Also measure the encoder of this file, and the time from a picture to the first text.",
        type=ANY_PATH,
        metavar="FILE",
    ).as_field
    pictures: tuple[str, ...] = option_field(
        "--picture", "Sizes of its pictures. [default: 640x480]", multiple=True, metavar="WxH,..."
    )
    path_: str = option_field(
        "--path",
        "general: measure tinygrad.llm's own network, not the engine.",
        type=click.Choice(["auto", "general"]),
        default="auto",
    )
    sms: int | None = option_field(
        "--sms",
        "Use only N multiprocessors of the GPU (CUDA); an AGX Orin has 16.",
        type=AT_LEAST_1,
        metavar="N",
    )
    check: bool | None = option_field(
        "--check/--no-check", "Check the numbers first. [default: of small models]", default=None
    )
    cold_start: bool | None = option_field(
        "--cold-start/--no-cold-start",
        "Time a first start, with an empty kernel cache. [default: yes, unless BEAM or JITBEAM is "
        "set]",
        default=None,
    )
    no_warmup: bool = option_field("--no-warmup", "Skip the warm-up.", is_flag=True)
    textfile: Path | None = option(
        "--textfile",
        "Write the figures for node_exporter's textfile collector into DIR.",
        type=click.Path(path_type=Path, readable=False),
        metavar="DIR",
    ).as_field
    list_devices: bool = option_field("--list-devices", "List the devices and exit.", is_flag=True)
    numa: str | None = option_field("--numa", "Passed to llama.cpp.", type=click.Choice(NUMA))
    prio: int | None = option_field("--prio", "Passed to llama.cpp.", type=click.IntRange(-1, 3))
    rpc: str | None = option_field("-rpc --rpc", "Passed to llama.cpp.", metavar="LIST")
    knobs: Mapping[str, tuple[str, ...]] = combined_field(
        {k.field: _setting_option(k) for k in KNOBS}
    )


class WholeWordFlagsCommand(click.Command):
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


def _print_version(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        click.echo(f"orinbench {package_version('tinygrad-orin') or 'unknown'}")
        click.echo(f"tinygrad {package_version('tinygrad') or 'unknown'}")
        ctx.exit()


def _store_offline(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    ctx.meta[OFFLINE] = given


def _refuse_hub_flag(ctx: click.Context, parameter: click.Parameter, given: str | None) -> None:
    if given is not None:
        raise BenchError(f"{parameter.opts[0]}: not read here; {_INSTEAD[str(parameter.name)]}")


_INSTEAD = {
    "hf_file": "name the file's type, as in -hf OWNER/REPO:Q4_K_M",
    "hf_token": "set HF_TOKEN, which other users of the machine cannot see",
}


def with_version_and_hub_flags(command: Command) -> Command:
    """Add the flags of llama-bench that end the command, or say how another is read."""
    instead = "Refused, with what does the same."
    for names, what, callback, is_flag in (
        ("hf_token -hft --hf-token", instead, _refuse_hub_flag, False),
        ("hf_file -hff --hf-file", instead, _refuse_hub_flag, False),
        ("--version", "Print the versions and exit.", _print_version, True),
        ("--offline", "Ask no hub: -hf takes what is here.", _store_offline, True),
    ):
        kind: dict[str, Any] = {"is_flag": True} if is_flag else {"metavar": "X"}
        eager = option(names, what, callback=callback, expose_value=False, is_eager=True, **kind)
        command = eager(command)
    return command


def require_rpc_addresses(options: LlamaBenchOptions) -> None:
    """Raise BenchError for a value that llama-bench would not take."""
    rpc = options.rpc
    for server in rpc.split(",") if rpc is not None else ():
        host, _, port = server.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise BenchError(f"-rpc {rpc}: '{server}' is no HOST:PORT")


def passed_on_arguments(options: LlamaBenchOptions) -> list[str]:
    """Return the arguments for llama.cpp's binary."""
    given = [(f"--{name}", getattr(options, name)) for name in ("numa", "prio", "rpc")]
    return [word for flag, value in given if value is not None for word in (flag, str(value))]


def all_devices_text(binary: Path | None) -> str:
    """Return tinygrad's devices, each with why it does not open, and what llama-bench lists."""
    lines = []
    for device in TINYGRAD_DEVICES:
        reason = open_failure_reason(device)
        lines.append(f"tinygrad:{device}: " + (f"does not open: {reason}" if reason else "opens"))
    lines += _llama_cpp_device_lines(binary) if binary else ["llama.cpp: no llama-bench on PATH"]
    return "\n".join(lines)


def _llama_cpp_device_lines(binary: Path) -> Sequence[str]:
    try:
        done = run_command([binary, "--list-devices"], LIST_SECONDS)
    except OSError as error:
        return [f"llama.cpp: {binary} --list-devices: {error}"]
    if done.status is None:
        return [f"llama.cpp: {binary} --list-devices did not end in {LIST_SECONDS} s"]
    if done.status:
        return [f"llama.cpp: {binary} --list-devices ended with status {done.status}"]
    return ["llama.cpp:", *(f"  {line.strip()}" for line in done.out.splitlines() if line)]
