"""The command `orinllm`: chat, run, show, compile."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from orinllm.errors import BadInput
from orinllm.sampling import Sampling

#: Exit codes: of bad input, and of Ctrl-C (128 + SIGINT).
EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130

_TALK = Console(stderr=True, highlight=False)
# What `orinllm chat` knows beside questions.
_COMMANDS = "/reset forgets the conversation, /system TEXT sets the instruction, /quit ends"

Command = Callable[..., None]


def _with_sampling(command: Command) -> Command:
    options = (
        click.option("--temperature", default=0.8, show_default=True, help="0: most likely token."),
        click.option("--top-k", default=40, show_default=True, help="Best tokens kept; 0: all."),
        click.option("--top-p", default=0.95, show_default=True, help="Probability mass kept."),
        click.option("--min-p", default=0.05, show_default=True, help="Least share of the best."),
        click.option("--repeat-penalty", default=1.0, show_default=True, help="1: none."),
        click.option("--seed", default=0, show_default=True, help="Same seed, same text."),
        click.option("-n", "--max-tokens", type=click.IntRange(1), help="Tokens of an answer."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _with_model(command: Command) -> Command:
    options = (
        click.argument("model", type=click.Path(path_type=Path)),
        click.option("-c", "--context", type=int, help="Tokens of prompt and answer."),
        click.option("--device", help="tinygrad device: NV, CUDA, CPU. Default: best that opens."),
        click.option(
            "--path",
            "path_",
            type=click.Choice(["auto", "general"]),
            default="auto",
            show_default=True,
            help="general: leave the fused kernels out.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run GGUF language models on tinygrad: an Orin's GPU, any NVIDIA GPU, or the CPU."""


def _load(model: Path, context: int | None, device: str | None, path: str) -> Any:
    from orinllm.model import Model

    started = time.perf_counter()
    with _TALK.status(f"loading {model.name}") as status:
        loaded = Model.load(
            model,
            device=device,
            context=context,
            general=path == "general",
            say=lambda text: status.update(text),
        )
    seconds = time.perf_counter() - started
    _TALK.print(
        f"{model.name}: {loaded.executor.name} path on {loaded.plan.device}, context of "
        f"{loaded.header.context} tokens, loaded in {seconds:.1f} s",
        style="dim",
    )
    return loaded


@contextmanager
def _cancelled_by_interrupt(generation: Any) -> Iterator[None]:
    """Let Ctrl-C end the answer and not the program."""

    def cancel(number: int, frame: FrameType | None) -> None:
        generation.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(generation: Any) -> str:
    """Print an answer while it grows, and its speed; return its text."""
    started, first, text = time.perf_counter(), 0.0, ""
    with _cancelled_by_interrupt(generation):
        for piece in generation:
            first = first or time.perf_counter()
            text += piece.text
            print(piece.text, end="", flush=True)
    print()
    n, cached = len(generation.tokens), generation.n_cached
    seconds = time.perf_counter() - first if first else 0.0
    rate = f"{(n - 1) / seconds:.1f} tok/s" if n > 1 and seconds else "one token"
    _TALK.print(
        f"[{n} tokens, {rate}; prompt of {generation.n_prompt} tokens, {cached} known, first token "
        f"after {(first or started) - started:.2f} s; ended by {generation.finish_reason}]",
        style="dim",
        markup=False,
    )
    return text


@cli.command()
@_with_model
@_with_sampling
@click.option("-p", "--prompt", required=True, help="Text; - reads standard input.")
@click.option("--raw", is_flag=True, help="Continue the text; leave the chat template out.")
def run(
    model: Path,
    context: int | None,
    device: str | None,
    path_: str,
    prompt: str,
    raw: bool,
    max_tokens: int | None,
    **sampling: Any,
) -> None:
    """Answer one prompt: orinllm run model.gguf -p "What is a GPU?"."""
    parameters = Sampling(**sampling)
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = _load(model, context, device, path_)
    asked = text if raw or loaded.template is None else [{"role": "user", "content": text}]
    _answer(loaded.generate(asked, parameters, max_tokens=max_tokens))


@cli.command()
@_with_model
@_with_sampling
@click.option("--system", default="", help="Instruction that begins the conversation.")
def chat(
    model: Path,
    context: int | None,
    device: str | None,
    path_: str,
    system: str,
    max_tokens: int | None,
    **sampling: Any,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends."""
    parameters = Sampling(**sampling)
    loaded = _load(model, context, device, path_)
    if loaded.template is None:
        raise BadInput(f"{model}: has no chat template; try orinllm run --raw")
    _TALK.print(_COMMANDS, style="dim")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    for line in _lines():
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/system"):
            text = line.removeprefix("/system").strip()
            start = [{"role": "system", "content": text}] if text else []
            messages = list(start)
        elif line == "/quit":
            return
        elif line.startswith("/"):
            _TALK.print(f"{line.split()[0]}: no such command; {_COMMANDS}")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                generation = loaded.generate(asked, parameters, max_tokens=max_tokens)
            except BadInput as error:
                _TALK.print(f"{error}; /reset begins anew")
                continue
            messages = [*asked, {"role": "assistant", "content": _answer(generation)}]


def _lines() -> Iterator[str]:
    """Yield the lines that a person types; Ctrl-C forgets a line, Ctrl-D ends."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            print()
        except EOFError:
            return


@cli.command()
@_with_model
def show(model: Path, context: int | None, device: str | None, path_: str) -> None:
    """Say what a model is and which path each tensor takes on a device, and why."""
    from tinygrad import Device

    from orinllm.model import Header
    from orinllm.plan import cache_bytes, make_plan, type_name

    header = Header.read(model, context)
    plan = make_plan(header.gguf, header.config, device or str(Device.DEFAULT))
    for line in _summary(header, plan, cache_bytes(plan, header.context)):
        print(line)
    table = Table("tensor", "type", "shape", "bytes", "path", box=None, pad_edge=False)
    for tensor in header.gguf.tensors.values():
        why = "general path: " if path_ == "general" else None
        reason = "asked for" if why else plan.reason(tensor.name)
        taken = "fused kernels" if reason is None else f"general path: {reason}"
        shape = " x ".join(map(str, tensor.shape))
        table.add_row(tensor.name, type_name(tensor), shape, f"{tensor.n_bytes:,}", taken)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _summary(header: Any, plan: Any, cache: int) -> Iterator[str]:
    config, gguf = header.config, header.gguf
    yield f"file          {gguf.path}, {gguf.size_bytes / 1e6:,.1f} MB of tensors"
    n_layers = len(config.layers) or "unknown"
    yield f"architecture  {config.architecture}, {n_layers} layers, width {config.dim}"
    yield f"vocabulary    {header.tokenizer.vocab_size} tokens, {config.vocab_size} logits"
    yield f"template      {'yes' if header.template else 'no: it continues text'}"
    yield f"context       {header.context} tokens (trained for {config.trained_context})"
    yield f"memory        {plan.weight_bytes / 1e6:,.1f} MB of weights"
    yield f"              {cache / 1e6:,.1f} MB of keys and values"
    yield f"device        {plan.device}: {'fused kernels' if plan.fused else 'general path'}"
    for what, why in plan.obstacles.items():
        yield f"              {what}: {why}"
    if plan.prompt_obstacle:
        yield f"prompts       token by token: {plan.prompt_obstacle}"


@cli.command(name="compile")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--arch", required=True, help="Architecture of the GPU: sm_87 is an Orin's.")
@click.option("--sms", type=click.IntRange(1), help="Its multiprocessors; known for sm_87, sm_90.")
@click.option("-c", "--context", type=int, help="Tokens of prompt and answer, as when it runs.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder.")
def compile_(model: Path, arch: str, sms: int | None, context: int | None, out: Path) -> None:
    """Compile a model's kernels ahead; ORINLLM_CUBINS=FOLDER then finds them."""
    from orinllm.ahead import compile_ahead, target
    from orinllm.model import Header

    header = Header.read(model, context)
    with _TALK.status("compiling") as status:
        n = compile_ahead(header, target(arch, sms), out, lambda text: status.update(text))
    _TALK.print(f"{n} kernels in {out}; start with ORINLLM_CUBINS={out}")


def main() -> None:
    """Run the command; bad input is one line and exit code 2."""
    try:
        cli(standalone_mode=False)
    except BadInput as error:
        sys.exit(_fail(f"orinllm: {error}", EXIT_BAD_INPUT))
    except click.ClickException as error:
        sys.exit(_fail(f"orinllm: {error.format_message()}", EXIT_BAD_INPUT))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)


def _fail(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
