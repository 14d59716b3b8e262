"""Attention of a token and of a prompt's chunk: cuda/attention*.cu and rope_rows()."""

from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import multiprocessors
from orinllm.gpu.kernels.buffers import (
    ALONE_WARPS,
    FEW,
    PAGE,
    SHARED_MEMORY,
    AttentionParts,
    Cache,
    Heads,
    ceil_div,
    most_tokens,
    round_up,
)
from orinllm.gpu.launch import Argument, Constants, Launch

# Tokens of a split at least: parts.cuh.
_SPLIT_LEAST = 64
# Warps of most GEMVs' blocks.
_GEMV_WARPS = 8
# Blocks of attention() that a multiprocessor is given at least, the warps that fit it, and the
# splits beyond which combining takes longer than the least number of blocks:
# docs/measure/performance.md.
_BLOCKS_LEAST, _WARPS_FIT, _MOST_FITTING = 2, 16, 32
# The largest heads that leave room for two blocks of eight warps on a multiprocessor.
_MOST_DIM_BESIDE = 128
# Elements that share a scale: SCALED of cache.cuh.
_SCALED = 32
# Rows, of a token and a head, of a block of attention_rows().
_TILE_ROWS = 64
# Warps of a block of rope_rows(): ROPE_WARPS of norm_rope.cu.
_ROPE_WARPS = 8
#: Head dimensions that the kernels take: whole float4 and tensor core tiles.
HEAD_DIMS = (32, 64, 80, 96, 128, 256, 512)


@dataclass(frozen=True)
class AttentionConstants(Constants):
    """P of attention(), attention_rows() and rope_rows()."""

    element: str
    head_dim: int
    kv_heads: int
    group: int
    heads_per_block: int
    rotated: int
    interleaved: bool
    qk_norm: bool
    sinks: bool
    window: int
    page: int
    pages: int
    sequences: int
    splits: int
    few: int
    warps: int
    shared: int
    softcap: float
    temperature: float
    temperature_length: int
    axes: bool
    gated: bool
    v_norm: bool
    own: bool
    stored: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class AttentionInputs:
    """Buffers of a layer's attention. Vectors that the model lacks are None.

    axes: where positions have three parts, which of them each pair turns by. turns: those of a
    chunk's tokens (tokens, 3), or by how much less than its position each of other tokens is
    turned.
    """

    cache: Cache
    qkv: Buffer  # (tokens, heads + 2 KV heads, head_dim); a gated head is a query, then a gate
    freqs: Buffer  # (context, rotated): cosines, then sines
    q_norm: Buffer | None
    k_norm: Buffer | None
    sinks: Buffer | None
    eps: float
    axes: Buffer | None = None
    turns: Buffer | None = None


def most_splits(device: str, heads: Heads, warps: int = ALONE_WARPS) -> int:
    """Return the splits of a context at most, of 64 tokens or more each.

    Enough to fill a machine of few multiprocessors; of many, two blocks on each.
    """
    blocks, machine = heads.blocks * heads.sequences, multiprocessors(device)
    least = ceil_div(_BLOCKS_LEAST * machine, blocks)
    fitting = min(_WARPS_FIT * machine // (blocks * warps), _MOST_FITTING)
    return max(1, min(max(least, fitting), ceil_div(heads.attended, _SPLIT_LEAST)))


def _shared_memory(heads: Heads, splits: int, few: int, warps: int) -> int:
    """Return the bytes of shared memory of a block of attention(): Scratch of attention.cu."""
    dim, per_block, pages = heads.attention.head_dim, heads.per_block, heads.context // PAGE
    fewest = few if 1 < few < splits else splits
    floats = per_block * dim * (warps + 1) + 2 * dim + 16 * warps + per_block
    own = 2 * (dim * heads.kv.size + 2 * ceil_div(dim, _SCALED))
    return round_up(4 * (floats + 1 + ceil_div(pages, fewest)) + own, 16)


def warps_beside_gemvs(device: str, heads: Heads) -> int:
    """Return the warps of a block of attention() in a list of GEMVs: theirs, where they fit."""
    splits = most_splits(device, heads, _GEMV_WARPS)
    small = _shared_memory(heads, splits, FEW, _GEMV_WARPS) <= SHARED_MEMORY
    return _GEMV_WARPS if small and heads.attention.head_dim <= _MOST_DIM_BESIDE else ALONE_WARPS


def _constants(
    heads: Heads, splits: int, per_block: int, few: int = FEW, warps: int = ALONE_WARPS
) -> AttentionConstants:
    attention, temperature = heads.attention, heads.attention.temperature
    return AttentionConstants(
        element=heads.kv.element,
        head_dim=attention.head_dim,
        kv_heads=attention.kv_heads,
        group=heads.group,
        heads_per_block=per_block,
        rotated=heads.rotated,
        interleaved=attention.rope is not None and attention.rope.interleaved,
        qk_norm=attention.qk_norm,
        sinks=attention.sinks,
        window=attention.window,
        page=PAGE,
        pages=heads.context // PAGE,
        sequences=heads.sequences,
        splits=splits,
        few=few,
        warps=warps,
        shared=_shared_memory(heads, splits, few, warps),
        softcap=float(attention.softcap),
        temperature=0.0 if temperature is None else temperature.scale,
        temperature_length=1 if temperature is None else temperature.length,
        axes=attention.rope is not None and bool(attention.rope.axes),
        gated=attention.gated,
        v_norm=attention.v_norm,
        own=attention.reads is None,
    )


def _turned(inputs: AttentionInputs) -> tuple[list[Argument], str]:
    """Return the argument of what tokens are turned by, other than their positions."""
    if inputs.turns is None:
        return [], "0"
    return [Argument("const int* turns", inputs.turns)], "turns"


def _cached(cache: Cache) -> tuple[list[Argument], str]:
    """Return the arguments of keys and values, and what a kernel takes them as."""
    arguments = [Argument(f"{cache.heads.kv.element}* cache", cache.buffer)]
    if cache.scales is None:
        return arguments, "Cached<P0>{cache, 0}"
    return [*arguments, Argument("u16* scales", cache.scales)], "Cached<P0>{cache, scales}"


def _written(cache: Cache) -> tuple[str, ...]:
    return ("cache",) if cache.scales is None else ("cache", "scales")


def _optional(*vectors: tuple[str, Buffer | None]) -> tuple[list[Argument], list[str]]:
    """Return the arguments of the vectors that there are, and the expression of each."""
    arguments = [Argument(f"const float* {name}", b) for name, b in vectors if b is not None]
    return arguments, ["0" if buffer is None else name for name, buffer in vectors]


def _of_chunk(heads: Heads) -> int:
    """Return the query heads of a KV head that a block of attention_rows() has."""
    return max(n for n in range(1, 5) if heads.group % n == 0)


def attend_token(
    out: Buffer, inputs: AttentionInputs, parts: AttentionParts, state: Buffer, stored: bool = False
) -> Launch:
    """Return attention of one token of each sequence: out (sequences, heads * head_dim).

    Floats, of which a few splits are left to the reader (parts.cuh), or halves, all of them whole.
    Each stores its key and value, unless `stored` says that `store_keys` comes before.
    """
    heads, halves = parts.heads, out.dtype == dtypes.uint16
    element = "u16" if halves else "float"
    attention = heads.attention
    more, (q_norm, k_norm, sinks) = _optional(
        ("qn", inputs.q_norm), ("kn", inputs.k_norm), ("sinks", inputs.sinks)
    )
    cache, cached = _cached(inputs.cache)
    dim = attention.head_dim
    few = 1 if halves else parts.few
    constants = replace(
        _constants(heads, parts.splits, heads.per_block, few, parts.warps), stored=stored
    )
    turned, turns = _turned(inputs)
    written = () if stored or attention.reads is not None else _written(inputs.cache)
    return Launch(
        name=f"attention_{attention.heads}x{attention.kv_heads}x{dim}",
        file="attention.cu",
        constants=(constants,),
        arguments=(
            Argument(f"{element}* out", out),
            *cache,
            Argument("const float* qkv", inputs.qkv),
            Argument("const float* freqs", inputs.freqs),
            Argument("float* part", parts.part),
            Argument("float* part_ml", parts.part_ml),
            Argument("int* state", state),
            Argument("const int* table", inputs.cache.table),
            *more,
            *turned,
        ),
        body=(
            f"  attention<P0>(Attention<P0, {element}, decltype(before)>{{smem, block, before, "
            f"out, {cached}, qkv, freqs, {q_norm}, {k_norm}, {sinks}, {inputs.eps!r}f, "
            f"{attention.scale!r}f, part, part_ml, state, table, {turns}}});"
        ),
        grid=(heads.blocks * parts.splits * heads.sequences, 1, 1),
        block=parts.warps * 32,
        writes=("out", *written, "part", "part_ml", "state"),
        per_sm=16 // parts.warps if dim <= _MOST_DIM_BESIDE else 2,
        shared=constants.shared,
        # Larger heads need more registers than a part has.
        step="attention" if dim <= _MOST_DIM_BESIDE else "",
    )


def store_keys(inputs: AttentionInputs, splits: int, state: Buffer) -> Launch:
    """Return what stores keys and values of tokens of one sequence, which see one another."""
    heads = inputs.cache.heads
    attention = heads.attention
    more, (k_norm,) = _optional(("kn", inputs.k_norm))
    cache, cached = _cached(inputs.cache)
    turned, turns = _turned(inputs)
    return Launch(
        name=f"store_keys_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="attention.cu",
        constants=(_constants(heads, splits, heads.per_block),),
        arguments=(
            *cache,
            Argument("const float* qkv", inputs.qkv),
            Argument("const float* freqs", inputs.freqs),
            Argument("const int* state", state),
            Argument("const int* table", inputs.cache.table),
            *more,
            *turned,
        ),
        body=(
            f"  store_keys<P0>(StoreKeys<P0>{{{cached}, qkv, freqs, {k_norm}, state, table, "
            f"{inputs.eps!r}f, {turns}}});"
        ),
        grid=(attention.kv_heads, heads.sequences, 1),
        block=32,
        writes=_written(inputs.cache),
    )


def rotate_chunk(q: Buffer, inputs: AttentionInputs, chunk: Buffer) -> Launch:
    """Return a chunk's rotation: q to halves (tokens, heads, head_dim), k and v to the cache."""
    heads = inputs.cache.heads
    attention = heads.attention
    more, (q_norm, k_norm) = _optional(("qn", inputs.q_norm), ("kn", inputs.k_norm))
    cache, cached = _cached(inputs.cache)
    turned, turns = _turned(inputs)
    if inputs.axes is not None:
        turned.append(Argument("const int* axes", inputs.axes))
    axes = "0" if inputs.axes is None else "axes"
    return Launch(
        name=f"rope_rows_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="norm_rope.cu",
        constants=(_constants(heads, 1, _of_chunk(heads)),),
        arguments=(
            Argument("u16* q", q),
            *cache,
            Argument("const float* qkv", inputs.qkv),
            Argument("const float* freqs", inputs.freqs),
            Argument("const int* chunk", chunk),
            Argument("const int* table", inputs.cache.table),
            *more,
            *turned,
        ),
        body=(
            f"  rope_rows<P0>(RopeRows<P0>{{q, {cached}, qkv, freqs, {q_norm}, {k_norm}, chunk, "
            f"table, {inputs.eps!r}f, {attention.scale!r}f, {turns}, {axes}}});"
        ),
        grid=(most_tokens(chunk), 1, 1),
        block=_ROPE_WARPS * 32,
        writes=("q", *(_written(inputs.cache) if attention.reads is None else ())),
    )


def attend_chunk(
    out: Buffer, q: Buffer, inputs: AttentionInputs, chunk: Buffer, ahead: Buffer | None = None
) -> Launch:
    """Return attention of a chunk: out in halves (tokens, heads, head_dim).

    `ahead` says how many tokens behind its own each token sees; None: none does.
    """
    heads = inputs.cache.heads
    attention = heads.attention
    more, (sinks,) = _optional(("sinks", inputs.sinks))
    if attention.gated:
        more.append(Argument("const float* qkv", inputs.qkv))
    if ahead is not None:
        more.append(Argument("const int* ahead", ahead))
    seen = "0" if ahead is None else "ahead"
    constants = replace(_constants(heads, 1, _of_chunk(heads)), ahead=ahead is not None)
    cache, cached = _cached(inputs.cache)
    per_block = _of_chunk(heads)
    token_blocks = ceil_div(most_tokens(chunk), _TILE_ROWS // per_block)
    return Launch(
        name=f"attention_rows_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="attention_prompt.cu",
        constants=(constants,),
        arguments=(
            Argument("u16* out", out),
            *cache,
            Argument("const u16* q", q),
            Argument("const int* chunk", chunk),
            Argument("const int* table", inputs.cache.table),
            *more,
        ),
        body=(
            f"  attention_rows<P0>(out, {cached}, q, {'qkv' if attention.gated else 0}, {sinks}, "
            f"chunk, table, {seen});"
        ),
        grid=(token_blocks, attention.heads // per_block, 1),
        block=128,
        writes=("out",),
        per_sm=4 if attention.head_dim <= 64 else 3 if attention.head_dim <= 128 else 2,
    )
