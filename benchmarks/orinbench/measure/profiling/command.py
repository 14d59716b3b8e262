"""`orinbench profile`: where the time of a token and of a prompt goes, kernel class by class.

With `--arch` nothing is measured: the kernels are compiled for that GPU, and read (`sass`).
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from orinbench.child import run_command
from orinbench.errors import BenchError
from orinbench.measure.backends.backend import BackendError
from orinbench.measure.backends.tinygrad_backend import measure_copy_bandwidth, open_failure_reason
from orinbench.measure.models_and_backends import choose_backends, find_or_make_models
from orinbench.measure.plan import BACKEND_NAMES
from orinbench.measure.profiling import sass
from orinbench.measure.profiling.debug_log import KernelTime, parse_log
from orinbench.model import open_model
from orinbench.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    ModelOptions,
    option_field,
    output_option,
    with_options,
)
from orinbench.progress import Progress
from orinbench.show.markdown import markdown_table

# Time limit of the copies.
_COPY_SECONDS = 600.0
# Tokens behind the prompt, and room to spare (worker.py).
_MORE_TOKENS = 34
_WORKER = (sys.executable, "-m", "orinbench.measure.profiling.worker")


@dataclass(frozen=True)
class KernelClassTime:
    """The kernels of one class: launches, seconds in all, bytes in all (0: not known)."""

    kind: str
    count: int
    seconds: float
    n_bytes: float


@dataclass(frozen=True)
class Profile:
    """Times of a run without instruments, and the classes of kernels of each part of it.

    `wall` is seconds by section (prompt, token) with graphs and all; `sections` has those whose
    kernels tinygrad times; `bandwidth` is bytes per second of a copy.
    """

    source: str
    device: str
    path: str  # the executor's: fused or general
    wall: dict[str, float]
    sections: dict[str, list[KernelClassTime]]
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """Options of the command."""

    backend: str | None = option_field(
        "--backend",
        f"One of tinygrad's: {', '.join(BACKEND_NAMES[:-1])}. [default: the first that opens]",
        metavar="NAME",
    )
    n_prompt: int = option_field(
        "-p --n-prompt", "Tokens of the prompt.", default=512, type=AT_LEAST_1
    )
    n_depth: int = option_field(
        "-d --n-depth", "Tokens in the cache before the prompt.", default=0, type=AT_LEAST_0
    )
    arch: str | None = option_field(
        "--arch",
        "Measure nothing: compile the fused kernels for this GPU, which need not be here (sm_87: "
        "every Orin), and show registers, main loops and what limits each.",
        metavar="NAME",
    )
    output: str = output_option(["md", "json"]).as_field


def sum_by_class(kernels: Iterable[KernelTime]) -> list[KernelClassTime]:
    """Sum kernels by class, the longest first."""
    kinds: dict[str, list[KernelTime]] = {}
    for kernel in kernels:
        kinds.setdefault(kernel.kind, []).append(kernel)
    classes = [
        KernelClassTime(kind, len(of), sum(k.seconds for k in of), sum(k.n_bytes for k in of))
        for kind, of in kinds.items()
    ]
    return sorted(classes, key=lambda c: -c.seconds)


def require_context(model: Path, n_prompt: int, depth: int) -> None:
    """Raise BenchError for a prompt that a GGUF file has no context for."""
    has, need = open_model(model).context_length, depth + n_prompt + _MORE_TOKENS
    if need > has:
        raise BenchError(
            f"-p {n_prompt}, -d {depth}: need a context of {need} tokens; {model} has {has}"
        )


def measure_profile(model: Path, device: str, n_prompt: int, depth: int) -> Profile:
    """Profile a GGUF file on a device of tinygrad, in two processes of its own.

    Raises BenchError when a process fails, with its last line.
    """
    said = []
    for jit, debug in (("1", "0"), ("2", "2")):
        environment = {"DEV": device, "JIT": jit, "DEBUG": debug}
        done = run_command([*_WORKER, model, n_prompt, depth], environment=environment)
        if done.status:
            raise BenchError(f"{model}: profiling on {device} failed: {done.last_error_line}")
        said.append(done.out.splitlines())
    try:
        bandwidth = 1e9 * max(measure_copy_bandwidth(device, _COPY_SECONDS).samples_gb_s)
    except BackendError as error:
        raise BenchError(f"{model}: profiling on {device} failed: {error}") from error
    result, kernels = json.loads(said[0][-1]), parse_log(said[1])
    sections = {
        name: sum_by_class(found)
        for name in result["wall"]
        if (found := [kernel for kernel in kernels if kernel.section == name])
    }
    path, wall = result["path"], result["wall"]
    return Profile(str(model), device, path, wall, sections, bandwidth)


def _percent_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def profile_markdown(profile: Profile) -> str:
    """Return a table for each section, with the sum, and the time without instruments."""
    lines = []
    titles = ["kernels of", "n", "us", "us each", "MB", "GB/s", "of copy bandwidth", "share"]
    for section, wall in profile.wall.items():
        classes = profile.sections.get(section, [])
        total = sum(c.seconds for c in classes)
        count = sum(c.count for c in classes)
        rows = [_class_row(c, total, profile.bandwidth) for c in classes]
        rows.append(["sum, one by one", str(count), f"{total * 1e6:.1f}", *[""] * 5])
        lines += [f"### {section}: {profile.source} on {profile.device}, {profile.path} path", ""]
        lines += [markdown_table(titles, rows, titles[1:]), ""] if classes else []
        lines += [f"Wall clock{', as a graph' * bool(classes)}: {wall * 1e6:.1f} us.", ""]
    lines.append(
        "One by one, each kernel's time holds its start; on CUDA also two events, some us each."
        if profile.sections
        else "A token is one program here, of whose parts tinygrad times none."
    )
    return "\n".join(lines)


def _class_row(found: KernelClassTime, total: float, bandwidth: float) -> list[str]:
    rate = found.n_bytes / found.seconds if found.seconds else 0.0
    return [
        found.kind,
        str(found.count),
        f"{found.seconds * 1e6:.1f}",
        f"{found.seconds / found.count * 1e6:.2f}",
        f"{found.n_bytes / 1e6:.1f}",
        f"{rate / 1e9:.0f}",
        _percent_text(rate, bandwidth) if rate else "",
        _percent_text(found.seconds, total),
    ]


@click.command("profile", context_settings={"max_content_width": 100})
@with_options(ProfileOptions)
def profile_command(options: ProfileOptions) -> None:
    """Show which kernels take the time.

    Kernels are those of a token and of a prompt of the model, on the path that a run takes. On a
    CPU that is one program a token, and there is the wall clock alone.
    """
    talk, given = Progress(), options.backend
    if options.arch:
        if given:
            raise BenchError(f"--backend {given} with --arch: nothing is measured; leave one out")
        click.echo(_compiled_kernels_text(options, options.arch))
        return
    if given and ("," in given or not given.startswith("tinygrad:")):
        raise BenchError(f"--backend {given}: one of tinygrad's is profiled, as tinygrad:CUDA")
    paths, _ = find_or_make_models(options, talk)
    if len(paths) > 1:
        raise BenchError(f"-m {paths[1]}: one model is profiled at a time")
    require_context(paths[0], options.n_prompt, options.n_depth)
    (backend, *_), _ = choose_backends([given] if given else [], None, talk)
    device = backend.removeprefix("tinygrad:")
    if given and (reason := open_failure_reason(device)):
        raise BenchError(f"--backend {given}: does not open: {reason}")
    talk.close()
    result = measure_profile(paths[0], device, options.n_prompt, options.n_depth)
    click.echo(json.dumps(asdict(result)) if options.output == "json" else profile_markdown(result))


def _compiled_kernels_text(options: ProfileOptions, arch: str) -> str:
    files = options.find_or_fetch_files()
    if len(files) > 1:
        raise BenchError(f"-m {files[1]}: one model is profiled at a time")
    if files:
        name, found = str(files[0]), sass.model_launches(open_model(files[0]).path, arch)
    else:
        name = f"{options.shape} {options.quant}"
        found = sass.synthetic_model_launches(options.shape, options.quant, arch)
    rows = [sass.compile_launch(launch, arch) for launch in found]
    if options.output == "json":
        return json.dumps([asdict(row) for row in rows])
    return sass.kernel_markdown(rows, f"{name} for {arch}")
