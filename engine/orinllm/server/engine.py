"""A loaded model and its scheduler: what requests become tokens with."""

import time
from dataclasses import dataclass, field

from orinllm.batch import FusedRunner, Runner, SingleRunner, pages_of
from orinllm.cache import OneStore, PagedStore, Store
from orinllm.device import free_memory
from orinllm.errors import BadInput
from orinllm.executor import Executor
from orinllm.fused import SIZE_CLASSES, FusedExecutor
from orinllm.grammar import Grammars
from orinllm.launches.buffers import PAGE
from orinllm.model import Header
from orinllm.network import make_executor, open_device, plan_network
from orinllm.plan import Plan
from orinllm.scheduler import Scheduler, Watch
from orinllm.server.options import EngineOptions
from orinllm.template import ChatTemplate
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
    description: str  # one line
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds


def read_header(options: EngineOptions) -> tuple[Header, ChatTemplate | None]:
    """Read a file and its template; raises BadInput, one line, for what cannot be served."""
    header = Header.read(options.model, options.context)
    if options.template is None:
        return header, header.template
    try:
        source = options.template.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--chat-template {options.template}: {error}") from None
    return header, ChatTemplate(source, header.tokenizer)


def load(options: EngineOptions, watch: Watch, say: Say = quiet) -> Engine:
    """Load a model; what raises is BadInput, or the device's own."""
    header, template = read_header(options)
    network = header.network
    plan = plan_network(network, open_device(options.device))
    fused = plan.fused and not options.general
    if not fused and options.slots not in (None, 1):
        raise BadInput(f"--slots {options.slots}: the general path has one")
    pages = _pages(options, plan, network.context) if fused else 0
    executor = make_executor(network, plan, options.general, say, pages)
    runner, store = _shared(executor, options, pages, bool(network.config.layers))
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
        f"{options.model.name}: {executor.name} path on {plan.device}, {runner.slots} "
        f"slot{'s'[: runner.slots != 1]}, context of {network.context} tokens, {store.total} pages "
        f"of {PAGE} tokens",
    )


def _shared(
    executor: Executor, options: EngineOptions, pages: int, resumable: bool
) -> tuple[Runner, Store]:
    """Return what several sequences share an executor with."""
    if not isinstance(executor, FusedExecutor):
        return SingleRunner(executor), OneStore(executor.context, resumable)
    runner = FusedRunner(executor, options.slots or _MOST_SLOTS, options.deterministic)
    runner.warm()
    return runner, PagedStore(pages)


def _pages(options: EngineOptions, plan: Plan, context: int) -> int:
    """Return how many pages there are: what memory allows, at most each slot's whole context."""
    slots = options.slots or _MOST_SLOTS
    if slots > _MOST_SLOTS:
        raise BadInput(f"--slots {slots}: at most {_MOST_SLOTS}")
    most, free = slots * pages_of(context), free_memory(plan.device)
    if free is None:
        return most
    room = int((free - plan.weight_bytes) * options.memory)
    pages = room // (plan.cache_bytes_per_token * PAGE)
    if pages < pages_of(context):
        raise BadInput(
            f"--memory {options.memory:.0%}: {room / 1e9:.1f} GB hold {max(0, pages) * PAGE} "
            f"tokens, less than a context of {context}; a smaller --context, or more memory"
        )
    return min(most, pages)
