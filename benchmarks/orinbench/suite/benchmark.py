"""The one form that all benchmarks of the suite have, and readers of their options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from orinbench.errors import BenchError
from orinbench.plan import SuiteCase
from orinbench.ranges import parse_int_list
from orinbench.suite.task import Task

Options = Mapping[str, Any]
Parameters = Mapping[str, Any]

# tinygrad's names by ours.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

_SIZE_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Choice:
    """An option of a benchmark: a text, with its value for each of the suite's selections."""

    flags: tuple[str, ...]
    help: str
    full: str
    quick: str
    tiny: str  # for simulators and tests: seconds on one core

    @property
    def name(self) -> str:
        """The key that it has among the options."""
        longest = max(self.flags, key=len)
        return longest.lstrip("-").replace("-", "_")

    def option(self) -> Callable[[Any], Any]:
        """Return it as a click option."""
        default = f" [{self.full}]" if self.full else ""
        return click.option(
            self.name, *self.flags, default=self.full, metavar="LIST", help=self.help + default
        )


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: what its cases are, and how the worker makes one ready.

    `cases` runs in the bench and raises BenchError for options that mean nothing; `prepare` gets a
    case's parameters and a seed, runs in the worker, and is the only one that imports tinygrad.
    """

    name: str
    help: str
    choices: tuple[Choice, ...]
    cases: Callable[[Options], list[SuiteCase]]
    prepare: Callable[[Parameters, int], Task]
    roofline: bool = False  # cases are judged by the copy bandwidth
    max_call_s: float = 2.0  # a case of which one call takes longer is left out, unless asked

    def preset(self, selection: str) -> dict[str, str]:
        """Return the options of a selection: full, quick or tiny."""
        return {choice.name: getattr(choice, selection) for choice in self.choices}


def words(text: str, flag: str, known: Sequence[str]) -> list[str]:
    """Return the words of a list; raises BenchError for one that is not `known`."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in known:
            raise BenchError(f"{flag} {word}: no such choice; there are {', '.join(known)}")
    if not found:
        raise BenchError(f"{flag}: no value given; there are {', '.join(known)}")
    return list(dict.fromkeys(found))


def numbers(text: str, flag: str, minimum: int = 1) -> list[int]:
    """Return the numbers of a list in llama-bench's syntax, without repeats, the least first."""
    return sorted(set(parse_int_list(text, flag, minimum)))


def sizes(text: str, flag: str) -> list[int]:
    """Return bytes of a list such as `4K,1M,256M`, the least first; raises BenchError."""
    found = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        suffix = word[-1].upper() if word[-1:].isalpha() else ""
        digits = word[: len(word) - len(suffix)]
        if suffix not in _SIZE_SUFFIXES or not digits.isdecimal() or int(digits) == 0:
            raise BenchError(f"{flag} {word}: not a size; write it as 4096, 4K, 16M or 1G")
        found.append(int(digits) * _SIZE_SUFFIXES[suffix])
    if not found:
        raise BenchError(f"{flag}: no size given; write it as 4096, 4K, 16M or 1G")
    return sorted(set(found))


def size_label(n_bytes: int) -> str:
    """Return bytes as a person writes them: 4 KiB, 256 MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes % factor == 0:
            return f"{n_bytes // factor} {unit}"
    return f"{n_bytes} B"
