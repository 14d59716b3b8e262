"""Launches joined to one, whose parts are theirs: a block waits for those of the part before.

So a part's first weights, or keys, are on the way before what it multiplies is known, and no kernel
has to end before the next one begins (docs/measure/performance.md).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.launch import Argument, Constants, Launch, shared_memory_declaration

# Warps on a multiprocessor that leave a thread registers enough: BOUNDS_126 in cuda/gpu.cuh.
_WARPS = 16


def join_neighbouring_launches(
    launches: Sequence[Launch], signals: Buffer, first: int
) -> tuple[Launch, ...]:
    """Return launches with neighbours joined whose blocks are alike, and may be parts.

    signals: ints, 0 before and after a token; one for each launch is taken, from `first` on: those
    of a joined one count the blocks of all its parts but the last that are done, then all that have
    started.
    """
    found: list[Launch] = []
    groups = itertools.groupby(
        enumerate(launches), lambda pair: (pair[1].step != "", pair[1].block)
    )
    for (may, _), group in groups:
        indices, parts = zip(*group, strict=True)
        if may and len(parts) > 1:
            own = signals.view(len(parts), dtypes.int32, 4 * (first + indices[0]))
            found.append(_LaunchJoiner(own.ensure_allocated()).join_parts(parts))
        else:
            found += parts
    return tuple(found)


class _LaunchJoiner:
    """Puts a launch of parts together: its arguments, constants and body."""

    def __init__(self, signals: Buffer) -> None:
        self._arguments = [Argument("int* signals", signals)]
        self._constants: list[Constants] = []
        self._writes = ["signals"]
        self._body: list[str] = []

    def join_parts(self, parts: Sequence[Launch]) -> Launch:
        """Return the launch of these parts."""
        ends = list(itertools.accumulate(part.grid[0] for part in parts))
        self._body.append(f"  const int ticket = take_ticket(signals + {len(parts) - 1});")
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            start = ends[index] - part.grid[0]
            self._body.append("  {" if last else f"  if (ticket < {ends[index]}) {{")
            self._body.append(f"  const int block = ticket - {start};")
            before = f"Blocks before = {{signals + {index - 1}, {parts[index - 1].grid[0]}}}"
            self._body.append(f"  const {before};" if index else "  const Nobody before{};")
            self._add_part(part)
            self._body.append("  }" if last else f"  signal(signals + {index});\n  }} else")
        steps = "_".join(dict.fromkeys(part.step for part in parts))
        shape = parts[0].name.partition(f"{parts[0].step}_")[2]
        return replace(
            parts[0],
            name=f"joined_{steps}_{shape}",
            file="joined.cu",
            constants=tuple(self._constants),
            arguments=tuple(self._arguments),
            body=shared_memory_declaration(max(part.shared for part in parts))
            + "\n".join(self._body),
            grid=(ends[-1], 1, 1),
            writes=tuple(self._writes),
            operations=sum(part.operations for part in parts),
            n_bytes=sum(part.n_bytes for part in parts),
            per_sm=max(1, _WARPS * 32 // parts[0].block),
            shared=0,
            step="",
        )

    def _add_part(self, part: Launch) -> None:
        """Add a part's body, in which its constants and arguments have the names that it knows."""
        known = len(self._constants)
        if known:
            self._body += [f"  typedef P{known + i} P{i};" for i in range(len(part.constants))]
        self._constants += part.constants
        for argument in part.arguments:
            name = self._find_or_add_argument(argument)
            if name != argument.name:
                self._body.append(f"  {argument.type} const {argument.name} = {name};")
            if argument.name in part.writes and name not in self._writes:
                self._writes.append(name)
        self._body.append(part.body)

    def _find_or_add_argument(self, wanted: Argument) -> str:
        """Return the name that an argument has in the launch, which it is added to if need be."""
        for argument in self._arguments:
            if argument.buffer is wanted.buffer and argument.type == wanted.type:
                return argument.name
        name = f"a{len(self._arguments)}"
        self._arguments.append(Argument(f"{wanted.type} {name}", wanted.buffer))
        return name
