"""A file's network on a device, without its text: what benchmarks time and models answer with."""

from dataclasses import dataclass
from pathlib import Path

from orinllm.arch import config_of
from orinllm.config import Config
from orinllm.device import free_memory
from orinllm.errors import BadInput
from orinllm.executor import SamplingExecutor
from orinllm.fused import FusedExecutor
from orinllm.gguf import GGUF
from orinllm.launches.buffers import F16, PAGE, KeyType, round_up
from orinllm.memory import make_memory, most_pages, pages_of
from orinllm.plan import Plan, cache_bytes, make_plan
from orinllm.weights import Say, Weights, check_types, quiet

#: Tokens of a sequence where nobody says how many.
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Network:
    """A file, what it computes, how many tokens a sequence may have, and as what it keeps them."""

    gguf: GGUF
    config: Config
    context: int
    kv: KeyType = F16  # of keys and values

    @staticmethod
    def read(path: str | Path, context: int | None = None, kv: KeyType = F16) -> "Network":
        """Read a file; raises BadInput, one line that begins with the path, for a bad one."""
        gguf = GGUF.open(path)
        try:
            trained = config_of(gguf.metadata, gguf.tensors, gguf.vector).trained_context
            length = _context(context, trained)
            config = config_of(gguf.metadata, gguf.tensors, gguf.vector, length)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None
        return Network(gguf, config, length, kv)


def _context(asked: int | None, trained: int) -> int:
    if asked is None:
        return min(trained, DEFAULT_CONTEXT)
    if not 1 <= asked <= trained:
        raise BadInput(
            f"a context of {asked} tokens (-c) was given; the model was trained for 1 to {trained}"
        )
    return asked


def plan_network(network: Network, device: str) -> Plan:
    """Plan a network for a device; raises BadInput for types and sizes that cannot be."""
    if network.config.layers:
        check_types(network.gguf)
    plan = make_plan(network.gguf, network.config, device, network.kv)
    _check_memory(network, plan)
    return plan


def make_executor(
    network: Network,
    plan: Plan,
    general: bool = False,
    say: Say = quiet,
    pages: int | None = None,
) -> SamplingExecutor:
    """Return what runs a network: fused kernels where the plan allows, else the general path.

    `pages`: of keys and values of all sequences together (memory.py: pages_of, pages_that_fit);
    without it one sequence's context. The general path has one sequence. Raises BadInput for a type
    of keys and values that the model or its path does not take.
    """
    gguf, config = network.gguf, network.config
    _check_keys(network, plan, general or not plan.fused)
    if general or not plan.fused:
        return _sequential(network, plan.device)
    context = round_up(network.context, PAGE)
    pool = pages_of(context) if pages is None else pages
    if pool > (most := most_pages(config)):
        raise BadInput(
            f"{gguf.path}: keys and values of {pool * PAGE} tokens; the fused kernels address "
            f"those of {most * PAGE} at most (-c, --context)"
        )
    weights = Weights(gguf, config, plan.device)
    with weights.arriving(say):
        say("kernels: compiled or taken from the cache")
        memory = make_memory(config, weights, plan.device, context, pool, network.kv)
        return FusedExecutor(memory, chunked=plan.prompt_obstacle is None)


def _sequential(network: Network, device: str) -> SamplingExecutor:
    """Return the general path, whose modules the fused kernels do not wait for."""
    from orinllm.compiler import provide_compiler
    from orinllm.general import general_executor
    from orinllm.sequential import Sequential

    if device.split(":")[0] == "CPU":
        provide_compiler()
    return Sequential(general_executor(network.gguf, network.config, device, network.context))


def _check_keys(network: Network, plan: Plan, general: bool) -> None:
    """Raise BadInput where keys and values cannot be of the type that is asked for."""
    kv = network.kv
    if kv == F16:
        return
    said = f"{network.gguf.path}: keys and values of type {kv.name} (-ctk, -ctv)"
    if general:
        what, why = next(iter(plan.obstacles.items()), ("--path", "general is asked for"))
        raise BadInput(f"{said} need the fused kernels, which cannot run ({what}: {why}); take f16")
    for layer in network.config.layers:
        if (dim := layer.attention.head_dim) % kv.group:
            raise BadInput(
                f"{said} share a scale by {kv.group}, and its heads have {dim} elements; take f16"
            )


def _check_memory(network: Network, plan: Plan) -> None:
    """Raise BadInput where weights and context exceed what the device has free."""
    free = free_memory(plan.device)
    if free is None or not network.config.layers:
        return
    cache = cache_bytes(plan, network.context)
    if plan.weight_bytes + cache <= free:
        return
    fit = max(0, free - plan.weight_bytes) // plan.cache_bytes_per_token // PAGE * PAGE
    room = f"{fit} tokens fit" if fit else "not even its weights fit"
    raise BadInput(
        f"{network.gguf.path}: weights of {plan.weight_bytes / 1e9:.1f} GB and a context of "
        f"{network.context} tokens, {cache / 1e9:.1f} GB, do not fit the {free / 1e9:.1f} GB that "
        f"{plan.device} has free: {room}"
    )
