"""`orinbench profile`: where the time of a token and of a prompt goes, kernel class by class."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from orinbench.benchmark.backend import BackendDiedError
from orinbench.benchmark.tinygrad_backend import chosen_device, copy_bandwidth
from orinbench.child import run
from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.profiling import context_of
from orinbench.profiling.log import KernelTime, read_log

# Time limit of the copies.
_COPY_SECONDS = 600.0
_DEVICES = ("NV", "CUDA", "CPU")


@dataclass(frozen=True)
class ClassTime:
    """The kernels of one class: launches, seconds in all, bytes in all (0: not known)."""

    kind: str
    count: int
    seconds: float
    n_bytes: float


@dataclass(frozen=True)
class Profile:
    """Classes of each section (token, prompt), and what a run without instruments took.

    `wall` is seconds by section with graphs and all; `bandwidth` is bytes per second of a copy.
    """

    source: str
    device: str
    sections: dict[str, list[ClassTime]]
    wall: dict[str, float] = field(default_factory=dict)
    bandwidth: float | None = None


def grouped(kernels: Iterable[KernelTime]) -> dict[str, list[ClassTime]]:
    """Sum kernels by section and class, the longest first; warm-up is left out."""
    sums: dict[str, dict[str, list[float]]] = {}
    for kernel in kernels:
        if kernel.section == "warm-up":
            continue
        entry = sums.setdefault(kernel.section, {}).setdefault(kernel.kind, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += kernel.seconds
        entry[2] += kernel.n_bytes
    return {
        section: sorted(
            (ClassTime(kind, int(n), s, b) for kind, (n, s, b) in kinds.items()),
            key=lambda c: -c.seconds,
        )
        for section, kinds in sums.items()
    }


def _worker(mode: str, model: Path, n_prompt: int, depth: int, env: Mapping[str, str]) -> str:
    """Run the worker in a mode and return what it printed; raises BenchError if it fails."""
    command = [sys.executable, "-m", "orinbench.profiling.worker", mode, str(model)]
    done = run([*command, n_prompt, depth], environment=env)
    if done.status:
        raise BenchError(f"{model}: profiling on {env['DEV']} failed: {done.reason}")
    return done.out


def measure(model: Path, device: str, n_prompt: int, depth: int) -> Profile:
    """Profile a GGUF file on a device of tinygrad, in two processes of its own.

    Raises BenchError for what cannot be, and when a process fails, with its last line.
    """
    has, need = open_model(model).context_length, context_of(n_prompt, depth)
    if need > has:
        raise BenchError(
            f"-p {n_prompt}, -d {depth}: need a context of {need} tokens; {model} has {has}"
        )
    environment = {"DEV": device, "JIT": "2", "DEBUG": "2"}
    kernels = read_log(_worker("kernels", model, n_prompt, depth, environment).splitlines(), "load")
    kept = [k for k in kernels if k.section != "load"]
    if not kept:
        raise BenchError(f"{model}: {device} printed no kernel times with DEBUG=2")
    said = _worker("wall", model, n_prompt, depth, {"DEV": device, "JIT": "1", "DEBUG": "0"})
    wall = json.loads(said.strip().splitlines()[-1])
    try:
        bandwidth = 1e9 * max(copy_bandwidth(device, _COPY_SECONDS).samples_gb_s)
    except BackendDiedError as error:
        raise BenchError(f"{model}: profiling on {device} failed: {error}") from error
    return Profile(str(model), device, grouped(kept), wall, bandwidth)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def markdown(profile: Profile) -> str:
    """Return the tables: one a section, with the sum, and the time without instruments."""
    lines = []
    for section, classes in profile.sections.items():
        total = sum(c.seconds for c in classes)
        lines += [f"### {section}: {profile.source} on {profile.device}", ""]
        lines += ["| kernels of | n | us | us each | MB | GB/s | of copy bandwidth | share |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for c in classes:
            rate = c.n_bytes / c.seconds if c.seconds else 0.0
            roof = _share(rate, profile.bandwidth) if profile.bandwidth and rate else ""
            lines.append(
                f"| {c.kind} | {c.count} | {c.seconds * 1e6:.1f} |"
                f" {c.seconds / c.count * 1e6:.2f} | {c.n_bytes / 1e6:.1f} |"
                f" {rate / 1e9:.0f} | {roof} | {_share(c.seconds, total)} |"
            )
        count = sum(c.count for c in classes)
        lines.append(f"| sum, one by one | {count} | {total * 1e6:.1f} | | | | | |")
        if section in profile.wall:
            wall = profile.wall[section]
            lines += [f"| wall clock, as a graph | | {wall * 1e6:.1f} | | | | | |"]
        lines.append("")
    lines.append(
        "One by one, each kernel's time holds its start; on CUDA also two events, some us each."
        " Without fused kernels (as on a CPU) these are of tinygrad.llm's own network."
    )
    return "\n".join(lines)


@click.command("profile", context_settings={"max_content_width": 100})
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--device",
    type=click.Choice(_DEVICES),
    help="tinygrad's device. [default: DEV, else the first that opens]",
)
@click.option(
    "-p",
    "--n-prompt",
    default=512,
    type=click.IntRange(1),
    help="Tokens of the prompt. [default: 512]",
)
@click.option(
    "-d",
    "--n-depth",
    default=0,
    type=click.IntRange(0),
    help="Tokens in the cache before the prompt. [default: 0]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["md", "json"]),
    default="md",
    help="Form of the output. [default: md]",
)
def profile_command(
    model: Path, device: str | None, n_prompt: int, n_depth: int, output: str
) -> None:
    """Show which kernels take the time.

    Kernels are those of a token and of a prompt of MODEL, on the fused path. Where there is none,
    as on a CPU, they are of tinygrad.llm's own network, not of the engine's general path.
    """
    result = measure(model, chosen_device(device), n_prompt, n_depth)
    click.echo(json.dumps(asdict(result)) if output == "json" else markdown(result))
