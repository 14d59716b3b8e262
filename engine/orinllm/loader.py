"""A file's network on a device, without its text: what benchmarks time and models answer with.

What a GPU needs is imported where one is used: it takes half of a CPU's start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orinllm.batching.cache import PageStore, SharedPageStore, SlotStore
from orinllm.batching.runner import Runner
from orinllm.batching.state_checkpoints import StateSlots
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.device import free_memory_bytes, raising_device_faults
from orinllm.gpu.kernels.buffers import (
    CHUNK,
    F16,
    MOST_SEQUENCES,
    PAGE,
    KvCacheType,
    pages_for_tokens,
    round_up,
)
from orinllm.gpu.path_plan import PathPlan, cache_bytes, make_path_plan, require_known_types
from orinllm.network.arch import config_of, require_mtp_config
from orinllm.network.config import Config
from orinllm.progress import Say, say_nothing

if TYPE_CHECKING:
    from orinllm.batching.fused_runner import FusedRunner

#: The name of a file's own block, where that of a draft model is expected.
MTP = "mtp"
#: Tokens of a sequence where nobody says how many.
DEFAULT_CONTEXT = 8192
#: Sequences that the fused kernels compute at once, at most.
MOST_SLOTS = MOST_SEQUENCES


# Copies of recurrent states: as many as fit so many bytes, within limits.
_CHECKPOINT_BYTES, _LEAST_CHECKPOINTS, _MOST_CHECKPOINTS = 256 << 20, 2, 32
# Of the memory that weights leave free on a GPU, what all sequences' recurrent states take at most.
_STATE_PART = 0.25


@dataclass(frozen=True)
class SharingOptions:
    """The way sequences share the fused kernels or a CPU; the general path has one at a time.

    pages: of keys and values of all together (`pages_for_tokens`, `pages_that_fit`); None: of one
    sequence's context, on a CPU of as many as half of the free memory holds. deterministic: every
    step has the same shape, whoever takes part.
    """

    slots: int = MOST_SLOTS
    pages: int | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class Network:
    """A file, what it computes, how many tokens a sequence may have, and as what it keeps them."""

    gguf: GGUF
    config: Config
    context: int
    kv: KvCacheType = F16  # of keys and values
    pictures: int = 0  # rows of a picture that see each other, or go together; 0: it sees none
    beside: Callable[[], int] = field(default=int, compare=False)  # bytes on a GPU that others take

    @staticmethod
    def read(path: str | Path, context: int | None = None, kv: KvCacheType = F16) -> Network:
        """Read a file; raises BadInput, one line that begins with the path, for a bad one."""
        gguf = GGUF.open(path)
        try:
            trained = config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor).trained_context
            length = _checked_context(context, trained)
            config = config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, length)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return Network(gguf, config, length, kv)

    def mtp_block_file(self, draft: Path | str | None) -> GGUF | None:
        """Return the file of the block that `draft` names: this one, or one that has it alone.

        None: it names none, but a model or nothing.
        """
        if draft is None or draft == MTP:
            return None if draft is None else self.gguf
        gguf = GGUF.open(draft)
        name = gguf.metadata.get("general.architecture")
        proposes = gguf.metadata.get(f"{name}.nextn_predict_layers", 0)
        return gguf if proposes and "blk.0.attn_norm.weight" not in gguf.tensors else None

    def require_mtp_block_config(self, gguf: GGUF | None = None) -> Config:
        """Return a file's block that proposes tokens (MTP), of this one where none is named.

        Raises BadInput where it has none, or that of another model.
        """
        gguf = self.gguf if gguf is None else gguf
        try:
            block = require_mtp_config(
                gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, self.context
            )
        except BadInput as error:
            raise BadInput(f"{gguf.path}: {error}") from None
        own = _values_common_with_mtp_block(self.gguf, self.config, len(self.config.layers))
        if (its := _values_common_with_mtp_block(gguf, block, block.first)) != own:
            what = next(name for name in own if own[name] != its[name])
            raise BadInput(f"{gguf.path}: its block is not of {self.gguf.path}: another {what}")
        return block


def _values_common_with_mtp_block(gguf: GGUF, config: Config, layers: int) -> dict[str, object]:
    """Return what a model and its block have in common."""
    return {
        "architecture": config.architecture,
        "width": config.dim,
        "number of layers": layers,
        "vocabulary": (config.vocab_size, gguf.metadata.get("tokenizer.ggml.tokens")),
    }


def _checked_context(asked: int | None, trained: int) -> int:
    if asked is None:
        return min(trained, DEFAULT_CONTEXT)
    if not 1 <= asked <= trained:
        raise BadInput(
            f"a context of {asked} tokens (-c) was given; the model was trained for 1 to {trained}"
        )
    return asked


def most_slots(plan: PathPlan) -> int:
    """Return how many sequences the fused kernels or the CPU's program compute at once, at most."""
    if plan.is_fused:
        return MOST_SLOTS
    from orinllm.cpu.program import MOST_ROWS

    return MOST_ROWS


def plan_network(network: Network, device: str) -> PathPlan:
    """Plan a network for a device; raises BadInput for types and sizes that cannot be."""
    if network.config.layers:
        require_known_types(network.gguf)
    plan = make_path_plan(network.gguf, network.config, device, network.kv)
    _require_memory(network, plan)
    return plan


def make_runner(
    network: Network,
    plan: PathPlan,
    general: bool = False,
    share: SharingOptions | None = None,
    say: Say = say_nothing,
) -> Runner:
    """Return what runs a network: the plan's path, or with `general` tinygrad.llm's network.

    Raises BadInput for a type of keys and values that the model or its path does not take, and
    DeviceFault where the device fails, or gives less memory than it said.
    """
    share = SharingOptions() if share is None else share
    with raising_device_faults(plan.device):
        _require_kv_type_fits(network, plan, general or not plan.is_fused)
        _require_picture_path(network, plan, general)
        if general or not plan.is_fused:
            return _make_unfused_runner(network, plan, general or plan.path == "general", share)
        return _make_fused_runner(network, plan, share, say)


def _make_fused_runner(
    network: Network, plan: PathPlan, share: SharingOptions, say: Say
) -> FusedRunner:
    from orinllm.batching.fused_runner import FusedRunner
    from orinllm.gpu.fused_executor import FusedExecutor
    from orinllm.gpu.memory import addressable_pages, make_memory
    from orinllm.gpu.weights import Weights

    gguf, config = network.gguf, network.config
    context = round_up(network.context, PAGE)
    pool = pages_for_tokens(context) if share.pages is None else share.pages
    if pool > (most := addressable_pages(config)):
        raise BadInput(
            f"{gguf.path}: keys and values of {pool * PAGE} tokens; the fused kernels address "
            f"those of {most * PAGE} at most (-c, --context)"
        )
    weights = Weights(gguf, config, plan.device)
    with weights.upload_meanwhile(say):
        say("kernels: compiled or taken from the cache")
        slots = fused_slots_that_fit(network, plan, share.slots)
        states = slots, most_checkpoints(config)
        memory = make_memory(config, weights, plan.device, context, pool, network.kv, states)
        executor = FusedExecutor(memory)
        return FusedRunner(executor, slots, share.deterministic)


def fused_slots_that_fit(network: Network, plan: PathPlan, asked: int) -> int:
    """Return how many sequences the fused kernels compute at once, of those that are asked for.

    The recurrent states of all take a part of the free memory at most.
    """
    from orinllm.gpu.memory import state_floats_per_slot

    size, free = 4 * state_floats_per_slot(network.config), free_memory_bytes(plan.device)
    if not size or free is None:
        return asked
    return max(1, min(asked, int(_STATE_PART * (free - plan.weight_bytes)) // size))


def recurrent_state_bytes(network: Network, slots: int) -> int:
    """Return the bytes of the recurrent states of so many sequences, and of their copies."""
    from orinllm.gpu.memory import state_floats_per_slot

    config = network.config
    return 4 * state_floats_per_slot(config) * (slots + most_checkpoints(config))


def make_page_store(runner: Runner, network: Network) -> PageStore:
    """Return who says which sequence has which of a runner's pages."""
    if runner.name == "fused":
        from orinllm.batching.fused_runner import FusedRunner

        assert isinstance(runner, FusedRunner)
        states = StateSlots(runner.slots, most_checkpoints(network.config))
        memory = runner.executor.memory
        return SharedPageStore(memory.pages, None if memory.states is None else states)
    config = network.config
    if runner.name != "cpu":  # tinygrad.llm's networks may have recurrent states
        resumable = bool(config.layers) and not config.n_state_floats
        return SlotStore(runner.slots, network.context, resumable)
    checkpoints = most_checkpoints(config)
    return SlotStore(runner.slots, network.context, not config.n_state_floats, checkpoints)


def most_checkpoints(config: Config) -> int:
    """Return how many copies of its recurrent states a model keeps for later prompts."""
    if not (size := 4 * config.n_state_floats):
        return 0
    return min(_MOST_CHECKPOINTS, max(_LEAST_CHECKPOINTS, _CHECKPOINT_BYTES // size))


def _make_unfused_runner(
    network: Network, plan: PathPlan, general: bool, share: SharingOptions
) -> Runner:
    """Return the CPU's or the general path, whose modules the fused kernels do not wait for."""
    file = network.gguf, network.config
    if general:
        from orinllm.batching.general_runner import GeneralRunner
        from orinllm.gpu.host_compiler import provide_compiler
        from orinllm.other.tinygrad_llm import UpstreamExecutor, reason_unsupported

        if plan.device.split(":")[0] == "CPU":
            provide_compiler()
        if plan.path == "general" and (why := reason_unsupported(*file)) is not None:
            what, obstacle = next(iter(plan.obstacles.items()))
            raise BadInput(
                f"{network.gguf.path}: the fused kernels on {plan.device} cannot run it ({what}: "
                f"{obstacle}), and tinygrad.llm {why}; --device CPU runs it"
            )
        return GeneralRunner(UpstreamExecutor(*file, plan.device, network.context))
    from orinllm.cpu.executor import CpuExecutor, CpuRunner

    slots = _cpu_slots(network, plan, share)
    return CpuRunner(CpuExecutor(*file, network.context, slots, network.pictures))


def _cpu_slots(network: Network, plan: PathPlan, share: SharingOptions) -> int:
    """Return how many sequences a CPU computes at once: each slot has room for a whole context."""
    pages = share.pages
    if pages is None:
        free = (free_memory_bytes(plan.device) or 0) - plan.weight_bytes
        pages = free // 2 // cache_bytes(plan, PAGE)
    return max(1, min(share.slots, most_slots(plan), pages // pages_for_tokens(network.context)))


def _require_kv_type_fits(network: Network, plan: PathPlan, general: bool) -> None:
    """Raise BadInput where keys and values cannot be of the type that is asked for."""
    kv = network.kv
    if kv == F16:
        return
    said = f"{network.gguf.path}: keys and values of type {kv.name} (-ctk, -ctv)"
    if general:
        what, why = next(iter(plan.obstacles.items()), ("--path", "general is asked for"))
        raise BadInput(f"{said} need the fused kernels, which cannot run ({what}: {why}); take f16")
    for attention in network.config.attention_by_layer.values():
        if (dim := attention.head_dim) % kv.group:
            raise BadInput(
                f"{said} share a scale by {kv.group}, and its heads have {dim} elements; take f16"
            )


def _require_picture_path(network: Network, plan: PathPlan, general: bool) -> None:
    """Raise BadInput where a path takes no pictures, or not as many rows together."""
    if not network.pictures:
        return
    said = f"{network.gguf.path}: pictures (--mmproj)"
    if general or plan.path == "general":
        raise BadInput(f"{said} need the fused kernels or the CPU's path; leave --path general out")
    if network.config.whole_pictures and network.pictures > CHUNK:
        raise BadInput(f"{said} of {network.pictures} rows; {CHUNK} at most are computed together")


def _require_memory(network: Network, plan: PathPlan) -> None:
    """Raise BadInput where weights and context exceed what the device has free."""
    free = free_memory_bytes(plan.device)
    if free is None or not network.config.layers:
        return
    cache, beside = cache_bytes(plan, network.context), 0
    if plan.is_fused:
        free -= recurrent_state_bytes(network, 1) + (beside := network.beside())
    if plan.weight_bytes + cache <= free:
        return
    fit = max(0, free - plan.weight_bytes) // plan.cache_bytes_per_token // PAGE * PAGE
    room = f"{fit} tokens fit" if fit else "not even its weights fit"
    room += f" beside the {beside / 1e9:.1f} GB of an encoder of pictures" if beside else ""
    raise BadInput(
        f"{network.gguf.path}: weights of {plan.weight_bytes / 1e9:.1f} GB and a context of "
        f"{network.context} tokens, {cache / 1e9:.1f} GB, do not fit the {free / 1e9:.1f} GB that "
        f"{plan.device} has free: {room}"
    )
