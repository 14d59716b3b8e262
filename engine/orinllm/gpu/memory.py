"""Buffers that all lists of a model's launches share: weights, keys and values, rotation tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tinygrad import dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType

from orinllm.gpu.kernels.buffers import (
    F16,
    PAGE,
    AttentionDims,
    KvCacheType,
    LayerKvCache,
    round_up,
)
from orinllm.gpu.kernels.rows import NormWeights
from orinllm.gpu.weights import Weights, floats_on_device
from orinllm.network import layer as network
from orinllm.network.config import Config
from orinllm.network.layer import Recurrence, Rope, n_state_floats

# The elements that 32 bits address.
_MOST_ELEMENTS = 1 << 32
#: Of what the GPU alone reads and writes: an Orin's L2 may keep lines of it (docs/tegra-iface.md).
GPU_ONLY = BufferSpec(gpu_only=True)
# Floats that an operation's states begin at a multiple of: what a warp reads at once.
_STATE_STEP = 32


@dataclass(frozen=True)
class LastHiddenStates:
    """Rows for a block, which a model's last layer leaves of each page's tokens; its last norm."""

    rows: Buffer
    norm: Buffer


@dataclass(frozen=True)
class ModelMemory:
    """Buffers of a model on a device. `context` is in tokens, whole pages, of one sequence.

    All sequences have their keys and values in one pool of `pages` pages, in each layer's cache.
    """

    device: str
    config: Config
    weights: Weights
    context: int
    pages: int
    caches: tuple[Buffer, ...]  # one a layer that has attention
    rotations: dict[Rope | None, Buffer]
    kv: KvCacheType = F16
    scales: tuple[Buffer, ...] = ()  # of the caches, where the type has them
    axes: Buffer | None = None  # which part of a position in three parts each pair turns by
    # Recurrent states: those of sequences, by slot, then copies for later prompts (checkpoints).
    states: Buffer | None = None
    slots: int = 0
    left: LastHiddenStates | None = None  # a block reads it, its model writes it

    def allocate(self, size: int, dtype: DType = dtypes.float32) -> Buffer:
        """Return an uninitialised buffer of `size` elements."""
        return Buffer(self.device, size, dtype).allocate()

    def norm_weights(self, layer: int, norm: network.Norm | None) -> NormWeights:
        """Return the weights of a layer's norm."""
        assert norm is not None
        vector = self.weights.vector(f"{self.config.tensor_prefix(layer)}{norm.weight}.weight")
        return NormWeights(vector, self.config.norm_eps)

    def allocate_scratch(self, size: int, dtype: DType = dtypes.float32) -> Buffer:
        """Return an uninitialised buffer of `size` elements that the host never touches."""
        return Buffer(self.device, size, dtype, options=GPU_ONLY).allocate()

    def zeroed_ints(self, size: int) -> Buffer:
        """Return a buffer of `size` ints, all 0."""
        buffer = self.allocate(size, dtypes.int32)
        return buffer.copyin(memoryview(bytearray(buffer.nbytes)))

    def allocate_last_hidden_states(self) -> LastHiddenStates:
        """Return room for what a block wants of every token that the pages hold."""
        rows = self.allocate_scratch(self.pages * PAGE * self.config.dim)
        return LastHiddenStates(rows, self.weights.vector(f"{self.config.final_norm}.weight"))

    def page_table_row(self, pages: Sequence[int]) -> list[int]:
        """Return a sequence's row of a table of pages; raises ValueError for pages not there."""
        width = self.context // PAGE
        if len(pages) > width:
            raise ValueError(f"{len(pages)} pages; a sequence of {self.context} tokens has {width}")
        if pages and not 0 <= min(pages) <= max(pages) < self.pages:
            raise ValueError(f"pages {min(pages)} to {max(pages)} of a pool of {self.pages}")
        return [*pages, *[0] * (width - len(pages))]

    def state_buffer(self, layer: int, operation: Recurrence) -> Buffer:
        """Return the states of a layer's operation, of the first slot and what follows it."""
        assert self.states is not None
        first = _state_offsets(self.config)[layer, operation]
        view = self.states.view(self.states.size - first, dtypes.float32, 4 * first)
        return view.ensure_allocated()

    def attention_dims(self, layer: int, sequences: int) -> AttentionDims:
        """Return the heads of a layer that has attention."""
        attention = self.config.attention_by_layer[layer]
        return AttentionDims(attention, self.context, sequences, self.kv)

    def layer_cache(self, layer: int, sequences: int, table: Buffer) -> LayerKvCache:
        """Return a layer's keys and values as a list of launches sees them."""
        index = list(self.config.attention_by_layer).index(layer)
        scales = self.scales[index] if self.scales else None
        dims = self.attention_dims(layer, sequences)
        return LayerKvCache(dims, self.caches[index], scales, table)


def pages_that_fit(config: Config, n_bytes: int, kv: KvCacheType = F16) -> int:
    """Return how many pages of keys and values a pool of so many bytes has; none below one page.

    Kernels address a layer's cache by 32 bits (cache.cuh), so that more bytes may be of no use.
    """
    page_bytes = kv.bytes_for_elements(sum(_page_elements_by_layer(config)))
    return min(n_bytes // page_bytes, addressable_pages(config))


def addressable_pages(config: Config) -> int:
    """Return the pages that kernels can address in each layer's cache."""
    return _MOST_ELEMENTS // max(_page_elements_by_layer(config))


def _page_elements_by_layer(config: Config) -> list[int]:
    """Return the elements of a page in each layer's cache."""
    return [a.kv_elements_per_token * PAGE for a in config.attention_by_layer.values()]


def _state_offsets(config: Config) -> dict[tuple[int, Recurrence], int]:
    """Return where the states of each operation begin, in floats from a slot's first."""
    found, at = dict[tuple[int, Recurrence], int](), 0
    for index, layer in enumerate(config.layers):
        for operation in layer.operations:
            if isinstance(operation, Recurrence):
                found[index, operation] = at
                at += round_up(n_state_floats(operation), _STATE_STEP)
    return found


def state_floats_per_slot(config: Config) -> int:
    """Return the floats of a sequence's recurrent states on a device; 0: it has none."""
    places = _state_offsets(config)
    if not places:
        return 0
    (_, operation), at = max(places.items(), key=lambda pair: pair[1])
    return at + round_up(n_state_floats(operation), _STATE_STEP)


def make_memory(
    config: Config,
    weights: Weights,
    device: str,
    context: int,
    pages: int,
    kv: KvCacheType = F16,
    slots: tuple[int, int] = (1, 0),
) -> ModelMemory:
    """Allocate a model's shared buffers, `pages` pages of keys and values for all sequences.

    slots: sequences that have recurrent states, and copies of them for later prompts.

    Raises ValueError for fewer than one page, and for more than the kernels can address.
    """
    elements = _page_elements_by_layer(config)
    if not 1 <= pages <= (most := addressable_pages(config)):
        raise ValueError(f"a pool of {pages} pages; 1 to {most} are possible")
    caches = _buffers_by_layer(config, device, kv.dtype, [pages * size for size in elements])
    groups = [pages * size // kv.group for size in elements] if kv.group else []
    scales = _buffers_by_layer(config, device, dtypes.uint16, groups) if groups else ()
    ropes = dict.fromkeys(attention.rope for attention in config.attention_by_layer.values())
    rotations = {rope: _rotary_table(device, rope, context) for rope in ropes}
    axes = next((ints_on_device(device, rope.axes) for rope in ropes if rope and rope.axes), None)
    states, size = None, state_floats_per_slot(config) * sum(slots)
    if size:
        states = Buffer(device, size, dtypes.float32, options=GPU_ONLY).allocate()
    shared = (device, config, weights, context, pages, caches, rotations, kv, scales, axes)
    return ModelMemory(*shared, states, slots[0])


def _buffers_by_layer(
    config: Config, device: str, dtype: DType, sizes: list[int]
) -> tuple[Buffer, ...]:
    """Return a buffer of each layer that has attention; one that reads another's has that one's."""
    found = dict[int, Buffer]()
    for (layer, attention), size in zip(config.attention_by_layer.items(), sizes, strict=True):
        found[layer] = (
            Buffer(device, size, dtype, options=GPU_ONLY).allocate()
            if attention.reads is None
            else found[attention.reads]
        )
    return tuple(found.values())


def ints_on_device(device: str, values: Sequence[int]) -> Buffer:
    """Return ints on a device."""
    raw = np.array(values, np.int32)
    return Buffer(device, raw.size, dtypes.int32).allocate().copyin(memoryview(bytearray(raw)))


def read_floats(buffer: Buffer, count: int | None = None) -> NDArray[np.float32]:
    """Wait for the first floats of a buffer, or for all."""
    view = buffer if count is None else buffer.view(count, dtypes.float32, 0).ensure_allocated()
    raw = view.copyout(memoryview(bytearray(view.nbytes)))
    found: NDArray[np.float32] = np.frombuffer(raw, np.float32)
    return found


def _rotary_table(device: str, rope: Rope | None, context: int) -> Buffer:
    """Return cosines and sines of each position: (context, 2 * frequencies)."""
    if rope is None:
        return floats_on_device(device, np.zeros(1, np.float32))
    angles = np.arange(context)[:, None] * np.array(rope.frequencies, np.float64)
    both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.magnitude
    return floats_on_device(device, both.astype(np.float32))
