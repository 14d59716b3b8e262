"""Launches for a block that proposes tokens, of its model's last layer: cuda/mtp.cu."""

from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, ceil_div, most_tokens
from orinllm.gpu.launch import ROW_THREADS, Constants, Launch, launch_of_rows


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

    def constants(self, cols: int, threads: int) -> LeftConstants:
        """Return the constants of a kernel."""
        chunk = not isinstance(self.count, int)
        pages = int(self.table.size) // (1 if chunk else self.rows)
        return LeftConstants(chunk, self.rows, cols, PAGE, pages, threads)

    @property
    def arguments(self) -> dict[str, Buffer]:
        """The arguments of a kernel."""
        return {"const int* at": self.at, "const int* table": self.table}


def keep_hidden_states(left: Buffer, x: Buffer, tokens: TokenRows) -> Launch:
    """Return left = x, each row where its token's keys and values are."""
    cols = x.size // tokens.rows
    return launch_of_rows(
        "mtp.cu",
        f"keep_rows_{cols}",
        tokens.constants(cols, ROW_THREADS),
        {"float* left": left, "const float* x": x, **tokens.arguments},
        "keep_rows<P0>(left, x, at, table)",
        (ceil_div(cols, ROW_THREADS), tokens.rows),
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
    cols, names = norms[0].size, ("own", "last", "behind")
    given = {"float* out": out, "const float* x": rows[0], "const float* given": rows[1]}
    given |= {f"const float* {name}": norm for name, norm in zip(names, norms, strict=True)}
    launch = launch_of_rows(
        "mtp.cu",
        f"join_{cols}",
        tokens.constants(cols, 32),
        given | tokens.arguments,
        f"join<P0>(Joined{{out, x, given, {{own, last, behind}}, at, table, {eps!r}f}})",
        (tokens.rows, 1),
    )
    return replace(launch, block=32)
