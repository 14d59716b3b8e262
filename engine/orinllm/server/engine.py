"""A loaded model and its scheduler: what requests become tokens with."""

import time
from dataclasses import dataclass, field

from orinllm.batch import FusedRunner, Runner, SingleRunner
from orinllm.cache import OneStore, PagedStore, Store
from orinllm.device import free_memory, open_device
from orinllm.errors import BadInput
from orinllm.executor import SamplingExecutor
from orinllm.fused import SIZE_CLASSES, FusedExecutor
from orinllm.grammar import Grammars
from orinllm.launches.buffers import KEY_TYPES, PAGE
from orinllm.memory import pages_of, pages_that_fit
from orinllm.model import Header, load_draft
from orinllm.network import Network, make_executor, plan_network
from orinllm.plan import Plan
from orinllm.scheduler import Scheduler, Watch
from orinllm.server.options import EngineOptions
from orinllm.speculating import SpeculatingRunner
from orinllm.speculation import Lookup, Proposer
from orinllm.states import Pooling, pooling_of
from orinllm.template import KEY, ChatTemplate
from orinllm.tokenizer import Tokenizer
from orinllm.weights import Say, quiet

_MOST_SLOTS = SIZE_CLASSES[-1]


@dataclass(frozen=True)
class Engine:
    """A model that answers."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: Grammars
    scheduler: Scheduler
    context: int  # tokens of prompt and answer
    vocab_size: int  # logits
    width: int  # numbers of an embedding
    pooling: Pooling  # of states to an embedding
    description: str  # one line
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds


def read_header(options: EngineOptions) -> tuple[Header, ChatTemplate | None]:
    """Read a file and its template; raises BadInput, one line, for what cannot be served."""
    header = Header.read(options.model, options.context, KEY_TYPES[options.kv])
    if options.template is None:
        return header, header.template
    try:
        source = options.template.read_text()
        return header, ChatTemplate(source, header.tokenizer)
    except (OSError, UnicodeDecodeError, BadInput) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{KEY}: ")
        raise BadInput(f"--chat-template {options.template}: {why}") from None


def load(options: EngineOptions, watch: Watch, say: Say = quiet) -> Engine:
    """Load a model; what raises is BadInput, or the device's own."""
    header, template = read_header(options)
    network = header.network
    pooling = pooling_of(network.gguf, network.config.architecture, options.pooling)
    plan = plan_network(network, open_device(options.device))
    proposer = _proposer(options, header, plan, say)
    pages = pages_of(network.context)
    if plan.fused and not options.general:
        pages = _pages(options, plan, network)
    elif options.slots not in (None, 1):
        raise BadInput(
            f"--slots {options.slots}: the general path answers one at a time; leave it out"
        )
    executor = make_executor(network, plan, options.general, say, pages)
    plain, store = _shared(executor, options, pages, bool(network.config.layers))
    runner: Runner = plain if proposer is None else _guessed(plain, proposer, plan)
    say("vocabulary: prepared for grammars")
    header.tokenizer.longest  # noqa: B018  (looked up once, and not by the first request)
    size = network.config.vocab_size
    scheduler = Scheduler(runner, store, watch, options.queue, reserve=options.deterministic)
    return Engine(
        header.tokenizer,
        template,
        Grammars(header.tokenizer, size),
        scheduler,
        network.context,
        size,
        network.config.dim,
        pooling,
        f"{options.model.name}: {executor.name} path on {plan.device}, {runner.slots} "
        f"slot{'s'[: runner.slots != 1]}, context of {network.context} tokens, {store.total} pages "
        f"of {PAGE} tokens",
    )


def _proposer(options: EngineOptions, header: Header, plan: Plan, say: Say) -> Proposer | None:
    """Load what guesses tokens; its memory is taken before keys and values get theirs."""
    flag = "--lookup" if options.lookup else "--draft"
    if (options.lookup or options.draft) and options.deterministic:
        raise BadInput(f"{flag}: steps of several sizes, which --deterministic excludes")
    if options.draft is None:
        return Lookup() if options.lookup else None
    general = options.general or not plan.fused
    draft = load_draft(header, options.draft, plan.device, general, say)
    plan_network(header.network, plan.device)  # raises where the model does not fit beside it
    return draft


def _guessed(
    runner: FusedRunner | SingleRunner, proposer: Proposer, plan: Plan
) -> SpeculatingRunner:
    if runner.most_verified == 1:
        raise BadInput(
            f"--lookup, --draft: the general path on {plan.device} takes one token at a time; the "
            "fused kernels and the CPU take several"
        )
    return SpeculatingRunner(runner, proposer)


def _shared(
    executor: SamplingExecutor, options: EngineOptions, pages: int, resumable: bool
) -> tuple[FusedRunner | SingleRunner, Store]:
    """Return what several sequences share an executor with."""
    if not isinstance(executor, FusedExecutor):
        return SingleRunner(executor), OneStore(executor.context, resumable)
    runner = FusedRunner(executor, options.slots or _MOST_SLOTS, options.deterministic)
    runner.warm(verifies=options.lookup or options.draft is not None)
    return runner, PagedStore(pages)


def _pages(options: EngineOptions, plan: Plan, network: Network) -> int:
    """Return the pages that there is memory for, which sequences share as they need it.

    One sequence's whole context at least, and no more than all slots' whole contexts.
    """
    slots = options.slots or _MOST_SLOTS
    if slots > _MOST_SLOTS:
        raise BadInput(f"--slots {slots}: at most {_MOST_SLOTS}")
    one, free = pages_of(network.context), free_memory(plan.device)
    if free is None:
        return slots * one
    room = int((free - plan.weight_bytes) * options.memory)
    return max(one, min(slots * one, pages_that_fit(network.config, room, network.kv)))
