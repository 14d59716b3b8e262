"""A model as the list of operations that cpu/decoder.c runs: its layers, lowered for a CPU."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from orinllm.cpu.recurrent import RecurrentStruct, make_recurrent_struct
from orinllm.cpu.weight_layout import PACKED, is_read_in_place, row_bytes
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.network.config import LAYERS, Config
from orinllm.network.layer import (
    Activate,
    Activation,
    AddDeepstackRows,
    AddMergedNorms,
    Attend,
    Attention,
    Gating,
    Layer,
    Linear,
    MixExperts,
    Norm,
    QueryTemperature,
    Recurrence,
    Rope,
    ScaleResidual,
    SelectiveScan,
    Step,
    X,
    n_state_floats,
)

#: Tokens that go through at once, of a prompt or of several sequences, and those that may: rows of
#: a picture that see each other (MAX_CHUNK of cpu/decoder.c).
CHUNK, MOST_CHUNK = 32, 512
#: Tokens at most whose logits are all wanted: sequences of a step, and guesses of one.
MOST_ROWS = 8
# Weights that are dequantized at once.
_PIECE = 8 << 20

_EMBED, _MATMUL, _KEYS, _ATTEND, _NORM_ADD, _EXPERTS_GATED, _EXPERTS_DOWN = range(7)
_RECURRENT, _NORM_GROUPS, _ACTIVATE, _SCALE, _LAYERS, _DEEPSTACK, _MERGE = range(7, 14)
ENCODE = 14
_STORE, _ADD = 0, 1
_EPILOGUES = {
    Activation.RELU_SQUARED: 2,
    Activation.SILU: 3,
    Activation.GELU: 4,
    Activation.GPT_OSS: 5,
}
_HALVES = 0  # the type of Part's weights that are no packed ones
_GATINGS = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_OF_CHOSEN: 2}

_Widths = dict[str, int]
_I64, _POINTER = ctypes.c_int64, ctypes.c_uint64


class MatrixPartStruct(ctypes.Structure):
    """`MatrixPartStruct` of cpu/decoder.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("weights", "bias", "out")),
        *((name, _I64) for name in ("rows", "stride", "row_bytes", "type", "stacked")),
    )


class OpStruct(ctypes.Structure):
    """`OpStruct` of cpu/decoder.c."""

    _fields_ = (
        ("kind", _I64),
        *((name, _POINTER) for name in ("in", "norm")),
        *((name, _I64) for name in ("in_stride", "cols", "n_parts", "epilogue", "wanted_only")),
        ("parts", MatrixPartStruct * 3),
        *((name, ctypes.c_double) for name in ("scale", "eps", "softcap")),
        *((name, _POINTER) for name in ("second", "table", "sinks", "keys", "values")),
        *((name, _I64) for name in ("heads", "kv_heads", "head_dim", "length", "window")),
        *((name, _I64) for name in ("pairs", "interleaved")),
        ("factors", _POINTER),
        ("every", _I64),
        ("router", _POINTER),
        *((name, _I64) for name in ("experts", "used", "gating", "normalized")),
        ("choice", _POINTER),
        *((name, _I64) for name in ("head_stride", "gated", "v_norm")),
        ("by", _POINTER),
        ("by_stride", _I64),
        *((name, _POINTER) for name in ("recurrent", "axes", "scales", "stage")),
    )


class RunStruct(ctypes.Structure):
    """`RunStruct` of cpu/decoder.c."""

    _fields_ = (
        *((name, _I64) for name in ("n_tokens", "n_wanted", "n_ops", "kept")),
        *((name, _POINTER) for name in ("ops", "progress", "scratch")),
        ("scratch_size", _I64),
        *(
            (name, _I64 * MOST_CHUNK)
            for name in ("tokens", "positions", "slots", "wanted", "ahead")
        ),
        ("turns", _I64 * MOST_CHUNK * 3),
    )


def zeroed_mapping_with_address(n_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping of zeros, and its address; the system gives pages as they are written."""
    mapped = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


class LoweredModel:
    """The operations of a model over `most` tokens at most, and the memory that they work on.

    `slots` sequences have room for the keys and values of `context` tokens each.
    `x` and `logits` are addresses of floats: what the last layer leaves, one row a token, and the
    logits of MOST_ROWS tokens at most. Behind so many operations as `ends` says `x` is what each
    layer is given.
    """

    def __init__(self, gguf: GGUF, config: Config, context: int, slots: int, most: int) -> None:
        self.config, self.context, self._gguf = config, context, gguf
        self._held: dict[str, tuple[mmap.mmap, int]] = {}
        self._tables: dict[Rope, int] = {}
        self._slots, self._most, self._states_used = slots, most, 0
        self.x = self.working_floats_address(X, most * config.dim)
        self.logits = self.working_floats_address("logits", MOST_ROWS * config.vocab_size)
        # Of each slot: all recurrent states, one after the other.
        n_floats = config.n_state_floats
        self.states = self.working_floats_address("states", slots * n_floats)
        # As those of a slot, behind each of a run's tokens that may be guessed wrong.
        self.behind = self.working_floats_address("states behind", (MOST_ROWS - 1) * n_floats)
        self.operations = [self._lower_embedding(), *self._lower_mtp_input()]
        self.operations += self._lower_layer_embeddings()
        self.ends = [len(self.operations)]
        for index, layer in enumerate(config.layers, config.first):
            self.operations += self._lower_layer(index, layer)
            self.ends.append(len(self.operations))
        self.operations.append(self._lower_output_head())

    def named_memory_address(self, name: str, n_bytes: int) -> int:
        """Return the address of memory of a name, which is made at the first call."""
        if name not in self._held:
            self._held[name] = zeroed_mapping_with_address(n_bytes)
        return self._held[name][1]

    def working_floats_address(self, name: str, count: int) -> int:
        """Return the address of so many floats of a name."""
        return self.named_memory_address(name, 4 * count)

    def value_address(self, name: str) -> int:
        """Return the address of a value of the layers, as wide as it is in the widest of them."""
        widths = self.config.value_widths
        return self.x if name == X else self.working_floats_address(name, self._most * widths[name])

    def _lower_embedding(self) -> OpStruct:
        dim, scale = self.config.dim, self.config.embedding_scale
        part = self._matrix_part("token_embd", self.x, dim)
        return self._make_op(_EMBED, 0, dim, [part], scale=scale)

    def _lower_mtp_input(self) -> list[OpStruct]:
        """Return what makes X of `mtp_input_address`, where embeddings alone do not."""
        if (name := self.config.joined) is None:
            return []
        dim = self.config.dim
        part = self._matrix_part(name, self.x, dim)
        return [self._make_op(_MATMUL, self.mtp_input_address, 2 * dim, [part])]

    @property
    def mtp_input_address(self) -> int:
        """The address of a token's normed embedding and the normed state before it, as floats."""
        return self.working_floats_address("joined", self._most * 2 * self.config.dim)

    def _lower_layer_embeddings(self) -> list[OpStruct]:
        """Return what makes the embeddings of each layer; their table's rows come with a run."""
        config, each = self.config, self.config.layer_embedding
        if not each:
            return []
        wide, scale = each * len(config.layers), config.dim**-0.5
        out = self.value_address(LAYERS)
        product = self._matrix_part("per_layer_model_proj", out, wide)
        norm = self._vector_address("per_layer_proj_norm.weight")
        both = self._make_op(
            *(_LAYERS, out, each, [MatrixPartStruct(0, 0, out, wide, wide)]),
            norm=norm,
            second=self.layer_embeddings_address,
            scale=each**0.5,
        )
        # The matrix' products are times `scale` before their norm.
        both.eps = config.norm_eps / scale**2
        return [self._make_op(_MATMUL, self.x, config.dim, [product]), both]

    @property
    def layer_embeddings_address(self) -> int:
        """The address of a run's rows of the table of embeddings by layer, as floats."""
        wide = self.config.layer_embedding * len(self.config.layers)
        return self.working_floats_address("rows of per_layer_token_embd", self._most * wide)

    def _lower_output_head(self) -> OpStruct:
        own = self.config.rows_of_matrix("output").tensor in self._gguf.tensors
        head = "output" if own else "token_embd"
        norm = self._vector_address(f"{self.config.final_norm}.weight")
        part = self._matrix_part(head, self.logits)
        return self._make_op(_MATMUL, self.x, self.config.dim, [part], norm=norm, wanted_only=1)

    def _lower_layer(self, index: int, layer: Layer) -> list[OpStruct]:
        """Return the operations of a layer, step by step."""
        prefix, found = f"blk.{index}.", list[OpStruct]()
        widths = layer.value_widths(self.config.dim)
        for step in layer.steps:
            match step.operation:
                case Linear():
                    found += self._lower_linear(prefix, step, step.operation, widths)
                case Attend():
                    found += self._lower_attention(prefix, step, step.operation.attention, widths)
                case MixExperts():
                    found += self._lower_mixture(prefix, step, step.operation)
                case Activate():
                    found.append(self._lower_activation(step.operation, widths))
                case ScaleResidual():
                    to = MatrixPartStruct(0, 0, self.x, self.config.dim, self.config.dim)
                    name = f"{prefix}{step.operation.weight}.weight"
                    by = float(self._gguf.f32_or_f16_tensor(name)[0])
                    found.append(self._make_op(_SCALE, self.x, self.config.dim, [to], scale=by))
                case AddMergedNorms():
                    found.append(self._lower_add_merged_norms(prefix, step.operation))
                case AddDeepstackRows(number):
                    to = MatrixPartStruct(0, 0, self.x, self.config.dim, self.config.dim)
                    beside = self.deepstack_rows_address(number)
                    found.append(self._make_op(_DEEPSTACK, beside, self.config.dim, [to]))
                case _:
                    found += self._lower_recurrence(prefix, step.operation, widths)
        return found

    def deepstack_rows_address(self, part: int) -> int:
        """Return the address of what rows of pictures have beside their embeddings, as floats."""
        return self.working_floats_address(f"beside {part}", self._most * self.config.dim)

    def _lower_activation(self, activate: Activate, widths: _Widths) -> OpStruct:
        width, out = widths[activate.out], self.value_address(activate.out)
        more: dict[str, Any] = {"epilogue": _EPILOGUES[activate.activation]}
        if activate.by is not None:
            more["second"] = self.value_address(activate.by) + 4 * activate.first
            more["by_stride"] = self.config.value_widths[activate.by]
        to = MatrixPartStruct(0, 0, out, width, width)
        return self._make_op(_ACTIVATE, self.value_address(activate.of), width, [to], **more)

    def _lower_recurrence(
        self, prefix: str, operation: Recurrence, widths: _Widths
    ) -> list[OpStruct]:
        """Return a recurrence, whose state is behind those of the ones before."""
        lowered = make_recurrent_struct(operation, prefix, self, widths)
        lowered.state = self.states + 4 * self._states_used
        lowered.behind = self.behind + 4 * self._states_used
        lowered.slot_stride, lowered.eps = self.config.n_state_floats, self.config.norm_eps
        self._states_used += n_state_floats(operation)
        size = ctypes.sizeof(RecurrentStruct)
        address = self.named_memory_address(f"{prefix}{operation.out}", size)
        ctypes.memmove(address, ctypes.addressof(lowered), size)
        kinds = [_RECURRENT] + [_NORM_GROUPS] * isinstance(operation, SelectiveScan)
        return [self._make_op(kind, 0, 0, [], recurrent=address) for kind in kinds]

    def _norm_address(self, prefix: str, norm: Norm | None) -> int:
        return self._vector_address(f"{prefix}{norm.weight}.weight") if norm else 0

    def _lower_linear(
        self, prefix: str, step: Step, linear: Linear, widths: _Widths
    ) -> list[OpStruct]:
        cols, width = widths[step.source], widths[linear.out]
        out = self.value_address(linear.out if step.post else step.out_name)
        parts, row = [], 0
        for name, rows in linear.matrices:
            gated = step.gate is not None
            parts.append(self._matrix_part(prefix + name, out + 4 * row, rows if gated else width))
            row += 0 if gated else rows
        more: dict[str, Any] = {"norm": self._norm_address(prefix, step.norm)}
        if step.gate is not None:
            more["epilogue"] = _EPILOGUES[step.gate.activation]
        elif step.add is not None and step.post is None:
            more |= {"epilogue": _ADD, "scale": step.add.scale}
            if step.add.by is not None:
                more |= {"by": self.value_address(step.add.by), "by_stride": widths[step.add.by]}
        found = [self._make_op(_MATMUL, self.value_address(step.source), cols, parts, **more)]
        if step.add is not None and step.post is not None:
            to = MatrixPartStruct(0, 0, self.x, width, width)
            vector = self._norm_address(prefix, step.post)
            scale = step.add.scale
            found.append(self._make_op(_NORM_ADD, out, width, [to], norm=vector, scale=scale))
        return found

    def _lower_attention(
        self, prefix: str, step: Step, attention: Attention, widths: _Widths
    ) -> list[OpStruct]:
        q_width, kv_width, qkv = attention.q_width, attention.kv_width, widths[step.source]
        q = self.value_address(step.source)
        k = q + 4 * attention.q_and_gate_width
        v = k + 4 * kv_width
        of = prefix if attention.reads is None else f"blk.{attention.reads}."
        cache = 2 * kv_width * self.context * self._slots
        heads: dict[str, Any] = {
            **self._attention_fields(attention),
            "keys": self.named_memory_address(f"{of}keys", cache),
            "values": self.named_memory_address(f"{of}values", cache),
            "in_stride": qkv,
        }
        k_norm, q_norm = (self._vector_address(f"{prefix}attn_{n}_norm.weight") for n in "kq")
        more: dict[str, Any] = {
            "norm": q_norm,
            "sinks": self._vector_address(f"{prefix}attn_sinks.weight"),
            "scale": attention.scale,
            "softcap": attention.softcap,
            "head_stride": attention.q_and_gate_width // attention.heads,
            "gated": attention.gated,
        }
        if attention.temperature is not None:
            more["factors"] = self._temperature_factors_address(attention.temperature)
            more["every"] = attention.temperature.length
        mixed = MatrixPartStruct(0, 0, self.value_address(step.out_name), q_width, q_width)
        attend = self._make_op(_ATTEND, q, q_width, [mixed], **heads, **more)
        if attention.reads is not None:
            return [attend]
        heads["v_norm"] = attention.v_norm
        return [self._make_op(_KEYS, k, kv_width, [], second=v, norm=k_norm, **heads), attend]

    def _temperature_factors_address(self, temperature: QueryTemperature) -> int:
        """Return the address of what scores are times, by how often its length has passed."""
        passed = np.arange(self.context // temperature.length + 1)
        factors = 1 + temperature.scale * np.log(1 + passed)
        return self.store_floats(f"factors of {temperature}", factors)

    def _lower_mixture(self, prefix: str, step: Step, mix: MixExperts) -> list[OpStruct]:
        experts, dim, x = mix.experts, self.config.dim, self.value_address(step.source)
        if step.post is not None:
            raise BadInput(f"{self._gguf.path}: experts with norms behind them do not run on a CPU")
        norm = self._norm_address(prefix, step.norm)
        hidden = self.working_floats_address(
            f"experts of {experts.hidden}", self._most * experts.hidden * experts.used
        )
        router = self.working_floats_address("router", self._most * self._largest_expert_count)
        routing: dict[str, Any] = {
            "router": router,
            "experts": experts.count,
            "used": experts.used,
            "gating": _GATINGS[experts.gating],
            "normalized": int(experts.normalized),
            "choice": self._vector_address(f"{prefix}exp_probs_b.bias"),
            "scales": self._vector_address(f"{prefix}ffn_down_exps.scale") if experts.scaled else 0,
        }
        own = norm
        if experts.reads_x:
            x_scale = self._gguf.f32_or_f16_tensor(f"{prefix}ffn_gate_inp.scale")
            x_scale *= np.float32(dim**-0.5)
            own = self.store_floats(f"{prefix}norm of the router", x_scale)
        high, low = self._high_low_router(f"{prefix}ffn_gate_inp", router)
        names = ("gate", "up") if experts.gated else ("up",)
        parts = [self._matrix_part(f"{prefix}ffn_{name}_exps", hidden) for name in names]
        down = self._matrix_part(f"{prefix}ffn_down_exps", self.value_address(step.out_name), dim)
        epilogue, scale = _EPILOGUES[mix.activation], experts.scale
        if step.add is not None:
            scale *= step.add.scale
        return [
            self._make_op(_MATMUL, x, dim, [high], norm=own),
            self._make_op(_MATMUL, x, dim, [low], norm=own, epilogue=_ADD),
            self._make_op(_EXPERTS_GATED, x, dim, parts, norm=norm, epilogue=epilogue, **routing),
            self._make_op(
                *(_EXPERTS_DOWN, hidden, experts.hidden, [down]),
                epilogue=_ADD if step.add else _STORE,
                scale=scale,
                **routing,
            ),
        ]

    def _lower_add_merged_norms(self, prefix: str, merge: AddMergedNorms) -> OpStruct:
        dim, (first, second) = self.config.dim, map(self.value_address, merge.values)
        names = (*merge.norms, merge.norm)
        norms = [self._vector_address(f"{prefix}{name}.weight") for name in names]
        to = MatrixPartStruct(0, norms[2], self.x, dim, dim)
        more = {"norm": norms[0], "second": second, "by": norms[1]}
        return self._make_op(_MERGE, first, dim, [to], **more)

    @property
    def _largest_expert_count(self) -> int:
        mixes = (layer.experts_operation for layer in self.config.layers)
        return max(mix.experts.count for mix in mixes if mix is not None)

    def store_floats(self, name: str, values: np.ndarray) -> int:
        """Return the address of numbers of a name, as floats."""
        return self._store_array(name, np.asarray(values, np.float32))

    def _store_array(self, name: str, values: np.ndarray) -> int:
        """Return the address of a copy of an array, as memory of a name."""
        values = np.ascontiguousarray(values)
        address = self.named_memory_address(name, values.nbytes)
        ctypes.memmove(address, values.ctypes.data, values.nbytes)
        return address

    def find_tensor_floats(self, name: str) -> np.ndarray | None:
        """Return a small tensor of the file, in its shape; None: the file has none."""
        if name not in self._gguf.tensors:
            return None
        return self._gguf.f32_or_f16_tensor(name).reshape(self._gguf.tensors[name].shape)

    def _vector_address(self, name: str) -> int:
        """Return the address of a vector, or 0 if the file has none of that name."""
        if name not in self._gguf.tensors:
            return 0
        if name not in self._held:
            self.store_floats(name, self._gguf.f32_or_f16_tensor(name))
        return self._held[name][1]

    def _matrix_address(self, name: str) -> int:
        """Return the address of a matrix: where the file is mapped, or of 16-bit floats."""
        tensor = self._gguf.tensors[name]
        if is_read_in_place(tensor):
            return int(self._gguf.tensor_bytes(name).ctypes.data)
        if name in self._held:
            return self._held[name][1]
        from gguf.quants import dequantize  # whose import takes longer than the rest of a start

        cols = tensor.shape[-1]
        rows = tensor.n_elements // cols
        address = self.named_memory_address(name, 2 * tensor.n_elements)
        raw = (ctypes.c_uint16 * tensor.n_elements).from_address(address)
        out = np.ctypeslib.as_array(raw).view(np.float16).reshape(rows, cols)
        packed = self._gguf.tensor_bytes(name).reshape(rows, -1)
        step = max(1, _PIECE // cols)
        for at in range(0, rows, step):
            out[at : at + step] = dequantize(packed[at : at + step], tensor.type)
        return address

    def _matrix_part(self, name: str, out: int, stride: int | None = None) -> MatrixPartStruct:
        where = self.config.rows_of_matrix(name)
        tensor = self._gguf.tensors[where.tensor]
        rows = where.rows or (tensor.shape[-2] if len(tensor.shape) > 1 else 1) - where.first_row
        size = row_bytes(tensor)
        weights, bias = self._matrix_address(where.tensor), self._vector_address(f"{name}.bias")
        type_ = int(tensor.type) if tensor.type in PACKED else _HALVES
        width = rows if stride is None else stride
        own = weights + where.first_row * size
        return MatrixPartStruct(own, bias, out, rows, width, size, type_, tensor.shape[-2:][0])

    def _make_op(
        self, kind: int, source: int, cols: int, parts: Sequence[MatrixPartStruct], **more: Any
    ) -> OpStruct:
        op = OpStruct(kind=kind, in_stride=cols, cols=cols, n_parts=len(parts), scale=1.0)
        setattr(op, "in", source)
        op.eps = self.config.norm_eps
        for index, part in enumerate(parts):
            op.parts[index] = part
        for name, value in more.items():
            setattr(op, name, value)
        return op

    def _attention_fields(self, attention: Attention) -> dict[str, int]:
        rope = attention.rope
        return {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "length": self.context,
            "window": attention.window,
            "pairs": len(rope.frequencies) if rope else 0,
            "interleaved": int(rope.interleaved) if rope else 0,
            "table": self._rotary_table_address(rope) if rope else 0,
            # Which part of a position each pair turns by.
            "axes": self._store_array(f"axes {rope.axes}", np.array(rope.axes, np.int64))
            if rope and rope.axes
            else 0,
        }

    def _rotary_table_address(self, rope: Rope) -> int:
        """Return the address of cos and sin of every position."""
        if rope not in self._tables:
            angles = np.arange(self.context)[:, None] * np.asarray(rope.frequencies)
            table = np.stack((np.cos(angles), np.sin(angles)), axis=1) * rope.magnitude
            self._tables[rope] = self.store_floats(f"table {len(self._tables)}", table)
        return self._tables[rope]

    def _high_low_router(self, name: str, out: int) -> tuple[MatrixPartStruct, MatrixPartStruct]:
        """Return the router as the sum of two matrices of 16-bit floats.

        A rounded router could choose other experts.
        """
        from gguf.quants import dequantize

        tensor = self._gguf.tensors[f"{name}.weight"]
        values = dequantize(
            self._gguf.tensor_bytes(tensor.name).reshape(tensor.shape[0], -1), tensor.type
        )
        high = values.astype(np.float16)
        parts = []
        for kind, part in (("high", high), ("low", (values - high).astype(np.float16))):
            address = self._store_array(f"{name} {kind}", part)
            parts.append(MatrixPartStruct(address, 0, out, len(part), len(part), part.strides[0]))
        parts[0].bias = self._vector_address(f"{name}.bias")
        return parts[0], parts[1]
