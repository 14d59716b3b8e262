"""The terminal: what is said to a person, the lines that a person types, an answer as it grows.

A model's file, its answers and the hub are strangers': a terminal obeys nothing of what they say.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from orinllm.errors import BadInput, escape_for_terminal, escape_unprintable

if TYPE_CHECKING:
    from orinllm.text.answer import Delta


def _stderr_is_terminal() -> bool:
    """Say whether standard error is a terminal that knows sequences for it."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def print_message(text: str, dim: bool = False, end: str = "\n") -> None:
    """Print a text for people, on standard error."""
    text = escape_for_terminal(text)
    if dim and _stderr_is_terminal() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[2m{text}\x1b[0m"
    print(text, end=end, file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print a line of what was asked for."""
    print(escape_unprintable(text))


@contextmanager
def showing_progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done until it is done; yields what shows another text."""

    def show(text: str) -> None:
        if _stderr_is_terminal():
            line = escape_unprintable(text)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    show(text)
    try:
        yield show
    finally:
        show("")


@contextmanager
def _cancel_on_interrupt(generation: Any) -> Iterator[None]:
    """Let the first Ctrl-C end the answer and not the program."""

    def cancel(number: int, frame: FrameType | None) -> None:
        generation.cancel()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_answer(generation: Any, deltas: Iterable[Delta]) -> None:
    """Print an answer while it grows, and its speed: thoughts to stderr, what it says to stdout."""
    started, first, thinking = time.perf_counter(), 0.0, False
    shown = escape_for_terminal if sys.stdout.isatty() else str
    with _cancel_on_interrupt(generation):
        for delta in deltas:
            first = first or time.perf_counter()
            if delta.reasoning:
                thinking = True
                print_message(delta.reasoning, dim=True, end="")
            if delta.content:
                if thinking:
                    thinking = False
                    print_message("")
                print(shown(delta.content), end="", flush=True)
    print(flush=True)
    n, seconds = len(generation.tokens), time.perf_counter() - first
    rate = f", {(n - 1) / seconds:.1f} tok/s" if first and n > 1 else ""
    known = f", {generation.n_cached} of them known" if generation.n_cached else ""
    guessed = ""
    if generation.n_proposed:
        guessed = f", {generation.n_accepted} of {generation.n_proposed} guessed tokens right"
    print_message(
        f"[{n} token{'s'[: n != 1]}{rate}{guessed}; prompt of {generation.n_prompt} tokens{known}, "
        f"first token after {(first or time.perf_counter()) - started:.2f} s; ended by "
        f"{_ENDED[generation.finish_reason]}]",
        dim=True,
    )


_ENDED = {
    "stop": "the model",
    "length": "the limit of tokens",
    "cancelled": "Ctrl-C",
}


def answer_tokens(generation: Any) -> Iterator[int]:
    """Yield an answer's tokens; a last piece of text without one is left to the reader."""
    return (piece.token for piece in generation if piece.token >= 0)


def read_standard_input() -> str:
    """Read all of standard input; raises BadInput if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise BadInput("standard input: is not UTF-8; text was expected") from None


def typed_lines() -> Iterator[str]:
    """Yield the lines that a person types; Ctrl-C forgets a line, Ctrl-D ends."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() its arrow keys and its history)
    while True:
        try:
            yield input("> " if typed else "").strip()
        except KeyboardInterrupt:
            print()
        except UnicodeDecodeError:
            raise BadInput("standard input: is not UTF-8; text was expected") from None
        except EOFError:
            if typed:
                print()
            return
