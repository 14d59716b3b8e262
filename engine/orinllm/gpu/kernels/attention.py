"""Attention of a token and of a prompt's chunk: cuda/attention*.cu and rope_rows()."""

from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.device import Buffer

from orinllm.gpu.device import multiprocessor_count
from orinllm.gpu.kernels.buffers import (
    ALONE_WARPS,
    FEW,
    PAGE,
    SHARED_MEMORY,
    AttentionDims,
    LayerKvCache,
    SplitAttention,
    ceil_div,
    chunk_capacity,
    round_up,
)
from orinllm.gpu.launch import Constants, Given, Launch, make_launch, out_argument

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
class AttentionInputs:
    """Buffers of a layer's attention. Vectors that the model lacks are None.

    axes: where positions have three parts, which of them each pair turns by. turns: those of a
    chunk's tokens (tokens, 3), or by how much less than its position each of other tokens is
    turned.
    """

    cache: LayerKvCache
    qkv: Buffer  # (tokens, heads + 2 KV heads, head_dim); a gated head is a query, then a gate
    freqs: Buffer  # (context, rotated): cosines, then sines
    q_norm: Buffer | None
    k_norm: Buffer | None
    sinks: Buffer | None
    eps: float
    axes: Buffer | None = None
    turns: Buffer | None = None


def most_splits(device: str, heads: AttentionDims, warps: int = ALONE_WARPS) -> int:
    """Return the splits of a context at most, of 64 tokens or more each.

    Enough to fill a machine of few multiprocessors; of many, two blocks on each.
    """
    blocks, machine = heads.blocks_per_sequence * heads.sequences, multiprocessor_count(device)
    least = ceil_div(_BLOCKS_LEAST * machine, blocks)
    fitting = min(_WARPS_FIT * machine // (blocks * warps), _MOST_FITTING)
    return max(1, min(max(least, fitting), ceil_div(heads.most_attended_tokens, _SPLIT_LEAST)))


def _shared_memory_bytes(heads: AttentionDims, splits: int, few: int, warps: int) -> int:
    """Return the bytes of shared memory of a block of attention(): Scratch of attention.cu."""
    dim, per_block, pages = heads.attention.head_dim, heads.heads_per_block, heads.context // PAGE
    fewest = few if 1 < few < splits else splits
    floats = per_block * dim * (warps + 1) + 2 * dim + 16 * warps + per_block
    own = 2 * (dim * heads.kv.size + 2 * ceil_div(dim, _SCALED))
    return round_up(4 * (floats + 1 + ceil_div(pages, fewest)) + own, 16)


def warps_beside_gemvs(device: str, heads: AttentionDims) -> int:
    """Return the warps of a block of attention() in a list of GEMVs: theirs, where they fit."""
    splits = most_splits(device, heads, _GEMV_WARPS)
    small = _shared_memory_bytes(heads, splits, FEW, _GEMV_WARPS) <= SHARED_MEMORY
    return _GEMV_WARPS if small and heads.attention.head_dim <= _MOST_DIM_BESIDE else ALONE_WARPS


def _attention_constants(
    heads: AttentionDims, splits: int, per_block: int, few: int = FEW, warps: int = ALONE_WARPS
) -> Constants:
    """Return P of attention(), attention_rows() and rope_rows()."""
    attention, temperature = heads.attention, heads.attention.temperature
    return Constants(
        element=heads.kv.element,
        head_dim=attention.head_dim,
        kv_heads=attention.kv_heads,
        group=heads.heads_per_kv_head,
        heads_per_block=per_block,
        rotated=heads.rotated_dims,
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
        shared=_shared_memory_bytes(heads, splits, few, warps),
        softcap=float(attention.softcap),
        temperature=0.0 if temperature is None else temperature.scale,
        temperature_length=1 if temperature is None else temperature.length,
        axes=attention.rope is not None and bool(attention.rope.axes),
        gated=attention.gated,
        v_norm=attention.v_norm,
        own=attention.reads is None,
        stored=False,
        ahead=False,
    )


def _heads_label(heads: AttentionDims) -> str:
    attention = heads.attention
    return f"{attention.heads}x{attention.kv_heads}x{attention.head_dim}"


# What a kernel takes keys and values as.
_CACHED = "Cached<P0>{cache, scales}"


def _cache_arguments(cache: LayerKvCache) -> Given:
    """Return the arguments of keys and values."""
    return {f"{cache.heads.kv.element}* cache": cache.buffer, "u16* scales": cache.scales}


def _written_cache_arguments(cache: LayerKvCache) -> tuple[str, ...]:
    return ("cache",) if cache.scales is None else ("cache", "scales")


def _chunk_heads_per_block(heads: AttentionDims) -> int:
    """Return the query heads of a KV head that a block of attention_rows() has."""
    return max(n for n in range(1, 5) if heads.heads_per_kv_head % n == 0)


def token_attention_launch(
    out: Buffer, inputs: AttentionInputs, parts: SplitAttention, state: Buffer, stored: bool = False
) -> Launch:
    """Return attention of one token of each sequence: out (sequences, heads * head_dim).

    Floats, of which a few splits are left to the reader (parts.cuh), or halves, all of them whole.
    Each stores its key and value, unless `stored` says that `store_kv_launch` comes before.
    """
    heads, halves = parts.heads, out.dtype == dtypes.uint16
    attention, element = heads.attention, "u16" if halves else "float"
    few, small = (
        1 if halves else parts.most_splits_combined_by_reader,
        attention.head_dim <= _MOST_DIM_BESIDE,
    )
    given = (
        out_argument(out)
        | _cache_arguments(inputs.cache)
        | {
            "const float* qkv": inputs.qkv,
            "const float* freqs": inputs.freqs,
            "float* part": parts.part,
            "float* part_ml": parts.part_ml,
            "int* state": state,
            "const int* table": inputs.cache.table,
            "const float* qn": inputs.q_norm,
            "const float* kn": inputs.k_norm,
            "const float* sinks": inputs.sinks,
            "const int* turns": inputs.turns,
        }
    )
    constants = _attention_constants(heads, parts.splits, heads.heads_per_block, few, parts.warps)
    launch = make_launch(
        "attention.cu attention",
        _heads_label(heads),
        Constants(constants | {"stored": stored}),
        given,
        f"Attention<P0, {element}, decltype(before)>{{smem, block, before, out, {_CACHED}, qkv, "
        f"freqs, qn, kn, sinks, {inputs.eps!r}f, {attention.scale!r}f, part, part_ml, state, "
        "table, turns}",
        (heads.blocks_per_sequence * parts.splits * heads.sequences, 1),
    )
    written = (
        () if stored or attention.reads is not None else _written_cache_arguments(inputs.cache)
    )
    return replace(
        launch,
        block=parts.warps * 32,
        writes=("out", *written, "part", "part_ml", "state"),
        per_sm=16 // parts.warps if small else 2,
        shared=_shared_memory_bytes(heads, parts.splits, few, parts.warps),
        step="attention" if small else "",  # larger heads need more registers than a part has
    )


def store_kv_launch(inputs: AttentionInputs, splits: int, state: Buffer) -> Launch:
    """Return what stores keys and values of tokens of one sequence, which see one another."""
    heads = inputs.cache.heads
    given = _cache_arguments(inputs.cache) | {
        "const float* qkv": inputs.qkv,
        "const float* freqs": inputs.freqs,
        "const int* state": state,
        "const int* table": inputs.cache.table,
        "const float* kn": inputs.k_norm,
        "const int* turns": inputs.turns,
    }
    launch = make_launch(
        "attention.cu store_keys",
        _heads_label(heads),
        _attention_constants(heads, splits, heads.heads_per_block),
        given,
        f"StoreKeys<P0>{{{_CACHED}, qkv, freqs, kn, state, table, {inputs.eps!r}f, turns}}",
        (heads.attention.kv_heads, heads.sequences),
    )
    return replace(launch, block=32, writes=_written_cache_arguments(inputs.cache))


def chunk_rotate_store_launch(q: Buffer, inputs: AttentionInputs, chunk: Buffer) -> Launch:
    """Return a chunk's rotation: q to halves (tokens, heads, head_dim), k and v to the cache."""
    heads, attention = inputs.cache.heads, inputs.cache.heads.attention
    given = (
        {"u16* q": q}
        | _cache_arguments(inputs.cache)
        | {
            "const float* qkv": inputs.qkv,
            "const float* freqs": inputs.freqs,
            "const int* chunk": chunk,
            "const int* table": inputs.cache.table,
            "const float* qn": inputs.q_norm,
            "const float* kn": inputs.k_norm,
            "const int* turns": inputs.turns,
            "const int* axes": inputs.axes,
        }
    )
    launch = make_launch(
        "norm_rope.cu rope_rows",
        _heads_label(heads),
        _attention_constants(heads, 1, _chunk_heads_per_block(heads)),
        given,
        f"RopeRows<P0>{{q, {_CACHED}, qkv, freqs, qn, kn, chunk, table, {inputs.eps!r}f, "
        f"{attention.scale!r}f, turns, axes}}",
        (chunk_capacity(chunk), 1),
    )
    written = _written_cache_arguments(inputs.cache) if attention.reads is None else ()
    return replace(launch, block=_ROPE_WARPS * 32, writes=("q", *written))


def chunk_attention_launch(
    out: Buffer, q: Buffer, inputs: AttentionInputs, chunk: Buffer, ahead: Buffer | None = None
) -> Launch:
    """Return attention of a chunk: out in halves (tokens, heads, head_dim).

    `ahead` says how many tokens behind its own each token sees; None: none does.
    """
    heads, attention = inputs.cache.heads, inputs.cache.heads.attention
    given = (
        {"u16* out": out}
        | _cache_arguments(inputs.cache)
        | {
            "const u16* q": q,
            "const int* chunk": chunk,
            "const int* table": inputs.cache.table,
            "const float* sinks": inputs.sinks,
            "const float* qkv": inputs.qkv if attention.gated else None,
            "const int* ahead": ahead,
        }
    )
    per_block = _chunk_heads_per_block(heads)
    launch = make_launch(
        "attention_prompt.cu attention_rows",
        _heads_label(heads),
        Constants(_attention_constants(heads, 1, per_block) | {"ahead": ahead is not None}),
        given,
        f"out, {_CACHED}, q, qkv, sinks, chunk, table, ahead",
        (ceil_div(chunk_capacity(chunk), _TILE_ROWS // per_block), attention.heads // per_block),
    )
    small = attention.head_dim
    return replace(launch, block=128, per_sm=4 if small <= 64 else 3 if small <= 128 else 2)
