"""Cubins made ahead: every kernel of a model, compiled for a GPU that need not be here."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.decoder import (
    VERIFIED,
    batch_sizes_for_slots,
    launches_after_chunk,
    make_token_lowering,
)
from orinllm.gpu.device import (
    MULTIPROCESSORS,
    OLDEST_SM,
    PROBE,
    TargetGpu,
    compile_cuda,
    cubin_file_name,
    fill_compile_cache,
    register_null_as_target,
)
from orinllm.gpu.fused_executor import make_small_chunk_lowering_if_faster
from orinllm.gpu.kernels.buffers import PAGE, round_up
from orinllm.gpu.kernels.recurrent import copy_states_launch
from orinllm.gpu.launch import Launch
from orinllm.gpu.memory import ModelMemory, make_memory, state_floats_per_slot
from orinllm.gpu.path_plan import make_path_plan
from orinllm.gpu.picture_encoder import FusedPictureEncoder
from orinllm.gpu.sampler import DeviceSampler
from orinllm.gpu.steps.prompt import ChunkLowering
from orinllm.gpu.steps.tokens import TokenLowering
from orinllm.gpu.weights import Weights
from orinllm.loader import Network
from orinllm.network.vision.encoder import MmprojConfig
from orinllm.progress import Say, say_nothing


def checked_target_gpu(arch: str, multiprocessors: int | None) -> TargetGpu:
    """Return a GPU to compile for.

    Raises BadInput where its multiprocessors are not known, or the kernels do not run on it.
    """
    named = re.fullmatch(r"sm_([0-9]{2,3})[af]?", arch)
    if named is None or int(named[1]) < OLDEST_SM:
        raise BadInput(
            f"--arch {arch}: an architecture from sm_{OLDEST_SM} on was expected, as sm_87"
        )
    sms = multiprocessors or MULTIPROCESSORS.get(arch)
    if sms is None:
        raise BadInput(f"--arch {arch}: give its number of multiprocessors with --sms")
    return TargetGpu(arch, sms)


def launches_to_compile(
    network: Network, gpu: TargetGpu, *sequences: int, served: bool = False
) -> Iterator[Launch]:
    """Yield every launch of a drawn token of so many sequences, and of a prompt's chunk, on `gpu`.

    `sequences` are the sizes of batches, `served` adds guessed tokens and small chunks of prompts.
    Raises BadInput for a model that the fused kernels do not run.
    """
    device = register_null_as_target(gpu)
    plan = make_path_plan(network.gguf, network.config, device, network.kv)
    if not plan.is_fused:
        what, why = next(iter(plan.obstacles.items()))
        raise BadInput(f"{network.gguf.path}: the fused kernels do not run it: {what}: {why}")
    weights = Weights(network.gguf, network.config, device)
    context = round_up(network.context, PAGE)
    pages = context // PAGE
    memory = make_memory(network.config, weights, device, context, pages, network.kv)
    yield from _launches_of_model(memory, sequences, served)
    if served:
        yield from _launches_of_mtp_block(network, memory, sequences)


def _launches_of_model(
    memory: ModelMemory, sequences: tuple[int, ...], served: bool
) -> Iterator[Launch]:
    """Yield the launches of a model."""
    lists = [make_token_lowering(memory, n) for n in sequences]
    guesses = [TokenLowering(memory, n, together=True) for n in VERIFIED if served]
    for tokens in (*lists, *guesses):
        yield from tokens.launches
        mail, size = tokens.mail.buffer if tokens.mail else None, tokens.sequences
        yield from DeviceSampler(tokens.logits, tokens.state, size, memory.context, mail).launches
    for tokens in guesses:
        yield from tokens.keep
    chunk = ChunkLowering(memory)
    yield from (*chunk.launches, *chunk.rest)
    alone = TokenLowering(memory, 1)
    yield from launches_after_chunk(alone, chunk)[: -len(alone.ending)]
    if memory.states is not None:
        yield copy_states_launch(
            memory.states, state_floats_per_slot(memory.config), memory.zeroed_ints(2)
        )
    small = make_small_chunk_lowering_if_faster(chunk) if served else None
    yield from () if small is None else small.launches


def _launches_of_mtp_block(
    network: Network, memory: ModelMemory, sequences: tuple[int, ...]
) -> Iterator[Launch]:
    """Yield the launches of a file's block that proposes tokens, and those of its model then."""
    try:
        config = network.require_mtp_block_config()
    except BadInput:  # it has none that is known
        return
    left = memory.allocate_last_hidden_states()
    yield from _launches_of_model(replace(memory, left=left), sequences, served=True)
    weights = Weights(network.gguf, config, memory.device, memory.weights)
    sizes = memory.device, memory.context, memory.pages, memory.kv
    own = replace(make_memory(config, weights, *sizes), left=left)
    alone, chunk = TokenLowering(own, 1), ChunkLowering(own)
    yield from (*alone.launches, *chunk.launches, *launches_after_chunk(alone, chunk))


def write_cubins(
    network: Network,
    gpu: TargetGpu,
    folder: Path,
    slots: int = 1,
    seen: tuple[GGUF, MmprojConfig] | None = None,
    say: Say = say_nothing,
) -> int:
    """Write the cubins of a model of so many slots into a folder; return how many there are.

    seen: a projector, of which pictures of all sizes have theirs, too.
    """
    launches = list(launches_to_compile(network, gpu, *batch_sizes_for_slots(slots), served=True))
    if seen is not None:
        clip, projector = seen
        encode = FusedPictureEncoder(clip, projector.encoder, "NULL", empty=True)
        launches += encode.launches_of_all_sizes(projector.most_embeddings_of_tile(network.context))
    sources = list(dict.fromkeys(launch.cuda_source for launch in launches))
    say(f"{len(sources)} kernels for {gpu.arch} with {gpu.multiprocessors} multiprocessors")
    fill_compile_cache("NULL", sources)
    folder.mkdir(parents=True, exist_ok=True)
    for source in (PROBE, *sources):
        path = folder / cubin_file_name(gpu.arch, source)
        path.write_bytes(compile_cuda("NULL", source))
    return len(sources)
