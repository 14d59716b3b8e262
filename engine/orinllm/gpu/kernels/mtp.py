"""Launches for a block that proposes tokens, of its model's last layer: cuda/mtp.cu."""

from dataclasses import dataclass

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, ceil_div, most_tokens
from orinllm.gpu.launch import Argument, Constants, Launch

_THREADS = 256


@dataclass(frozen=True)
class LeftConstants(Constants):
    """P of keep_rows() and join()."""

    chunk: bool
    rows: int
    cols: int
    page: int
    pages: int  # of a sequence
    threads: int


@dataclass(frozen=True)
class TokenRows:
    """Rows of a list, and where its tokens are: `count` of them, or a chunk; `at`; their pages."""

    count: int | Buffer
    at: Buffer
    table: Buffer

    @property
    def rows(self) -> int:
        """Rows at most."""
        return self.count if isinstance(self.count, int) else most_tokens(self.count)

    def constants(self, cols: int, threads: int) -> tuple[LeftConstants]:
        """Return the constants of a kernel."""
        chunk = not isinstance(self.count, int)
        pages = int(self.table.size) // (1 if chunk else self.rows)
        return (LeftConstants(chunk, self.rows, cols, PAGE, pages, threads),)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of a kernel."""
        return Argument("const int* at", self.at), Argument("const int* table", self.table)


def keep_hidden_states(left: Buffer, x: Buffer, tokens: TokenRows) -> Launch:
    """Return left = x, each row where its token's keys and values are."""
    cols = x.size // tokens.rows
    return Launch(
        name=f"keep_rows_{cols}",
        file="mtp.cu",
        constants=tokens.constants(cols, _THREADS),
        arguments=(
            Argument("float* left", left),
            Argument("const float* x", x),
            *tokens.arguments,
        ),
        body="  keep_rows<P0>(left, x, at, table);",
        grid=(ceil_div(cols, _THREADS), tokens.rows, 1),
        block=_THREADS,
        writes=("left",),
    )


def join_normed(
    out: Buffer,
    rows: tuple[Buffer, Buffer],
    norms: tuple[Buffer, Buffer, Buffer],
    eps: float,
    tokens: TokenRows,
) -> Launch:
    """Return out = embeddings, and beside them what a model's last norm makes of `rows[1]`.

    norms: of the embeddings, the model's last one, and of what that makes.
    """
    x, given = rows
    cols = norms[0].size
    names = ("own", "last", "behind")
    return Launch(
        name=f"join_{cols}",
        file="mtp.cu",
        constants=tokens.constants(cols, 32),
        arguments=(
            Argument("float* out", out),
            Argument("const float* x", x),
            Argument("const float* given", given),
            *(Argument(f"const float* {n}", norm) for n, norm in zip(names, norms, strict=True)),
            *tokens.arguments,
        ),
        body=f"  join<P0>(Joined{{out, x, given, {{own, last, behind}}, at, table, {eps!r}f}});",
        grid=(tokens.rows, 1, 1),
        block=32,
        writes=("out",),
    )
