"""The command `orinllm`: chat, run, serve, show, compile, list, rm.

What takes time to import is imported where it is used: the first answer waits for the device, which
opens beside those imports.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from orinllm.command.device_opening import is_device_opening, open_device_in_background
from orinllm.command.options import (
    MmprojPathParam,
    ModelLoadOptions,
    ModelPathParam,
    read_sampling,
    with_answer_form,
    with_cache_type,
    with_conversation,
    with_model,
    with_sampling,
    with_server,
    with_speculation,
)
from orinllm.command.show import show
from orinllm.command.terminal import (
    answer_tokens,
    print_answer,
    print_line,
    print_message,
    read_standard_input,
    showing_progress,
    typed_lines,
)
from orinllm.command.utf8_streams import make_streams_utf8, utf8_argument
from orinllm.errors import BadInput, DeviceFault, escape_unprintable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from orinllm.choose.sampling import Sampling
    from orinllm.network.vision.pictures import Picture
    from orinllm.text.conversation import Conversation

#: Exit codes: of a system's fault, of bad input, and of Ctrl-C (128 + SIGINT).
EXIT_OTHER, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130

# What `orinllm chat` knows beside questions.
_COMMANDS = (
    "/reset forgets the conversation, /system TEXT also sets the instruction, /image FILE shows a "
    "picture, /quit or Ctrl-D ends"
)


def _set_up_speculation(model: Any, lookup: bool, draft: Path | str | None) -> None:
    """Let a loaded model have its tokens guessed, if that is asked for."""
    from orinllm.batching.proposers import LookupProposer

    if draft is not None:
        with showing_progress(f"loading {Path(draft).name}") as show_progress:
            model.speculate(model.load_proposer(draft, show_progress))
    elif lookup:
        model.speculate(LookupProposer())


def _check_speculation(
    model: Path, lookup: bool, draft: Path | str | None, sampling: Sampling
) -> None:
    """Refuse what cannot guess tokens before the model takes its time."""
    if lookup and draft is not None:
        raise BadInput("--lookup, --draft: two ways to guess tokens; leave one out")
    if (lookup or draft is not None) and sampling.has_penalties:
        flag = "--lookup" if lookup else "--draft"
        raise BadInput(f"{flag}: guesses no tokens under penalties; leave --*-penalty out")
    if draft is not None:
        from orinllm.loader import Network

        network = Network.read(model)
        if (block := network.mtp_block_file(draft)) is not None:
            network.require_mtp_block_config(block)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run GGUF language models on tinygrad: an Orin's GPU, any NVIDIA GPU, or the CPU."""


cli.add_command(show)


def _load_model(source: ModelLoadOptions, opened: Future[str]) -> Any:
    from orinllm.gpu.kernels.buffers import KEY_TYPES
    from orinllm.model import Model

    started = time.perf_counter()
    with showing_progress(f"loading {source.model.name}") as show_progress:
        loaded = Model.load(
            source.model,
            device=opened.result,
            context=source.context,
            general=source.general,
            kv=KEY_TYPES[source.kv],
            mmproj=source.mmproj,
            say=show_progress,
        )
    seconds = time.perf_counter() - started
    print_message(
        f"{source.model.name}: {loaded.runner.name} path on {loaded.plan.device}, context of "
        f"{loaded.description.network.context} tokens, loaded in {seconds:.1f} s",
        dim=True,
    )
    return loaded


@cli.command()
@with_model
@with_sampling
@with_speculation
@with_conversation
@with_answer_form
@click.option("-p", "--prompt", required=True, help="The prompt; - reads standard input.")
@click.option(
    "--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template."
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A picture before the prompt; may be repeated. The model sees with --mmproj.",
)
def run(
    source: ModelLoadOptions,
    prompt: str,
    raw: bool,
    images: tuple[Path, ...],
    max_tokens: int | None,
    lookup: bool,
    draft: Path | str | None,
    **given: Any,
) -> None:
    """Answer one prompt: orinllm run model.gguf -p "What is a GPU?"."""
    opened = open_device_in_background(source.device)
    from orinllm.command.answer_form import read_grammar_option, thinking_variables
    from orinllm.text.answer import Delta
    from orinllm.text.conversation import Conversation

    system, thinking = given.pop("system"), given.pop("thinking")
    form = read_grammar_option(given.pop("json_schema"), given.pop("grammar"))
    if raw and (system is not None or thinking is not None):
        raise BadInput("--raw: continues text, without --system and --think; leave one out")
    parameters = read_sampling(given)
    _check_speculation(source.model, lookup, draft, parameters)
    text = read_standard_input() if prompt == "-" else utf8_argument("-p", prompt)
    if not text.strip():
        raise BadInput("-p: the prompt is empty; a question was expected, or - for standard input")
    _check_images(source, images, raw)
    loaded = _load_model(source, opened)
    if loaded.template is None and (system is not None or thinking is not None):
        raise BadInput(
            f"--system, --think: {source.model} has no chat template, it continues text; leave "
            "them out"
        )
    _set_up_speculation(loaded, lookup, draft)
    if raw or loaded.template is None:
        limit = form.make_constraint(loaded) if form else None
        generation = loaded.generate(text, parameters, max_tokens=max_tokens, constraint=limit)
        print_answer(generation, (Delta(piece.text) for piece in generation))
    else:
        told = thinking_variables(loaded.template, thinking)
        conversation = Conversation(loaded.template, loaded.tokenizer, system, **told)
        ids = conversation.add_question(text, _read_pictures(conversation, images))
        limit = form.make_constraint(loaded, told) if form else None
        generation = loaded.generate(ids, parameters, max_tokens=max_tokens, constraint=limit)
        print_answer(generation, conversation.read_answer(answer_tokens(generation)))
    if generation.finish_reason == "cancelled":
        raise KeyboardInterrupt


def _check_images(source: ModelLoadOptions, images: tuple[Path, ...], raw: bool) -> None:
    """Raise BadInput for pictures that cannot be read, before the model takes its time."""
    if not images:
        return
    if source.mmproj is None:
        raise BadInput(f"--image {images[0]}: the model sees with --mmproj FILE, which is missing")
    if raw:
        raise BadInput("--image: --raw continues plain text; a picture needs the chat template")
    from orinllm.mmproj import read_picture_bytes

    for image in images:
        try:
            read_picture_bytes(image)
        except BadInput as error:
            raise BadInput(f"--image {error}") from None


def _read_pictures(conversation: Conversation, images: tuple[Path, ...]) -> list[Picture]:
    try:
        return [conversation.prepare_picture(image) for image in images]
    except BadInput as error:
        raise BadInput(f"--image {error}") from None


@cli.command()
@with_model
@with_sampling
@with_speculation
@with_conversation
def chat(
    source: ModelLoadOptions,
    system: str | None,
    thinking: bool | None,
    max_tokens: int | None,
    lookup: bool,
    draft: Path | str | None,
    **sampling: Any,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends.

    Reads questions from standard input, one a line; piped ones work as typed ones do.
    """
    opened = open_device_in_background(source.device)
    from orinllm.text.conversation import Conversation

    parameters = read_sampling(sampling)
    _check_speculation(source.model, lookup, draft, parameters)
    loaded = _load_model(source, opened)
    _set_up_speculation(loaded, lookup, draft)
    if loaded.template is None:
        raise BadInput(f"{source.model}: has no chat template; try orinllm run --raw")
    from orinllm.command.answer_form import thinking_variables

    told = thinking_variables(loaded.template, thinking)
    conversation = Conversation(loaded.template, loaded.tokenizer, system, **told)
    if sys.stdin.isatty():
        print_message(_COMMANDS, dim=True)
    pictures: list[Picture] = []  # for the next question
    for line in typed_lines():
        if line == "/quit":
            return
        if line.startswith("/"):
            _run_chat_command(conversation, line, pictures)
        elif line:
            try:
                asked, pictures = (line, pictures), []
                _ask_and_print(loaded, conversation, asked, parameters, max_tokens)
            except KeyboardInterrupt:
                if conversation.messages[-1:] and conversation.messages[-1]["role"] == "user":
                    conversation.messages.pop()
                print_message("stopped", dim=True)


def _run_chat_command(conversation: Conversation, line: str, pictures: list[Picture]) -> None:
    """Do what a line says; `pictures` are those of the next question."""
    name, _, text = line.partition(" ")
    if name == "/image":
        file = text.strip()
        if file[:1] in ("'", '"') and file[-1:] == file[:1]:  # as terminals write dropped files
            file = file[1:-1]
        try:
            pictures.append(conversation.prepare_picture(os.path.expanduser(file)))
            print_message("the next question has this picture", dim=True)
        except BadInput as error:
            print_message(f"/image {error}")
    elif name == "/reset":
        pictures.clear()
        conversation.reset()
        print_message("conversation forgotten", dim=True)
    elif name == "/system":
        conversation.system = text.strip() or None
        conversation.reset()
        done = "set" if conversation.system else "removed"
        print_message(f"instruction {done}, conversation forgotten", dim=True)
    else:
        print_message(f"{name}: no such command; {_COMMANDS}")


def _ask_and_print(
    loaded: Any,
    conversation: Conversation,
    asked: tuple[str, list[Picture]],
    parameters: Sampling,
    max_tokens: int | None,
) -> None:
    try:
        ids = conversation.add_question(*asked)
    except BadInput as error:
        print_message(str(error))
        return
    try:
        generation = loaded.generate(ids, parameters, max_tokens=max_tokens)
    except BadInput as error:
        conversation.messages.pop()
        print_message(f"{error}; /reset forgets the conversation")
        return
    print_answer(generation, conversation.read_answer(answer_tokens(generation)))


@cli.command()
@with_model
@with_speculation
@with_server
def serve(source: ModelLoadOptions, **given: Any) -> None:
    """Serve a model with OpenAI's HTTP API.

    Listens on this machine alone unless --host says otherwise. SIGTERM lets answers under way end
    for --grace seconds.
    """
    from orinllm.choose.sampling import Sampling
    from orinllm.server.options import EngineOptions, HttpOptions, checked_grace, parse_share
    from orinllm.server.server_process import serve as run_server
    from orinllm.server.web.security import checked_host, checked_origin, read_api_keys

    options = EngineOptions(
        source.model,
        source.device,
        source.general,
        source.context,
        given["slots"],
        parse_share(given["memory"]),
        given["queue"],
        given["deterministic"],
        given["template"],
        given["pooling"],
        source.kv,
        given["lookup"],
        given["draft"],
        source.mmproj,
        tuple(host.lower() for host in given["allow_image_host"]),
    )
    _check_speculation(source.model, options.lookup, options.draft, Sampling())
    keys = read_api_keys(given["api_key_file"], print_message) if given["api_key_file"] else ()
    http = HttpOptions(
        given["host"],
        given["port"],
        given["alias"],
        keys,
        tuple(map(checked_host, given["allow_host"])),
        tuple(map(checked_origin, given["allow_origin"])),
        checked_grace(given["grace"]),
        given["strict"],
        given["api_key_file"],
    )
    sys.exit(run_server(options, http, given["insecure"], print_message))


@cli.command(name="list")
def list_() -> None:
    """List the models of the hub's cache.

    Their names are those that other commands take.
    """
    from orinllm.file.hub import cached_models

    for kept in cached_models():
        print_line(f"{kept.size_bytes / 1e6:10,.1f} MB  {kept.name}")


@cli.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove a model from the hub's cache.

    orinllm rm hf.co/OWNER/REPO:QUANT
    """
    from orinllm.file.hub import remove_cached_model

    kept = remove_cached_model(name)
    print_message(f"{kept.name}: removed, {kept.size_bytes / 1e6:,.1f} MB")


@cli.command(name="compile")
@click.argument("model", type=ModelPathParam())
@click.option("--arch", required=True, help="Architecture of the GPU: sm_87 is an Orin's.")
@click.option(
    "--sms",
    type=click.IntRange(1),
    help="Multiprocessors of the GPU. Default: known for sm_87 and sm_90.",
)
@click.option("-c", "--context", type=int, help="Maximum tokens, as the later run has them.")
@with_cache_type
@click.option(
    "--mmproj",
    type=MmprojPathParam(),
    metavar="FILE",
    help="Also the kernels of the encoder of pictures in this file.",
)
@click.option(
    "--slots",
    default=1,
    type=click.IntRange(1, 32),
    help="Also the kernels of a server with N slots, 1 to 32.",
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to write the kernels to.",
)
def compile_(**given: Any) -> None:
    """Compile a model's kernels ahead of time.

    A later start with ORINLLM_CUBINS=FOLDER compiles none of them.
    """
    from orinllm.gpu.compile_ahead import checked_target_gpu, write_cubins
    from orinllm.gpu.kernels.buffers import KEY_TYPES
    from orinllm.loader import Network

    network = Network.read(given["model"], given["context"], KEY_TYPES[given["kv"]])
    out, seen = given["out"], None
    if given["mmproj"] is not None:
        from orinllm.mmproj import read_matching_mmproj

        seen = read_matching_mmproj(given["mmproj"], network)
    gpu = checked_target_gpu(given["arch"], given["sms"])
    with showing_progress("compiling") as show_progress:
        n = write_cubins(network, gpu, out, given["slots"], seen, show_progress)
    print_message(f"{n} kernels in {out}; start with ORINLLM_CUBINS={out}")


def main() -> None:
    """Run the command; bad input is one line and exit code 2."""
    make_streams_utf8()
    try:
        cli(prog_name="orinllm", standalone_mode=False)
    except BadInput as error:
        _exit_process(EXIT_BAD_INPUT, f"orinllm: {error}")
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "orinllm"
        said = error.format_message().rstrip(".")
        _exit_process(EXIT_BAD_INPUT, f"orinllm: {said}; {command} --help lists what there is")
    except click.ClickException as error:
        _exit_process(EXIT_BAD_INPUT, f"orinllm: {error.format_message()}")
    except (click.Abort, KeyboardInterrupt):
        _exit_process(EXIT_INTERRUPTED)
    except DeviceFault as error:
        _exit_process(EXIT_OTHER, f"orinllm: {error}", at_once=True)
    except OSError as error:  # a disk that is full behind standard output, for instance
        _exit_process(
            EXIT_OTHER, f"orinllm: {error.filename or 'standard output'}: {error.strerror}"
        )


def _exit_process(code: int, text: str = "", at_once: bool = False) -> NoReturn:
    """End with a code, and without a device that is still being opened: its driver may hang.

    `at_once`: without a device that has failed, which would fail again.
    """
    if text:
        from orinllm.server.web.systemd_notify import tell_systemd

        text = escape_unprintable(text)
        print(text, file=sys.stderr)
        tell_systemd(f"STATUS={text}")
    if at_once or is_device_opening():
        with suppress(OSError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
