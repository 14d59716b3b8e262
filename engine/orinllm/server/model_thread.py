"""The model's thread, and how it is: loading, ready, failed."""

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable

from orinllm.batching.sequence import SchedulerObserver
from orinllm.cpu.executor import CpuRunner
from orinllm.errors import BadInput
from orinllm.server.choices import EventBridge
from orinllm.server.engine import ServedModel
from orinllm.server.errors import ApiError
from orinllm.server.metrics import Metrics
from orinllm.server.request_jobs import stopping_error
from orinllm.server.web.systemd_notify import tell_systemd

# Seconds after which somebody who came while the model loads may try again.
_RETRY_SECONDS = 5


class SystemdWatchdog:
    """Tells systemd that a service gets on, as often as it wants to hear it."""

    def __init__(self) -> None:
        # systemd wants a sign twice in the time after which it takes a service for dead.
        given = os.environ.get("WATCHDOG_USEC", "0")
        if not given.isdecimal():
            raise BadInput(f"WATCHDOG_USEC={given}: microseconds were expected, as in 30000000")
        self._every = float(given) / 4e6
        self._last = 0.0

    def tell_alive(self) -> None:
        """Keep the watchdog quiet; cheap to call often."""
        now = time.monotonic()
        if self._every and now - self._last >= self._every:
            self._last = now
            tell_systemd("WATCHDOG=1")


class ModelThread:
    """Loads a model in a thread of its own, which then is its scheduler's.

    The event loop calls `on_loaded` and `on_failure` (one line, and whether the user caused it).
    """

    def __init__(
        self, load: Callable[[SchedulerObserver], ServedModel], watchdog: SystemdWatchdog
    ) -> None:
        self.metrics, self._watchdog = Metrics(), watchdog
        self.on_loaded: Callable[[ServedModel], None] = lambda engine: None
        self.on_failure: Callable[[str, bool], None] = lambda why, mendable: None
        self._load = load
        self._engine: ServedModel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._post: EventBridge | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._load_and_run, name="scheduler", daemon=True)

    def start(self) -> None:
        """Begin to load; called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._post = EventBridge(self._loop)
        self._thread.start()

    @property
    def event_bridge(self) -> EventBridge:
        """The thread-safe way of tokens to the event loop."""
        assert self._post is not None
        return self._post

    @property
    def required_engine(self) -> ServedModel:
        """The model; raises ApiError while there is none."""
        if self._stopping:
            raise stopping_error()
        if self._engine is None:
            raise ApiError(
                503,
                "the model is loading",
                code="loading",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )
        return self._engine

    def stop(self, grace: float) -> None:
        """Take no more requests; cut off after `grace` seconds what still runs."""
        assert self._loop is not None
        self._stopping = True
        if self._engine is not None:
            self._engine.scheduler.stop_accepting()
            self._loop.call_later(grace, self._engine.scheduler.end_all)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the thread so long; say whether it ended."""
        if self._engine is not None:
            self._engine.scheduler.stop_when_idle()
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _load_and_run(self) -> None:
        try:
            engine = self._load(self.metrics)
        except BadInput as error:
            self._call_in_loop(self.on_failure, str(error), True)
            return
        except Exception as error:  # each device raises what its libraries do
            traceback.print_exc()
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._call_in_loop(self.on_failure, f"the model does not load: {why}", False)
            return
        scheduler = engine.scheduler
        scheduler.on_alive, scheduler.on_tokens_handed = (
            self._watchdog.tell_alive,
            self.event_bridge.flush,
        )
        scheduler.on_failure = self._on_scheduler_failure
        if isinstance(scheduler.runner, CpuRunner):  # its steps take the cores from the event loop
            scheduler.on_first_token = self.event_bridge.wait_until_sent
        self.metrics.observe_scheduler(scheduler)
        self._engine = engine
        self._call_in_loop(self.on_loaded, engine)
        scheduler.run()

    def _on_scheduler_failure(self, why: str) -> None:
        assert self._engine is not None
        if (failure := self._engine.scheduler.failure) is not None:
            traceback.print_exception(failure)
        self._call_in_loop(self.on_failure, why, False)

    def _call_in_loop(self, call: Callable[..., None], *values: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *values)
