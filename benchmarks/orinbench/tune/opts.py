"""Optimizations of a kernel as text: `UPCAST(0,4) TC(0,(-1,2,1)) NOLOCALS`, in order.

The text is all that a tuning file holds of them: nothing in a file is ever executed or unpickled.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

# tinygrad 0.13.0's OptOps (tinygrad/codegen/opt/__init__.py), in its order.
OPERATIONS = tuple(
    """
    TC UPCAST UNROLL LOCAL THREAD GROUP GROUPTOP NOLOCALS PADTO SWAP
""".split()
)
# Longer numbers are no axis and no size; Python's int() takes any.
_NUMBER = r"-?\d{1,9}"
_OPT = re.compile(rf"([A-Z]+)(?:\(({_NUMBER})(?:,({_NUMBER}|\({_NUMBER}(?:,{_NUMBER})*\)))?\))?")
# As many as no kernel of tinygrad's can take: each axis is split once or twice.
_MOST = 64


@dataclass(frozen=True)
class OptText:
    """One optimization: operation, axis and argument as tinygrad's `Opt` has them."""

    op: str
    axis: int | None = None
    arg: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.axis is None:
            return self.op
        if self.arg is None:
            return f"{self.op}({self.axis})"
        arg = f"({','.join(map(str, self.arg))})" if isinstance(self.arg, tuple) else self.arg
        return f"{self.op}({self.axis},{arg})"


def format_opts(opts: Iterable[OptText]) -> str:
    """Return the text of optimizations; that of none is empty."""
    return " ".join(map(str, opts))


def parse_opts(text: str) -> tuple[OptText, ...]:
    """Return the optimizations that `text` names; raises ValueError for any other text."""
    words = text.split()
    if len(words) > _MOST:
        raise ValueError(f"{len(words)} optimizations; a kernel takes at most {_MOST}")
    return tuple(_parse(word) for word in words)


def _parse(word: str) -> OptText:
    match = _OPT.fullmatch(word)
    if match is None or match[1] not in OPERATIONS:
        raise ValueError(f"{word[:60]!r} is no optimization; right are UPCAST(0,4) or NOLOCALS")
    axis = None if match[2] is None else int(match[2])
    if match[3] is None:
        return OptText(match[1], axis)
    if match[3].startswith("("):
        return OptText(match[1], axis, tuple(map(int, match[3][1:-1].split(","))))
    return OptText(match[1], axis, int(match[3]))
