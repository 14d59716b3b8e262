"""llama.cpp's list syntax: `512`, `128,256`, `1-4`, `64-512+64`, `32-512*2`, and repeats."""

import re

from orinbench.errors import BenchError

# first[-last[(+|*)step]], as llama-bench's --help describes it ("Ranges can be given as
# 'first-last' or 'first-last+step' or 'first-last*mult'").
_ITEM = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?")

# A typing error such as 1-1000000000 must not fill the memory with test cases.
MAX_VALUES = 1000


def parse_int_list(text: str, flag: str, minimum: int = 0, maximum: int | None = None) -> list[int]:
    """Return the integers that `text` names, in the order given.

    Raises BenchError, which names `flag`, for anything that is not a list of numbers and ranges,
    for a range that does not advance or is empty, and for a value outside `minimum` to `maximum`.
    """
    values: list[int] = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise BenchError(
                f"{flag} {text}: '{item}' is neither a number nor a range; "
                "right are 512, 128,256, 1-4, 64-512+64, 32-512*2"
            )
        values += _expand_range(match, f"{flag} {text}", len(values))
    for value in values:
        if value < minimum:
            raise BenchError(f"{flag} {text}: {value} is too small; the least is {minimum}")
        if maximum is not None and value > maximum:
            raise BenchError(f"{flag} {text}: {value} is too large; the most is {maximum}")
    return values


def _expand_range(match: re.Match[str], where: str, already: int) -> list[int]:
    first = int(match[1])
    last = int(match[2]) if match[2] is not None else first
    step = int(match[4]) if match[4] is not None else 1
    if last < first:
        raise BenchError(f"{where}: the range {match[0]} is empty; right is {last}-{first}")
    values = [first]
    while True:
        following = values[-1] * step if match[3] == "*" else values[-1] + step
        if following <= values[-1] and last > values[-1] and match[2] is not None:
            raise BenchError(
                f"{where}: the range {match[0]} never reaches {last}; the step must advance"
            )
        if following > last or following <= values[-1]:
            return values
        values.append(following)
        if already + len(values) > MAX_VALUES:
            raise BenchError(f"{where}: more than {MAX_VALUES} values; use fewer or a larger step")


def parse_pair(text: str, flag: str) -> tuple[int, int]:
    """Return (n_prompt, n_gen) of a `pp,tg` pair; both are at least 1."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise BenchError(f"{flag} {text}: not a pair of numbers; right is {flag} 512,128")
    n_prompt, n_gen = (int(part) for part in parts)
    if n_prompt == 0 or n_gen == 0:
        raise BenchError(f"{flag} {text}: both numbers must be at least 1; use -p or -n for one")
    return n_prompt, n_gen
