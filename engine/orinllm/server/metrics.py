"""Figures of the server for Prometheus, in vLLM's and llama-server's terms."""

import re
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from orinboard.sampling import Reader
from orinllm.batching.scheduler import Scheduler
from orinllm.batching.sequence import ScheduledSequence, SchedulerObserver
from orinllm.server.fields import HINTS
from orinllm.server.phase_energy import PhaseEnergy, try_start_phase_energy

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Seconds: vLLM's borders, of first tokens, of gaps and of whole requests.
_FIRST = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics(SchedulerObserver):
    """Counts what the scheduler tells, and asks it for the rest when somebody reads."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._energy: PhaseEnergy | None = None
        self._busy: Callable[[], bool] = lambda: False

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"orinllm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"orinllm_{name}", text, registry=registry)

        def histogram(name: str, text: str, borders: tuple[float, ...]) -> Histogram:
            return Histogram(f"orinllm_{name}", text, buckets=borders, registry=registry)

        self.requests = counter("requests", "HTTP requests by path and status.", "path", "status")
        self._ignored = counter(
            "ignored_fields", "Fields of requests that had no effect, by name.", "field"
        )
        self._ended = counter(
            "request_success", "Answers by the reason for their end.", "finished_reason"
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts, including cached ones.")
        self._cached = counter("prompt_tokens_cached", "Tokens of prompts taken from the cache.")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Tokens of prompts found in the cache.")
        self._said = counter("generation_tokens", "Tokens of answers.")
        self._preempted = counter("num_preemptions", "Answers interrupted for lack of memory.")
        self._worked = counter(
            "phase_seconds", "Seconds that the device worked, by phase.", "phase"
        )
        self._drafts = counter("spec_decode_num_drafts", "Steps in which tokens were guessed.")
        self._guessed = counter("spec_decode_num_draft_tokens", "Tokens that were guessed.")
        self._right = counter("spec_decode_num_accepted_tokens", "Guessed tokens that were right.")
        self._right_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were right, by their place in the guess.",
            "position",
        )
        self._first = histogram(
            "time_to_first_token_seconds", "Seconds from request to first token.", _FIRST
        )
        self._gap = histogram("inter_token_latency_seconds", "Seconds between tokens.", _GAP)
        self._queued = histogram("request_queue_time_seconds", "Seconds in the queue.", _FIRST)
        self._whole = histogram(
            "e2e_request_latency_seconds", "Seconds from request to last token.", _WHOLE
        )
        self._running = gauge("num_requests_running", "Answers being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests in the queue.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the cache in use, 0 to 1.")
        for phase in ("prefill", "decode"):
            self._worked.labels(phase)
        for reason in ("stop", "length", "cut", "cancelled", "error"):
            self._ended.labels(reason)

    def observe_scheduler(self, scheduler: Scheduler) -> None:
        """Ask a scheduler from now on."""
        self._running.set_function(lambda: scheduler.n_running)
        self._waiting.set_function(lambda: scheduler.n_waiting)
        self._usage.set_function(lambda: scheduler.store.n_used_pages / scheduler.store.total)
        self._busy = lambda: scheduler.n_running + scheduler.n_waiting > 0
        if self._energy is not None:
            self._energy.set_busy_check(self._busy)

    def start_measuring_energy(self, readers: Sequence[Reader] | None = None) -> None:
        """Count joules too, if this machine has power rails; takes up to a second."""
        self._energy = try_start_phase_energy(self._registry, readers)
        if self._energy is not None:
            self._energy.set_busy_check(self._busy)

    def count_ignored_fields(self, names: Iterable[str]) -> None:
        """Count a request's fields that have no effect; those of no protocol are one."""
        for name in names:
            last = re.sub(r"\[\d+\]", "", name).rpartition(".")[2]
            self._ignored.labels(last if last in HINTS else "other").inc()

    def prometheus_text(self) -> bytes:
        """Return all in Prometheus' format."""
        return generate_latest(self._registry)

    def on_sequence_begin(self, sequence: ScheduledSequence, waited: float) -> None:
        """See `SchedulerObserver`."""
        self._queued.observe(waited)
        self._prompt.inc(sequence.n_prompt)
        self._queries.inc(sequence.n_prompt if sequence.reuse else 0)
        self._hits.inc(sequence.n_cached)
        self._cached.inc(sequence.n_cached)

    def on_token(self, sequence: ScheduledSequence, gap: float, first: bool) -> None:
        """See `SchedulerObserver`."""
        (self._first if first else self._gap).observe(gap)
        self._said.inc()

    def on_sequence_end(self, sequence: ScheduledSequence, reason: str, seconds: float) -> None:
        """See `SchedulerObserver`."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)

    def on_preemption(self) -> None:
        """See `SchedulerObserver`."""
        self._preempted.inc()

    def on_phase_work(self, phase: str, seconds: float) -> None:
        """See `SchedulerObserver`."""
        self._worked.labels(phase).inc(seconds)
        if self._energy is not None:
            self._energy.on_phase_work(phase, seconds)

    def on_speculation(self, guessed: int, right: int) -> None:
        """See `SchedulerObserver`."""
        self._drafts.inc()
        self._guessed.inc(guessed)
        self._right.inc(right)
        for position in range(guessed):
            self._right_at.labels(str(position)).inc(position < right)
