"""tinygrad.llm's own network, for architectures that only it computes, token by token."""

from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes

from orinllm.config import Config
from orinllm.errors import BadInput
from orinllm.executor import Floats
from orinllm.gguf import GGUF


class UpstreamExecutor:
    """`tinygrad.llm.model.Transformer` as an executor. Positions must grow, or start again at 0."""

    name = "upstream"

    def __init__(self, gguf: GGUF, config: Config, device: str, context: int) -> None:
        if len(gguf.files) > 1:
            raise BadInput(f"{gguf.path}: {config.architecture} in several files is not supported")
        from tinygrad.llm.model import Transformer

        self.context, self._vocab_size = context, config.vocab_size
        data = Tensor(np.asarray(gguf.files[0]), device=device)
        self._model, _ = Transformer.from_gguf(data, max_context=context)
        self._position = UOp.variable("start_pos", 0, max(1, context - 1))
        self._jit = TinyJit(self._forward)
        self._logits: Floats = np.empty(0, np.float32)
        self._next = 0

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._vocab_size

    def _forward(self, tokens: Tensor, position: UOp) -> Tensor:
        model = self._model
        x = model.token_embd(tokens).float()
        for block in model.blk:
            x = block(x, position)
        return model.output(model.output_norm(x))[:, -1, :].float().realize()

    def fill(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Compute tokens[start:end]; a recurrent state begins anew with position 0."""
        for position in range(start, end):
            self.step(tokens[position], position)

    def step(self, token: int | None = None, position: int = 0) -> None:
        """Compute one token."""
        if token is None:
            token, position = self.token(), self._next
        if position != self._next and (
            resets := [reset for block in self._model.blk for reset in block._state_reset_ops()]
        ):
            Tensor.realize(*resets)
        ids = Tensor([[token]], dtype=dtypes.int32).realize()
        self._logits = self._jit(ids, self._position.bind(position)).numpy().reshape(-1)
        self._next = position + 1

    def token(self) -> int:
        """Return the most likely next token; -1 where logits are no numbers."""
        best = int(self._logits.argmax())
        return best if np.isfinite(self._logits[best]) else -1

    def logits(self) -> Floats:
        """Return the logits after the last token: (vocabulary)."""
        return self._logits
