"""The general path on a CPU: one program of cpu/decoder.c, which runs a list of operations.

tinygrad's own graph of a token is a hundred small kernels there, each sent by Python to its
threads; this is one call a token. Weights are bytes and scales (byte_weights.py), or 16-bit floats.
"""

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray
from tinygrad import Device, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import CPU_COUNT

from orinllm.byte_weights import LAYOUTS, row_bytes, weight_bytes, write_rows
from orinllm.config import Activation, Attention, Config, Gating, Layer, Rope, check_room
from orinllm.errors import BadInput
from orinllm.gguf import GGUF
from orinllm.states import normed

#: Tokens of a prompt that go through at once (MAX_CHUNK of cpu/decoder.c).
CHUNK = 32
#: Tokens at most whose logits are all wanted.
MOST_ROWS = 8
# Dimensions of a head and experts of a token, at most (MAX_HEAD and MAX_USED).
_MAX_HEAD, _MAX_USED = 512, 32
_SOURCES = [Path(__file__).parent / "cpu" / name for name in ("rows.c", "decoder.c")]
# Rows of weights that a core makes floats of at once (2 * ROWS).
_ROWS = 8
# Weights that are dequantized at once.
_PIECE = 8 << 20

_EMBED, _MATMUL, _KEYS, _ATTEND, _NORM_ADD, _EXPERTS_GATED, _EXPERTS_DOWN = range(7)
_STORE, _ADD = 0, 1
_EPILOGUES = {Activation.SILU: 2, Activation.GELU: 3, Activation.GPT_OSS: 4}
_GATINGS = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_OF_CHOSEN: 2}

_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64
Floats = NDArray[np.float32]


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weights", "bias", "out")),
        *((name, _I64) for name in ("rows", "stride", "row_bytes", "group", "minima")),
    )


class _Op(ctypes.Structure):
    _fields_ = (
        ("kind", _I64),
        *((name, _POINTER) for name in ("in", "norm")),
        *((name, _I64) for name in ("in_stride", "cols", "n_parts", "epilogue", "last_only")),
        ("parts", _Part * 3),
        *((name, ctypes.c_double) for name in ("scale", "eps")),
        *((name, _POINTER) for name in ("second", "table", "sinks", "keys", "values")),
        *((name, _I64) for name in ("heads", "kv_heads", "head_dim", "length", "window")),
        *((name, _I64) for name in ("pairs", "interleaved")),
        ("router", _POINTER),
        *((name, _I64) for name in ("experts", "used", "gating", "normalized")),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, _I64) for name in ("n_tokens", "start", "n_ops")),
        *((name, _POINTER) for name in ("ops", "progress", "scratch")),
        *((name, _I64) for name in ("scratch_size", "rows_at")),
        ("tokens", _I64 * CHUNK),
    )


@cache
def _program() -> Any:
    device = Device["CPU"]
    binary = device.compiler.compile_cached("".join(path.read_text() for path in _SOURCES))
    # The index of core_id among the values that follow the buffers.
    return device.runtime("decoder", binary, runtimevars={"core_id": 0})


def _memory(n_bytes: int) -> tuple[Buffer, int]:
    """Return a buffer of zeros, and its address."""
    buffer = Buffer("CPU", max(n_bytes, 1), dtypes.uint8).allocate()
    # tinygrad's allocator hands out what others gave back.
    ctypes.memset(buffer._buf.va_addr, 0, max(n_bytes, 1))
    return buffer, buffer._buf.va_addr


class CpuExecutor:
    """A model on tinygrad's CPU device.

    `max_context` is how many tokens a sequence may have. Raises BadInput for what the program does
    not hold, and where weights and context do not fit the free memory.
    """

    name = "general"

    def __init__(self, gguf: GGUF, config: Config, max_context: int) -> None:
        self.config, self.context = config, max_context
        self._gguf = gguf
        self._check()
        self._held: dict[str, tuple[Buffer, int]] = {}
        self._tables: dict[Rope, int] = {}
        self._program = _program()
        self._cores = int(CPU_COUNT.value)
        self._x, self._logits = self._floats("x", config.dim * CHUNK), 0
        ops = self._operations()
        array = (_Op * len(ops))(*ops)
        self._run_buffer, address = _memory(ctypes.sizeof(_Run))
        self._state = _Run.from_address(address)
        self._state.ops = self._address("ops", ctypes.sizeof(array))
        ctypes.memmove(self._state.ops, array, ctypes.sizeof(array))
        widest = CHUNK * max(config.dim, *(self._widths(layer)[0] for layer in config.layers))
        self._state.rows_at = max(widest, max_context) + 64
        size = self._state.rows_at + _ROWS * max(op.cols for op in ops) + 64
        self._state.scratch = self._floats("scratch", size * self._cores)
        self._state.scratch_size, self._state.n_ops = size, len(ops)
        self._state.progress = self._address("progress", 8 * len(ops))

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.config.vocab_size

    def prefill(self, tokens: Sequence[int], start: int = 0) -> Floats:
        """Append tokens from position `start` on; return the logits after the last one.

        Raises BadInput where they do not fit the context.
        """
        check_room(tokens, start, self.context)
        for at in range(0, len(tokens), CHUNK):
            self._compute(tokens[at : at + CHUNK], start + at)
        logits: Floats = self._read(1)[0]
        return logits

    def rows(self, tokens: Sequence[int], start: int) -> Floats:
        """Append up to MOST_ROWS tokens; return the logits after each: (tokens, vocabulary)."""
        head = _Op.from_address(self._state.ops + ctypes.sizeof(_Op) * (self._state.n_ops - 1))
        head.last_only = 0
        self._compute(tokens, start)
        head.last_only = 1
        return self._read(len(tokens))

    def states(self, tokens: Sequence[int], start: int) -> Floats:
        """Append tokens; return what the last norm makes of each: (tokens, width)."""
        check_room(tokens, start, self.context)
        pieces, width = [], self.config.dim
        for at in range(0, len(tokens), CHUNK):
            n = len(tokens[at : at + CHUNK])
            self._compute(tokens[at : at + CHUNK], start + at)
            raw = (ctypes.c_float * (n * width)).from_address(self._x)
            pieces.append(np.array(raw, np.float32).reshape(n, width))
        norm = self._gguf.vector("output_norm.weight")
        return normed(np.concatenate(pieces), norm, self.config.norm_eps)

    def _compute(self, tokens: Sequence[int], start: int) -> None:
        self._state.n_tokens, self._state.start = len(tokens), start
        self._state.tokens[: len(tokens)] = tokens
        ctypes.memset(self._state.progress, 0, 8 * self._state.n_ops)
        self._program(
            self._run_buffer._buf, global_size=(self._cores, 1, 1), vals=(None,), wait=True
        )

    def _read(self, rows: int) -> Floats:
        n = self.config.vocab_size
        raw = (ctypes.c_float * (rows * n)).from_address(self._logits)
        logits: Floats = np.array(raw, np.float32).reshape(rows, n)
        logits *= np.float32(self.config.logit_scale)
        cap = self.config.logit_softcap
        if cap:
            np.tanh(logits / np.float32(cap), out=logits)
            logits *= np.float32(cap)
        return logits

    def decode(self, token: int, position: int) -> Floats:
        """Append one token at `position`; return the logits after it."""
        return self.prefill([token], position)

    def _check(self) -> None:
        for layer in self.config.layers:
            experts = layer.feed_forward.experts
            if layer.attention.head_dim > _MAX_HEAD or (experts and experts.used > _MAX_USED):
                raise BadInput(
                    f"{self._gguf.path}: heads of more than {_MAX_HEAD} dimensions and more than "
                    f"{_MAX_USED} experts a token do not run on a CPU"
                )
        weights = weight_bytes(self._gguf)
        per_token = sum(
            4 * layer.attention.kv_heads * layer.attention.head_dim for layer in self.config.layers
        )
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()
        if weights + per_token * self.context > free:
            fitting = max(0, (free - weights) // per_token)
            raise BadInput(
                f"{self._gguf.path}: {weights / 1e9:.1f} GB of weights and "
                f"{per_token * self.context / 1e9:.1f} GB of context do not fit the "
                f"{free / 1e9:.1f} GB of free memory; {fitting} tokens of context would"
            )

    def _address(self, name: str, n_bytes: int) -> int:
        if name not in self._held:
            self._held[name] = _memory(n_bytes)
        return self._held[name][1]

    def _floats(self, name: str, count: int) -> int:
        return self._address(name, 4 * count)

    def _vector(self, name: str) -> int:
        """Return the address of a vector, or 0 if the file has none of that name."""
        if name not in self._gguf.tensors:
            return 0
        if name not in self._held:
            values = np.ascontiguousarray(self._gguf.vector(name), np.float32)
            ctypes.memmove(self._address(name, values.nbytes), values.ctypes.data, values.nbytes)
        return self._held[name][1]

    def _matrix(self, name: str) -> int:
        """Return the address of a matrix, of which all rows lie as cpu/decoder.c wants them."""
        tensor = self._gguf.tensors[name]
        if name in self._held:
            return self._held[name][1]
        cols = tensor.shape[-1]
        rows, size = tensor.n_elements // cols, row_bytes(tensor)
        address = self._address(name, rows * size)
        raw = (ctypes.c_uint8 * (rows * size)).from_address(address)
        out = np.ctypeslib.as_array(raw).reshape(rows, size)
        packed = self._gguf.bytes(name).reshape(rows, -1)
        step = max(1, _PIECE // cols)
        for at in range(0, rows, step):
            piece = slice(at, at + step)
            if tensor.type in LAYOUTS:
                write_rows(packed[piece], tensor.type, out[piece])
            else:
                out[piece].view(np.float16)[:] = dequantize(packed[piece], tensor.type)
        return address

    def _part(self, name: str, out: int, stride: int | None = None) -> _Part:
        where = self.config.matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        rows, size = where.rows or tensor.shape[-2] - where.first_row, row_bytes(tensor)
        weights, bias = self._matrix(where.tensor), self._vector(f"{name}.bias")
        layout, width = LAYOUTS.get(tensor.type), rows if stride is None else stride
        part = _Part(weights + where.first_row * size, bias, out, rows, width, size)
        if layout is not None:
            part.group, part.minima = layout.group, layout.minima
        return part

    def _op(self, kind: int, source: int, cols: int, parts: Sequence[_Part], **more: Any) -> _Op:
        op = _Op(kind=kind, in_stride=cols, cols=cols, n_parts=len(parts), scale=1.0)
        setattr(op, "in", source)
        op.eps = self.config.norm_eps
        for index, part in enumerate(parts):
            op.parts[index] = part
        for name, value in more.items():
            setattr(op, name, value)
        return op

    @staticmethod
    def _widths(layer: Layer) -> tuple[int, int, int]:
        """Return the widths of queries, keys and the hidden rows (of all slots) of a token."""
        attention, experts = layer.attention, layer.feed_forward.experts
        hidden = experts.hidden * experts.used if experts else layer.feed_forward.hidden
        return attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim, hidden

    def _operations(self) -> list[_Op]:
        config, dim = self.config, self.config.dim
        embedding = self._part("token_embd", self._x, dim)
        ops = [self._op(_EMBED, 0, dim, [embedding], scale=config.embedding_scale)]
        widths = [self._widths(layer) for layer in config.layers]
        for name, index in (("q", 0), ("k", 1), ("v", 1), ("mixed", 0), ("hidden", 2)):
            self._floats(name, CHUNK * max(width[index] for width in widths))
        self._floats("part", CHUNK * dim)
        for index, layer in enumerate(config.layers):
            ops += self._attention(index, layer)
            ops += self._feed_forward(index, layer)
        self._logits = self._floats("logits", MOST_ROWS * config.vocab_size)
        head = "output" if "output.weight" in self._gguf.tensors else "token_embd"
        norm = self._vector("output_norm.weight")
        part = self._part(head, self._logits)
        return [*ops, self._op(_MATMUL, self._x, dim, [part], norm=norm, last_only=1)]

    def _attention(self, index: int, layer: Layer) -> list[_Op]:
        attention, prefix, dim = layer.attention, f"blk.{index}.", self.config.dim
        q_width, kv_width, _ = self._widths(layer)
        q, k, v, mixed = (self._held[name][1] for name in ("q", "k", "v", "mixed"))
        parts = [self._part(f"{prefix}attn_{n}", out) for n, out in (("q", q), ("k", k), ("v", v))]
        norm = self._vector(f"{prefix}attn_norm.weight")
        cache = 2 * kv_width * self.context
        heads: dict[str, Any] = {
            **self._heads(attention),
            "keys": self._address(f"{prefix}keys", cache),
            "values": self._address(f"{prefix}values", cache),
        }
        k_norm, q_norm = (self._vector(f"{prefix}attn_{n}_norm.weight") for n in "kq")
        sinks = self._vector(f"{prefix}attn_sinks.weight")
        return [
            self._op(_MATMUL, self._x, dim, parts, norm=norm),
            self._op(_KEYS, k, kv_width, [], second=v, norm=k_norm, **heads),
            self._op(
                *(_ATTEND, q, q_width, [_Part(0, 0, mixed, q_width, q_width)]),
                **{**heads, "norm": q_norm, "sinks": sinks, "scale": attention.scale},
            ),
            *self._added(layer, f"{prefix}attn_output", mixed, f"{prefix}post_attention_norm"),
        ]

    def _heads(self, attention: Attention) -> dict[str, int]:
        rope = attention.rope
        return {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "length": self.context,
            "window": attention.window,
            "pairs": len(rope.frequencies) if rope else 0,
            "interleaved": int(rope.interleaved) if rope else 0,
            "table": self._table(rope) if rope else 0,
        }

    def _table(self, rope: Rope) -> int:
        """Return the address of cos and sin of every position."""
        if rope not in self._tables:
            angles = np.arange(self.context)[:, None] * np.asarray(rope.frequencies)
            table = np.stack((np.cos(angles), np.sin(angles)), axis=1) * rope.magnitude
            values = np.ascontiguousarray(table, np.float32)
            address = self._address(f"table {len(self._tables)}", values.nbytes)
            ctypes.memmove(address, values.ctypes.data, values.nbytes)
            self._tables[rope] = address
        return self._tables[rope]

    def _added(self, layer: Layer, name: str, source: int, norm: str) -> list[_Op]:
        """Multiply by a matrix and add to the residual, normed before that where layers do so."""
        dim, scale = self.config.dim, self.config.residual_scale
        cols = self._gguf.tensors[self.config.matrix(name).tensor].shape[-1]
        if not layer.post_norms:
            part = self._part(name, self._x, dim)
            return [self._op(_MATMUL, source, cols, [part], epilogue=_ADD, scale=scale)]
        between, out = self._held["part"][1], _Part(0, 0, self._x, dim, dim)
        vector = self._vector(f"{norm}.weight")
        return [
            self._op(_MATMUL, source, cols, [self._part(name, between, dim)]),
            self._op(_NORM_ADD, between, dim, [out], norm=vector, scale=scale),
        ]

    def _feed_forward(self, index: int, layer: Layer) -> list[_Op]:
        prefix, dim, hidden = f"blk.{index}.", self.config.dim, self._held["hidden"][1]
        norm = self._vector(f"{prefix}{self.config.ffn_norm}.weight")
        epilogue = _EPILOGUES[layer.feed_forward.activation]
        if layer.feed_forward.experts is not None:
            return self._mixture(prefix, layer, norm)
        parts = [self._part(f"{prefix}ffn_{name}", hidden) for name in ("gate", "up")]
        return [
            self._op(_MATMUL, self._x, dim, parts, norm=norm, epilogue=epilogue),
            *self._added(layer, f"{prefix}ffn_down", hidden, f"{prefix}post_ffw_norm"),
        ]

    def _mixture(self, prefix: str, layer: Layer, norm: int) -> list[_Op]:
        experts, dim, hidden = layer.feed_forward.experts, self.config.dim, self._held["hidden"][1]
        if experts is None or layer.post_norms:
            raise BadInput(f"{self._gguf.path}: experts with norms behind them do not run on a CPU")
        router = self._floats("router", CHUNK * experts.count)
        routing: dict[str, Any] = {
            "router": router,
            "experts": experts.count,
            "used": experts.used,
            "gating": _GATINGS[experts.gating],
            "normalized": int(experts.normalized),
        }
        high, low = self._router(f"{prefix}ffn_gate_inp", router)
        parts = [self._part(f"{prefix}ffn_{name}_exps", hidden) for name in ("gate", "up")]
        down = self._part(f"{prefix}ffn_down_exps", self._x, dim)
        epilogue = _EPILOGUES[layer.feed_forward.activation]
        return [
            self._op(_MATMUL, self._x, dim, [high], norm=norm),
            self._op(_MATMUL, self._x, dim, [low], norm=norm, epilogue=_ADD),
            self._op(_EXPERTS_GATED, self._x, dim, parts, norm=norm, epilogue=epilogue, **routing),
            self._op(
                *(_EXPERTS_DOWN, hidden, experts.hidden, [down]),
                epilogue=_ADD,
                scale=experts.scale * self.config.residual_scale,
                **routing,
            ),
        ]

    def _router(self, name: str, out: int) -> tuple[_Part, _Part]:
        """Return the router as the sum of two matrices of 16-bit floats.

        A rounded router could choose other experts.
        """
        tensor = self._gguf.tensors[f"{name}.weight"]
        values = dequantize(self._gguf.bytes(tensor.name).reshape(tensor.shape[0], -1), tensor.type)
        high = values.astype(np.float16)
        parts = []
        for kind, part in (("high", high), ("low", (values - high).astype(np.float16))):
            address = self._address(f"{name} {kind}", part.nbytes)
            ctypes.memmove(address, np.ascontiguousarray(part).ctypes.data, part.nbytes)
            parts.append(_Part(address, 0, out, len(part), len(part), part.strides[0]))
        parts[0].bias = self._vector(f"{name}.bias")
        return parts[0], parts[1]


def _reclaimable() -> int:
    """Return the bytes of cached files that the system would give up; 0 if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    sizes = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":") for x in lines)}
    return max(0, sizes.get("MemAvailable", 0) - sizes.get("MemFree", 0))
