"""The exporter: one board, its energy sampler and its history, as text for Prometheus."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from orinboard.board import throttle_events_between
from orinboard.energy import EnergySampler
from orinboard.readings import Readings, ThrottleCounter
from orinboard.sources import BoardReader, Snapshot, SourceOutcome
from orinexporter import families, page
from orinexporter.history import INTERVAL_SECONDS, POINTS, Moment, moment_of_readings

#: The sampler's name among the sources, and that of turning readings into text.
ENERGY, EXPOSITION = "energy", "exposition"
#: The last line of OpenMetrics; formats whose texts are kept, as a client names versions freely.
END, MOST_FORMATS = b"# EOF\n", 4


class OneMetricCollector(Collector):
    """One family, for an encoder."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        """Give the family."""
        return [self._metric]


class Exporter:
    """Reads the board at every scrape; counts energy and errors in between.

    Use it as a context manager: it owns the sampler's thread and the history's.
    """

    def __init__(self, board: BoardReader, sampler: EnergySampler | None = None) -> None:
        self._board, self._sampler = board, sampler
        self._lock = threading.Lock()
        self._errors: Counter[tuple[str, str]] = Counter()
        self._events: dict[str, tuple[int, ThrottleCounter]] = {}
        self._history: deque[Moment] = deque(maxlen=POINTS)
        self._newest = -math.inf, Readings()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._history_loop, name="history", daemon=True)
        self._registry = CollectorRegistry(auto_describe=False)
        # By content type and family: the newest rows and their text.
        self._texts: dict[str, dict[str, tuple[families.KnownRows, bytes]]] = {}

    def register_collector(self, collector: Collector) -> None:
        """Let each exposition have a collector's families too."""
        self._registry.register(collector)

    def read_board(self) -> Snapshot:
        """One reading of the board, its errors counted, and how the sampler does."""
        snapshot = self._board.read()
        for name, outcome in snapshot.outcomes.items():
            for error in outcome.errors:
                self._count_error(name, error)
        readings = replace(
            snapshot.readings, throttles=self._throttles_since_exporter_start(snapshot.readings)
        )
        snapshot = replace(snapshot, readings=readings)
        self._newest = time.monotonic(), readings
        if self._sampler is None or not self._sampler.joules_by_rail():
            return snapshot
        health = self._sampler.health()
        errors = () if health.complaint is None else ("ESTALE",)
        energy = SourceOutcome(errors, self._sampler.smoothed_read_seconds)
        return Snapshot(snapshot.readings, {**snapshot.outcomes, ENERGY: energy})

    def _throttles_since_exporter_start(self, readings: Readings) -> tuple[ThrottleCounter, ...]:
        """Throttle events since we began: a board's own counters begin anywhere when it boots."""
        found = []
        with self._lock:
            for throttle in readings.throttles:
                total, before = self._events.get(throttle.event, (0, throttle))
                total += throttle_events_between(before, throttle)
                if throttle.count is not None:
                    self._events[throttle.event] = total, throttle
                count = None if throttle.count is None else total
                found.append(replace(throttle, count=count))
        return tuple(found)

    def complaint(self) -> str | None:
        """The exporter's problem, in words; None if there is none."""
        return None if self._sampler is None else self._sampler.health().complaint

    def _iter_family_rows(self) -> Iterator[tuple[families.MetricFamily, families.KnownRows]]:
        """The families of one scrape that have rows; one that fails costs no other."""
        snapshot = self.read_board()
        for family in families.BOARD:
            yield family, self._safe_rows(family, snapshot.readings)
        if self._sampler:
            for family in families.ENERGY:
                yield family, self._safe_rows(family, self._sampler)
        with self._lock:
            errors = dict(self._errors)
        if self._sampler:
            errors |= {(ENERGY, name): n for name, n in self._sampler.health().errors.items()}
        for family in families.SOURCES:
            yield family, family.known_rows(snapshot, errors)

    def _safe_rows(self, family: families.MetricFamily, given: object) -> families.KnownRows:
        try:
            return family.known_rows(given)
        # Whatever a board nobody thought of answers: the rest of the page goes out.
        except Exception as error:
            self._count_error(EXPOSITION, type(error).__name__)
            return []

    def _count_error(self, source: str, error: str) -> None:
        with self._lock:
            self._errors[source, error] += 1

    def content_type_and_exposition(self, accept: str = "") -> tuple[str, bytes]:
        """Content type and body, in the format that `accept` asks for."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is none, such as `version=abc`
            encode, content_type = choose_encoder("")
        if content_type not in self._texts and len(self._texts) >= MOST_FORMATS:
            self._texts = {}
        texts = self._texts.setdefault(content_type, {})
        body = b""
        for family, rows in self._iter_family_rows():
            # Most families are as they were a second ago.
            before, text = texts.get(family.name, ([], b""))
            if rows != before:
                text = encode(OneMetricCollector(family.prometheus_metric(rows))).removesuffix(END)
                texts[family.name] = rows, text
            body += text if rows else b""
        return content_type, body + encode(self._registry)

    def html_page(self) -> bytes:
        """The page for people, as it is now."""
        snapshot = self.read_board()
        counters = self._sampler.joules_by_rail() if self._sampler else {}
        return page.render_page(snapshot, list(self._history), counters).encode()

    def _history_loop(self) -> None:
        while True:
            try:
                # What a scraper had read a moment ago is not read again.
                if time.monotonic() - self._newest[0] > INTERVAL_SECONDS:
                    self.read_board()
                at, readings = self._newest
                self._history.append(moment_of_readings(readings, at))
            except Exception as error:
                self._count_error("history", type(error).__name__)
            if self._stop.wait(INTERVAL_SECONDS):
                return

    def __enter__(self) -> "Exporter":
        if self._sampler:
            self._sampler.start_sampling()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._sampler:
            self._sampler.stop_after_last_sample()
        self._board.close()
