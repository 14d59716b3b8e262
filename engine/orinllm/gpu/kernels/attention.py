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
from orinllm.gpu.launch import Constants, Launch, arguments_of, name_of

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


def _cached(cache: Cache) -> tuple[dict[str, Buffer | None], str]:
    """Return the arguments of keys and values, and what a kernel takes them as."""
    given = {f"{cache.heads.kv.element}* cache": cache.buffer, "u16* scales": cache.scales}
    return given, f"Cached<P0>{{cache, {name_of('scales', cache.scales)}}}"


def _written(cache: Cache) -> tuple[str, ...]:
    return ("cache",) if cache.scales is None else ("cache", "scales")


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
    cache, cached = _cached(inputs.cache)
    given = {f"{element}* out": out, **cache, "const float* qkv": inputs.qkv}
    given |= {"const float* freqs": inputs.freqs, "float* part": parts.part}
    given |= {"float* part_ml": parts.part_ml, "int* state": state}
    given |= {"const int* table": inputs.cache.table, "const float* qn": inputs.q_norm}
    given |= {"const float* kn": inputs.k_norm, "const float* sinks": inputs.sinks}
    given |= {"const int* turns": inputs.turns}
    vectors = {"qn": inputs.q_norm, "kn": inputs.k_norm, "sinks": inputs.sinks}
    names = ", ".join(name_of(*vector) for vector in vectors.items())
    dim = attention.head_dim
    few = 1 if halves else parts.few
    constants = replace(
        _constants(heads, parts.splits, heads.per_block, few, parts.warps), stored=stored
    )
    written = () if stored or attention.reads is not None else _written(inputs.cache)
    return Launch(
        name=f"attention_{attention.heads}x{attention.kv_heads}x{dim}",
        file="attention.cu",
        constants=(constants,),
        arguments=arguments_of(given),
        body=(
            f"  attention<P0>(Attention<P0, {element}, decltype(before)>{{smem, block, before, "
            f"out, {cached}, qkv, freqs, {names}, {inputs.eps!r}f, {attention.scale!r}f, "
            f"part, part_ml, state, table, {name_of('turns', inputs.turns)}}});"
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
    cache, cached = _cached(inputs.cache)
    given = cache | {"const float* qkv": inputs.qkv, "const float* freqs": inputs.freqs}
    given |= {"const int* state": state, "const int* table": inputs.cache.table}
    given |= {"const float* kn": inputs.k_norm, "const int* turns": inputs.turns}
    return Launch(
        name=f"store_keys_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="attention.cu",
        constants=(_constants(heads, splits, heads.per_block),),
        arguments=arguments_of(given),
        body=(
            f"  store_keys<P0>(StoreKeys<P0>{{{cached}, qkv, freqs, "
            f"{name_of('kn', inputs.k_norm)}, state, table, {inputs.eps!r}f, "
            f"{name_of('turns', inputs.turns)}}});"
        ),
        grid=(attention.kv_heads, heads.sequences, 1),
        block=32,
        writes=_written(inputs.cache),
    )


def rotate_chunk(q: Buffer, inputs: AttentionInputs, chunk: Buffer) -> Launch:
    """Return a chunk's rotation: q to halves (tokens, heads, head_dim), k and v to the cache."""
    heads = inputs.cache.heads
    attention = heads.attention
    cache, cached = _cached(inputs.cache)
    given = {"u16* q": q, **cache, "const float* qkv": inputs.qkv}
    given |= {"const float* freqs": inputs.freqs, "const int* chunk": chunk}
    given |= {"const int* table": inputs.cache.table, "const float* qn": inputs.q_norm}
    given |= {"const float* kn": inputs.k_norm, "const int* turns": inputs.turns}
    given |= {"const int* axes": inputs.axes}
    norms = f"{name_of('qn', inputs.q_norm)}, {name_of('kn', inputs.k_norm)}"
    turns = f"{name_of('turns', inputs.turns)}, {name_of('axes', inputs.axes)}"
    return Launch(
        name=f"rope_rows_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="norm_rope.cu",
        constants=(_constants(heads, 1, _of_chunk(heads)),),
        arguments=arguments_of(given),
        body=(
            f"  rope_rows<P0>(RopeRows<P0>{{q, {cached}, qkv, freqs, {norms}, chunk, table, "
            f"{inputs.eps!r}f, {attention.scale!r}f, {turns}}});"
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
    qkv = inputs.qkv if attention.gated else None
    constants = replace(_constants(heads, 1, _of_chunk(heads)), ahead=ahead is not None)
    cache, cached = _cached(inputs.cache)
    given = {"u16* out": out, **cache, "const u16* q": q, "const int* chunk": chunk}
    given |= {"const int* table": inputs.cache.table, "const float* sinks": inputs.sinks}
    given |= {"const float* qkv": qkv, "const int* ahead": ahead}
    per_block = _of_chunk(heads)
    token_blocks = ceil_div(most_tokens(chunk), _TILE_ROWS // per_block)
    return Launch(
        name=f"attention_rows_{attention.heads}x{attention.kv_heads}x{attention.head_dim}",
        file="attention_prompt.cu",
        constants=(constants,),
        arguments=arguments_of(given),
        body=(
            f"  attention_rows<P0>(out, {cached}, q, {name_of('qkv', qkv)}, "
            f"{name_of('sinks', inputs.sinks)}, chunk, table, {name_of('ahead', ahead)});"
        ),
        grid=(token_blocks, attention.heads // per_block, 1),
        block=128,
        writes=("out",),
        per_sm=4 if attention.head_dim <= 64 else 3 if attention.head_dim <= 128 else 2,
    )
