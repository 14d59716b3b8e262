"""Launches for a block that proposes tokens, of its model's last layer: cuda/mtp.cu."""

from dataclasses import dataclass, replace

from tinygrad.device import Buffer

from orinllm.gpu.kernels.buffers import PAGE, chunk_capacity
from orinllm.gpu.kernels.rows import element_grid
from orinllm.gpu.launch import ROW_THREADS, Constants, Given, Launch, make_launch, make_rows_launch


@dataclass(frozen=True)
class TokenPlaces:
    """Rows of a list, and where its tokens are: `count` of them, or a chunk; `at`; their pages."""

    count: int | Buffer
    at: Buffer
    table: Buffer

    @property
    def most_rows(self) -> int:
        """Rows at most."""
        return self.count if isinstance(self.count, int) else chunk_capacity(self.count)

    def constants(self, cols: int, threads: int) -> Constants:
        """Return P of keep_rows() and join()."""
        chunk = not isinstance(self.count, int)
        pages = int(self.table.size) // (1 if chunk else self.most_rows)  # of a sequence
        return Constants(
            chunk=chunk, rows=self.most_rows, cols=cols, page=PAGE, pages=pages, threads=threads
        )

    @property
    def arguments(self) -> Given:
        """The arguments of a kernel."""
        return {"const int* at": self.at, "const int* table": self.table}


def keep_hidden_states_launch(left: Buffer, x: Buffer, tokens: TokenPlaces) -> Launch:
    """Return left = x, each row where its token's keys and values are."""
    cols = x.size // tokens.most_rows
    given = {"float* left": left, "const float* x": x} | tokens.arguments
    constants, grid = tokens.constants(cols, ROW_THREADS), element_grid(cols, tokens.most_rows)
    return make_rows_launch("mtp.cu keep_rows", cols, constants, given, (), grid)


def join_normed_launch(
    out: Buffer,
    rows: tuple[Buffer, Buffer],
    norms: tuple[Buffer, Buffer, Buffer],
    eps: float,
    tokens: TokenPlaces,
) -> Launch:
    """Return out = embeddings, and beside them what a model's last norm makes of `rows[1]`.

    norms: of the embeddings, the model's last one, and of what that makes.
    """
    cols, names = norms[0].size, ("own", "last", "behind")
    given: Given = {"float* out": out, "const float* x": rows[0], "const float* given": rows[1]}
    given |= {f"const float* {name}": norm for name, norm in zip(names, norms, strict=True)}
    call = f"Joined{{out, x, given, {{own, last, behind}}, at, table, {eps!r}f}}"
    constants, grid = tokens.constants(cols, 32), (tokens.most_rows, 1)
    launch = make_launch("mtp.cu join", cols, constants, given | tokens.arguments, call, grid)
    return replace(launch, block=32)
