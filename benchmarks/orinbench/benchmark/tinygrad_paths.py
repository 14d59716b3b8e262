"""The ways that a loaded model computes: one class each, behind one interface.

`EnginePath` runs an executor of the engine. `JitPath` calls the jits of tinygrad.llm's own
Transformer, on any device. `DecoderPath` and `LogitsPath` are theirs for several sequences. What
the timed methods `prompt` and `decode` hold is written there.

This module imports tinygrad; see `tinygrad_runner`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.engine.realize import Ops
from tinygrad.llm.model import Transformer

from orinbench.benchmark.plan import TINYGRAD_CHUNK
from orinllm.executor import SamplingExecutor
from orinllm.fused import FusedExecutor
from orinllm.launches.buffers import KEY_TYPES
from orinllm.memory import pages_of
from orinllm.network import Network, make_executor, plan_network
from orinllm.sampling import Sampling


def load_network(
    model: str, max_context: int, sequences: int = 1, key_type: str = "f16"
) -> SamplingExecutor:
    """Return the engine's executor of a GGUF file on tinygrad's default device."""
    trained = Network.read(model).config.trained_context
    network = Network.read(model, min(max_context, trained), KEY_TYPES[key_type])
    plan = plan_network(network, str(Device.DEFAULT))
    return make_executor(network, plan, pages=sequences * pages_of(network.context))


def kernels_of(linear: Any) -> tuple[int, int]:
    """Return (kernels, launches) of one run of a LINEAR.

    Kernels are programs and copies, those inside graphs included; launches are the calls that the
    host makes for them.
    """
    calls = linear.src
    kernels = 0
    for call in calls:
        body = call.src[0]
        is_graph = body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"
        kernels += len(body.src[0].src) if is_graph else 1
    return kernels, len(calls)


class JitPath:
    """`Transformer.__call__`: the prefill jit for several tokens, the rollout jit for one."""

    name = "jit"  # what the record carries
    # What a timed region holds, for people.
    included = (
        "the forward pass, and what the jit holds behind it on the device: temperature, "
        "Gumbel noise and argmax over the logits"
    )
    # TinyJit runs the function plainly at its first call, captures at the second and replays from
    # the third (tinygrad/engine/jit.py).
    calls_to_capture = 2
    chunk: int | None = None  # prompt tokens that go through at once; None: as -ub says

    def __init__(self, model: Any) -> None:
        self._model = model
        self._position = UOp.variable("start_pos", 0, model.max_context - 1)
        self._temperature = Tensor(0.0).contiguous().realize()
        self._prefill: dict[int, Any] = {}
        self._out: Any = None

    def upload_prompt(self, ids: Sequence[int]) -> Any:
        """Return an int32 tensor (1, max_context) on the device that starts with `ids`."""
        context = self._model.max_context
        padded = [*ids, *[0] * (context - len(ids))]
        return Tensor(padded, dtype=dtypes.int32).reshape(1, context).realize()

    def upload_tokens(self, ids: Sequence[int]) -> list[Any]:
        """Return int32 tensors (1, 1), each a buffer of its own: the jit replays without a copy."""
        return [Tensor([[token]], dtype=dtypes.int32).realize() for token in ids]

    def prompt(self, prompt: Any, start: int, end: int, n_ubatch: int) -> None:
        """Compute positions start..end-1, `n_ubatch` at once, as `generate` does."""
        chunk = 1 if self._model.has_recurrent_block else n_ubatch
        if chunk not in self._prefill:
            self._prefill[chunk] = (TinyJit(self._model.forward), UOp.variable("toks", 1, chunk))
        self._model.prefill_jit, width = self._prefill[chunk]
        for position in range(start, end, chunk):
            bound = self._position.bind(position)
            tokens = prompt[:, bound : bound + width.bind(min(chunk, end - position))]
            self._out = self._model(tokens, bound, self._temperature).realize()

    def decode(self, token: Any, position: int) -> None:
        """Call the rollout jit."""
        bound = self._position.bind(position)
        self._out = self._model(token, bound, self._temperature).realize()

    def last_token(self) -> int:
        """Read the output of the last call."""
        return int(self._out.item())

    def counts(self) -> tuple[int, int]:
        """Count in what the rollout jit captured."""
        return kernels_of(self._model.rollout_jit.captured.linear)


class LogitsPath:
    """A jit of the model's layers: `Transformer.__call__` returns tokens, and its logits are gone.

    Kernels are those that tinygrad makes, whatever else the model has.
    """

    name = "jit"
    included = "the forward pass to the logits, by tinygrad's general path"

    def __init__(self, model: Any) -> None:
        self._position = UOp.variable("start_pos", 0, model.max_context - 1)
        self._out: Any = None

        def logits(tokens: Any, position: Any) -> Any:
            x = model.token_embd(tokens).float()
            for block in model.blk:
                x = block(x, position)
            return model.output(model.output_norm(x))[:, -1, :].float().realize()

        self._jit = TinyJit(logits)

    def upload_tokens(self, *rows: Sequence[int]) -> list[Any]:
        """Return a tensor (sequences, 1) for each position, of each sequence's row of ids."""
        columns = zip(*rows, strict=True)
        return [Tensor([[token] for token in ids], dtype=dtypes.int32).realize() for ids in columns]

    def decode(self, tokens: Any, position: int) -> None:
        """Compute keys, values and logits of a token of each sequence."""
        self._out = self._jit(tokens, self._position.bind(position))

    def logits(self) -> npt.NDArray[np.float32]:
        """Read the logits of the last call: (sequences, vocabulary)."""
        found: npt.NDArray[np.float32] = self._out.numpy()
        return found

    def counts(self) -> tuple[int, int]:
        """Count in what the jit captured."""
        return kernels_of(self._jit.captured.linear)


class JitExecutor:
    """tinygrad.llm's own Transformer as an executor of one sequence, by the jits that are timed.

    Logits, which those do not give, are computed once more over the same keys and values.
    """

    name = "jit"

    def __init__(self, file: str, max_context: int) -> None:
        model, metadata = Transformer.from_gguf(file, max_context=max_context)
        self.context, self.vocab_size = max_context, len(metadata["tokenizer.ggml.tokens"])
        self._path, self._logits = JitPath(model), LogitsPath(model)
        self._last = (0, 0)  # token and position of the last step

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Compute keys and values of tokens[start:end] at their positions."""
        if end > start:
            self._path.prompt(self._path.upload_prompt(tokens), start, end, TINYGRAD_CHUNK)

    def step(self, token: int | None = None, position: int = 0) -> None:
        """Compute one token more: the given one, or the one that `token` returns."""
        self._last = (self.token(), self._last[1] + 1) if token is None else (token, position)
        (uploaded,) = self._path.upload_tokens([self._last[0]])
        self._path.decode(uploaded, self._last[1])

    def token(self) -> int:
        """Return the most likely next token."""
        return self._path.last_token()

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last token: (vocabulary)."""
        token, position = self._last
        (uploaded,) = self._logits.upload_tokens([token])
        self._logits.decode(uploaded, position)
        logits: npt.NDArray[np.float32] = self._logits.logits()[0]
        return logits


class EnginePath:
    """An executor of the engine (orinllm): fused kernels on CUDA and NV, else its general path."""

    calls_to_capture = 2

    def __init__(self, executor: SamplingExecutor) -> None:
        self._executor, self.name = executor, executor.name
        fused = isinstance(executor, FusedExecutor)
        self.chunk: int | None = executor.chunk if isinstance(executor, FusedExecutor) else None
        self.included = _FUSED_INCLUDED if fused else _GENERAL_INCLUDED
        self._drawn_here = False  # by the host, behind each step

    def sample(self, how: Sampling | None) -> None:
        """Draw every token like this from now on; None: leave the most likely one."""
        self._executor.sample(how or Sampling(temperature=0), ())
        self._drawn_here = how is not None and not isinstance(self._executor, FusedExecutor)

    def upload_prompt(self, ids: Sequence[int]) -> Any:
        """Return the ids: `prompt` copies them."""
        return list(ids)

    def upload_tokens(self, ids: Sequence[int]) -> list[Any]:
        """Return the ids: `decode` copies them."""
        return list(ids)

    def prompt(self, prompt: Any, start: int, end: int, n_ubatch: int) -> None:
        """Fill all but the last token, whose logits the kernels of a token make."""
        self._executor.fill(prompt, start, end - 1)
        self._executor.step(prompt[end - 1], end - 1)

    def decode(self, token: Any, position: int) -> None:
        """Copy a token and its position to the device; run a token's kernels."""
        self._executor.step(token, position)
        if self._drawn_here:
            self._executor.token()

    def last_token(self) -> int:
        """Read the most likely token."""
        return self._executor.token()

    def logits(self) -> npt.NDArray[np.float32]:
        """Read the logits that the last step left: (vocabulary)."""
        return self._executor.logits()

    def counts(self) -> tuple[int | None, int | None]:
        """Count in the token's list; on a CPU it is one program, elsewhere it is not known."""
        if isinstance(self._executor, FusedExecutor):
            return kernels_of(self._executor.decoder().next_graph.linear)
        return (1, 1) if Device.DEFAULT == "CPU" else (None, None)


_FUSED_INCLUDED = (
    "the forward pass with its argmax over the logits, and the host's copies of token ids and "
    "positions to the device, one a token or a prompt's chunk"
)
_GENERAL_INCLUDED = "the forward pass to the logits, and their copy to the host"


#: A way of running tokens through a model, one sequence at a time. Nothing is synchronized here.
DecodePath = JitPath | EnginePath


class DecoderPath:
    """A token of each of several sequences by the engine's fused kernels."""

    name = "fused"
    included = _FUSED_INCLUDED

    def __init__(self, executor: FusedExecutor, sequences: int) -> None:
        self._executor, self._decoder = executor, executor.decoder(sequences)
        pages = pages_of(executor.context)
        self._pages = [range(i * pages, (i + 1) * pages) for i in range(sequences)]
        self._decoder.place(self._pages)

    def sample(self, how: Sampling | None) -> None:
        """Draw every slot's tokens like this from now on; None: take the most likely ones."""
        for slot in range(self._decoder.sequences):
            self._decoder.sample(slot, how)

    def fill(self, rows: Sequence[Sequence[int]]) -> None:
        """Start keys and values of each sequence's row of ids."""
        for row, pages in zip(rows, self._pages, strict=True):
            self._executor.place(pages)
            self._executor.fill(row, 0, len(row))
        self._executor.place(self._pages[0])

    def upload_tokens(self, *rows: Sequence[int]) -> list[Any]:
        """Return the ids of each position, of each sequence's row: `decode` copies them."""
        return list(zip(*rows, strict=True))

    def decode(self, tokens: Any, position: int) -> None:
        """Compute keys, values and logits of a token of each sequence."""
        self._decoder.step(tokens, [position] * len(tokens))

    def logits(self) -> npt.NDArray[np.float32]:
        """Read the logits of the last call: (sequences, vocabulary)."""
        return self._decoder.logits()

    def counts(self) -> tuple[int, int]:
        """Count in the token's list."""
        return kernels_of(self._decoder.graph.linear)
