"""A loaded model and its scheduler: what requests become tokens with."""

import time
from dataclasses import dataclass, field

from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import LookupProposer, Proposer
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import SchedulerObserver
from orinllm.batching.speculating_runner import SpeculatingRunner
from orinllm.choose.pooling import Pooling, choose_pooling
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.file.identity import FileIdentity
from orinllm.gpu.device import free_memory_bytes, open_and_name_device
from orinllm.gpu.kernels.buffers import KEY_TYPES, PAGE, pages_for_tokens
from orinllm.gpu.memory import pages_that_fit
from orinllm.gpu.path_plan import PathPlan
from orinllm.loader import (
    MOST_SLOTS,
    Network,
    SharingOptions,
    fused_slots_that_fit,
    make_page_store,
    make_runner,
    most_slots,
    plan_network,
    recurrent_state_bytes,
)
from orinllm.mmproj import enable_pictures, network_for_pictures
from orinllm.model import (
    ModelDescription,
    load_draft_proposer,
    load_mtp_proposer,
    require_takes_guesses,
)
from orinllm.network.config import Config
from orinllm.progress import Say, say_nothing
from orinllm.server.options import EngineOptions
from orinllm.text.grammar import GrammarCompiler
from orinllm.text.template import KEY, ChatTemplate
from orinllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model that answers."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: GrammarCompiler
    scheduler: Scheduler
    context: int  # tokens of prompt and answer
    vocab_size: int  # logits
    width: int  # numbers of an embedding
    pooling: Pooling  # of states to an embedding
    description: str  # one line
    file: FileIdentity = field(default_factory=FileIdentity)
    image_hosts: tuple[str, ...] = ()  # of which pictures are fetched
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds


def read_description_and_template(
    options: EngineOptions,
) -> tuple[ModelDescription, ChatTemplate | None]:
    """Read a file and its template; raises BadInput, one line, for what cannot be served."""
    network = Network.read(options.model, options.context, KEY_TYPES[options.kv])
    description = ModelDescription.from_network(network_for_pictures(network, options.mmproj))
    if options.template is None:
        return description, description.template
    try:
        source = options.template.read_text()
        return description, ChatTemplate(source, description.tokenizer)
    except (OSError, UnicodeDecodeError, BadInput) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{KEY}: ")
        raise BadInput(f"--chat-template {options.template}: {why}") from None


def load_engine(
    options: EngineOptions, watch: SchedulerObserver, say: Say = say_nothing
) -> ServedModel:
    """Load a model; what raises is BadInput, or the device's own."""
    description, template = read_description_and_template(options)
    network = description.network
    pooling = choose_pooling(network.gguf, network.config.architecture, options.pooling)
    plan = plan_network(network, open_and_name_device(options.device))
    _refuse_deterministic_guesses(options)
    file = network.mtp_block_file(options.draft)
    block = None if file is None else (file, network.require_mtp_block_config(file))
    proposer = None if file is not None else _load_proposer(options, description, plan, say)
    pages = pages_for_tokens(network.context)
    if plan.path != "general" and not options.general:
        pages = _affordable_pages(options, plan, network, block)
    elif options.slots not in (None, 1):
        raise BadInput(
            f"--slots {options.slots}: the general path answers one at a time; leave it out"
        )
    share = SharingOptions(options.slots or MOST_SLOTS, pages, options.deterministic)
    plain = make_runner(network, plan, options.general, share, say)
    if file is not None:
        proposer = load_mtp_proposer(description, plan, plain, file)
    if isinstance(plain, FusedRunner):
        plain.compile_kernels(verifies=proposer is not None)
    if proposer is not None:
        require_takes_guesses(plain, plan, "--lookup, --draft")
    runner = plain if proposer is None else SpeculatingRunner(plain, proposer)
    if options.mmproj is not None:
        say("pictures: room for the largest")
        enable_pictures(template, options.mmproj, network, plan.device, at_once=True)
    store = make_page_store(plain, network)
    say("vocabulary: prepared for grammars")
    description.tokenizer.longest_token_byte_count  # noqa: B018  (looked up once, and not by the first request)
    size = network.config.vocab_size
    scheduler = Scheduler(runner, store, watch, options.queue, reserve=options.deterministic)
    return ServedModel(
        description.tokenizer,
        template,
        GrammarCompiler(description.tokenizer, size),
        scheduler,
        network.context,
        size,
        network.config.dim,
        pooling,
        f"{options.model.name}: {runner.name} path on {plan.device}, {runner.slots} "
        f"slot{'s'[: runner.slots != 1]}, context of {network.context} tokens, {store.total} pages "
        f"of {PAGE} tokens",
        FileIdentity.of_gguf(network.gguf),
        options.image_hosts,
    )


def _refuse_deterministic_guesses(options: EngineOptions) -> None:
    """Raise BadInput where guesses would make steps of several sizes that must be of one."""
    flag = "--lookup" if options.lookup else "--draft"
    if (options.lookup or options.draft) and options.deterministic:
        raise BadInput(f"{flag}: steps of several sizes, which --deterministic excludes")


def _load_proposer(
    options: EngineOptions, description: ModelDescription, plan: PathPlan, say: Say
) -> Proposer | None:
    """Load what guesses tokens, unless it is a block, which comes once the model is there.

    Its memory is taken before keys and values get theirs.
    """
    if options.draft is None:
        return LookupProposer() if options.lookup else None
    general = options.general or plan.path == "general"
    draft = load_draft_proposer(description, options.draft, plan.device, general, say)
    plan_network(description.network, plan.device)  # raises where the model does not fit beside it
    return draft


def _affordable_pages(
    options: EngineOptions, plan: PathPlan, network: Network, block: tuple[GGUF, Config] | None
) -> int:
    """Return the pages that there is memory for, which sequences share as they need it.

    One sequence's whole context at least, and no more than all slots' whole contexts.
    """
    most = most_slots(plan)
    slots = options.slots or most
    if slots > most:
        raise BadInput(f"--slots {slots}: at most {most} on the {plan.path} path")
    one, free = pages_for_tokens(network.context), free_memory_bytes(plan.device)
    if free is None:
        return slots * one
    room = int((free - plan.weight_bytes - network.beside()) * options.memory)
    if plan.is_fused:
        slots = fused_slots_that_fit(network, plan, slots)
        room -= recurrent_state_bytes(network, slots)
    if block is not None:
        from orinllm.gpu.mtp_block import mtp_bytes_per_token, mtp_weight_bytes

        # Its keys and values, and the states that it reads, lie beside.
        file, config = block
        room -= mtp_weight_bytes(file, config, network) if plan.is_fused else 0
        kept, its = plan.cache_bytes_per_token, mtp_bytes_per_token(config, network.kv)
        room = room * kept // (kept + its)
    return max(one, min(slots * one, pages_that_fit(network.config, room, network.kv)))
