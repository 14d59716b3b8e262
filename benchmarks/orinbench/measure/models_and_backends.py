"""The choices of a command: the models' files, and the backends that open."""

from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from orinbench.errors import BenchError
from orinbench.measure.backends.llama_cpp import find_llama_bench
from orinbench.measure.backends.tinygrad_backend import open_failure_reason
from orinbench.measure.plan import TINYGRAD_DEVICES, is_backend_name
from orinbench.options import ModelOptions
from orinbench.progress import Progress
from orinbench.synth import find_or_write_synthetic, make_progress_callback


def find_or_make_models(options: ModelOptions, talk: Progress) -> tuple[list[Path], bool]:
    """Return the models' paths, and whether it is the synthetic one, made now if need be."""
    if given := options.find_or_fetch_files():
        for name in ("shape", "quant"):
            if (
                click.get_current_context().get_parameter_source(name)
                is ParameterSource.COMMANDLINE
            ):
                raise BenchError(
                    f"--{name} {getattr(options, name)}: is of the synthetic model that is made "
                    "without -m; leave one of the two out"
                )
        return list(dict.fromkeys(given)), False
    path = find_or_write_synthetic(
        options.shape, options.quant, 0, make_progress_callback("writing the synthetic model")
    )
    talk.print_line(
        f"no -m: synthetic model {options.shape} {options.quant} (random weights), {path}"
    )
    return [path], True


def choose_backends(
    given: Sequence[str], llama_bench: str | None, talk: Progress, sms: int | None = None
) -> tuple[list[str], Path | None]:
    """Return the backends to run and llama.cpp's binary.

    Raises BenchError, which lists every backend and why it does not open, for an unknown one, and
    if nothing opens.
    """
    names = [name for text in given for name in text.split(",") if name]
    binary = find_llama_bench(llama_bench)
    for name in names:
        if not is_backend_name(name):
            raise BenchError(f"--backend {name}: unknown; there are {backends_text(binary)}")
    if "llama.cpp" in names and binary is None:
        raise BenchError(
            "--backend llama.cpp: no llama-bench on PATH; name it with --llama-bench PATH"
        )
    for name in names if sms else ():
        if name != "llama.cpp" and not name.startswith("tinygrad:CUDA"):
            raise BenchError(
                f"--sms {sms}: {name} uses all of its device; tinygrad:CUDA and llama.cpp can take "
                "a part"
            )
    if names:
        return list(dict.fromkeys(names)), binary
    chosen = (["tinygrad:CUDA"] if sms else list_first_open_backend(talk)) + (
        ["llama.cpp"] if binary else []
    )
    if not chosen:
        raise BenchError(f"--backend: nothing opens: {backends_text(binary)}")
    return chosen, binary


def list_first_open_backend(talk: Progress) -> list[str]:
    """Return the first of tinygrad's devices that opens, as a list of at most one."""
    for device in TINYGRAD_DEVICES:
        talk.show_phase(f"trying tinygrad:{device}")
        if open_failure_reason(device) is None:
            return [f"tinygrad:{device}"]
    return []


def backends_text(binary: Path | None) -> str:
    """Return every backend, with the reason in brackets where it does not open."""
    parts = []
    for device in TINYGRAD_DEVICES:
        reason = open_failure_reason(device)
        parts.append(f"tinygrad:{device}" + (f" (does not open: {reason})" if reason else ""))
    parts.append("llama.cpp" + ("" if binary else " (no llama-bench on PATH; see --llama-bench)"))
    return ", ".join(parts)
