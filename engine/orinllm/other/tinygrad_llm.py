"""The general path: tinygrad.llm's own Transformer, one sequence at a time on any tinygrad device.

It is for networks that have no other path here, and for `--path general`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinygrad import Tensor, TinyJit, UOp
from tinygrad.llm.model import Transformer
from tinygrad.nn.state import get_state_dict

import orinllm.gpu.thread_safe_kernel_cache  # noqa: F401
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.network.config import Config, context_overflow_error

Floats = NDArray[np.float32]
# What tinygrad.llm calls ffn_norm in these files is called post_attention_norm.
# What it knows among the architectures that have layers here (network/arch): its source, as below.
_KNOWN = ("llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe")
_RENAMED = ("qwen35", "qwen35moe", "glm4moe")


class UpstreamExecutor:
    """A model by tinygrad.llm, token by token; weights stay packed.

    `max_context` is how many tokens a sequence may have. Raises BadInput for a model in several
    files, for a network that tinygrad.llm would compute wrong, and for tensors that it would
    ignore.
    """

    name = "general"

    def __init__(self, gguf: GGUF, config: Config, device: str, max_context: int) -> None:
        if (why := reason_unsupported(gguf, config)) is not None:
            raise BadInput(f"{gguf.path}: tinygrad.llm's network (--path general) {why}")
        if len(gguf.files) > 1:
            raise BadInput(
                f"{gguf.path}: {config.architecture} is run from one file; "
                "join the parts with `llama-gguf-split --merge`"
            )
        self.config, self.context, self._device = config, max_context, device
        self._model, _ = Transformer.from_gguf(Tensor(gguf.files[0], device=device), max_context)
        _require_known_tensors(gguf, config, set(get_state_dict(self._model)))
        self._start = UOp.variable("start", 0, max(1, max_context - 1))
        self._step = TinyJit(partial(logits_after_token, self._model))
        self._state = TinyJit(partial(_last_hidden_state, self._model))
        self._length = 0

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Append tokens from position `start` on; return the logits after the last one.

        Raises BadInput where they do not fit the context, and where a recurrent state would have
        to go back: `start` is 0 or where the sequence ends.
        """
        self._require_context_room(len(tokens), start)
        return self._run_tokens(self._step, tokens, start)[-1]

    def prefill_for_hidden_states(self, tokens: Sequence[int], start: int) -> Floats:
        """Append tokens; return what the last norm makes of each: (tokens, width)."""
        self._require_context_room(len(tokens), start)
        return np.stack(self._run_tokens(self._state, tokens, start, every=True))

    def _require_context_room(self, n: int, start: int) -> None:
        if not 0 < n <= self.context - start:
            raise context_overflow_error(n, start, self.context)

    def _run_tokens(
        self, step: TinyJit, tokens: Sequence[int], start: int, every: bool = False
    ) -> list[Floats]:
        """Run a step for each token; return what the last one gives, or every one."""
        if self._model.has_recurrent_block and start not in (0, self._length):
            raise BadInput(f"{self.config.architecture} cannot go back to position {start}")
        if start == 0:
            zero_recurrent_states(self._model)
        found: list[Floats] = []
        for position, token in enumerate(tokens, start):
            ids = Tensor([[token]], dtype="int32", device=self._device).realize()
            row = step(ids, self._start.bind(position))
            if every or position == start + len(tokens) - 1:
                found.append(row.numpy())
        self._length = start + len(tokens)
        return found


def reason_unsupported(gguf: GGUF, config: Config) -> str | None:
    """Return what of a network tinygrad.llm does not compute, or None."""
    if not config.layers:
        return None  # arch/tinygrad_llm.py has refused what it does not
    if config.architecture not in _KNOWN:
        return f"does not know {config.architecture}"
    if config.architecture == "llama" and any(layer.experts_operation for layer in config.layers):
        return "does not normalize the weights of a llama's experts"
    read = "rope_freqs.weight" in gguf.tensors  # what it divides frequencies by
    for attention in config.attention_by_layer.values():
        rope = attention.rope
        assert rope is not None  # in all of _KNOWN
        plain = np.asarray(rope.frequencies) * (
            gguf.f32_or_f16_tensor("rope_freqs.weight") if read else 1
        )
        steps = np.diff(np.log(plain))
        if rope.magnitude != 1 or not np.allclose(
            [plain[0], *steps], [1, *(steps[0],) * len(steps)]
        ):
            return "has no scaling of rotary positions"
    return None


def logits_after_token(model: Any, token: Tensor, start: UOp) -> Tensor:
    """Return what follows one token (1, 1) at `start` in a Transformer: logits (vocabulary)."""
    logits: Tensor = model.output(_normed_states(model, token, start)).float().reshape(-1)
    return logits.contiguous()


def zero_recurrent_states(model: Any) -> None:
    """Zero a Transformer's recurrent states; attention overwrites its cache."""
    if resets := [op for block in model.blk for op in block._state_reset_ops()]:
        Tensor.realize(*resets)


def _normed_states(model: Any, tokens: Tensor, start: UOp) -> Tensor:
    x = model.token_embd(tokens).float()
    for block in model.blk:
        x = block(x, start)
    normed: Tensor = model.output_norm(x)
    return normed


def _last_hidden_state(model: Any, token: Tensor, start: UOp) -> Tensor:
    return _normed_states(model, token, start).float().reshape(-1).contiguous()


def _require_known_tensors(gguf: GGUF, config: Config, known: set[str]) -> None:
    """Raise BadInput for a tensor of the trunk that tinygrad.llm does not read."""
    layers = 1 + max((int(n.split(".")[1]) for n in known if n.startswith("blk.")), default=-1)
    for name in gguf.tensors:
        parts = name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= layers:  # predicts later tokens
            continue
        read = name
        if config.architecture in _RENAMED:
            read = name.replace("post_attention_norm", "ffn_norm")
        if read not in known and name != "rope_freqs.weight":
            raise BadInput(
                f"{gguf.path}: tensor {name} is not part of the architecture "
                f"{config.architecture} as tinygrad.llm runs it"
            )
