"""Budgets: a source that blocks, raises or crawls costs itself and nothing else."""

import threading
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace

import pytest
from tests.telemetry.conftest import until

from orinboard.files import FileReader, Roots
from orinboard.readings import OnlineCpus, Readings, ThermalZone
from orinboard.sources import TIMEOUT, BoardReader, PendingReading, SourceOutcome
from orinexporter.exporter import Exporter

ZONE = Readings(zones=(ThermalZone("tj", 40.0),))


def board(budget: float = 0.5, **readers: Callable[[FileReader], Readings]) -> BoardReader:
    return BoardReader(Roots(), readers, budget=budget, readers=readers)


def threads() -> set[threading.Thread]:
    """The readers' threads that live; a test compares sets, as one of an earlier test may end."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("read ")}


class Hung(threading.Event):
    """The event of a flight that hangs; waiting for it moves the clock of the test alone."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.waits = 1000.0, list[float | None]()

    def wait(self, timeout: float | None = None) -> bool:
        """True once it has done."""
        self.waits.append(timeout)
        self.clock += timeout or 0.0
        return self.is_set()


def test_a_source_that_blocks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release, done, calls = threading.Event(), threading.Event(), Hung(), []
    monkeypatch.setattr("orinboard.sources.time", SimpleNamespace(monotonic=lambda: done.clock))
    # Sources begin in their order: the second flight is the one that hangs.
    events = chain([threading.Event(), done], iter(threading.Event, None))
    monkeypatch.setattr(
        "orinboard.sources.PendingReading", lambda started: PendingReading(started, next(events))
    )

    def hangs(files: FileReader) -> Readings:
        calls.append(1)
        begun.set()
        release.wait()
        return Readings(cpu=OnlineCpus((0,)))

    with board(60.0, works=lambda files: ZONE, hangs=hangs) as both:
        first = both.read()
        assert first.readings == ZONE
        assert first.outcomes["hangs"] == SourceOutcome((TIMEOUT,), 60.0)
        text = Exporter(both).content_type_and_exposition()[1].decode()
        assert 'jetson_scrape_source_success{source="hangs"} 0.0' in text
        assert f'jetson_read_errors_total{{errno="{TIMEOUT}",source="hangs"}} 1.0' in text
        assert 'jetson_temperature_celsius{zone="tj"} 40.0' in text
        before = threads()
        # It is 1060 now, and each flight that begins has its budget; the one that hangs has none.
        for _ in range(50):
            assert both.read().readings == ZONE
        assert done.waits == [60.0] + [0] * 51
        assert threads() <= before
        assert begun.wait(60) and len(calls) == 1
        release.set()
        assert threading.Event.wait(done, 60)
        again = both.read()
        assert (again.readings.cpu, again.outcomes["hangs"].errors) == (OnlineCpus((0,)), ())
        assert len(calls) == 2


def test_a_source_that_raises_costs_only_itself() -> None:
    def breaks(files: FileReader) -> Readings:
        raise RuntimeError("a board nobody thought of")

    with board(breaks=breaks, works=lambda files: ZONE) as both:
        snapshot = both.read()
        assert snapshot.readings == ZONE
        assert snapshot.outcomes["breaks"].errors == ("RuntimeError",)
        assert both.read().outcomes["breaks"].errors == ("RuntimeError",)


def test_readers_at_the_same_time_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    joined, together = threading.Semaphore(0), threading.Event()

    def slow(files: FileReader) -> Readings:
        calls.append(1)
        together.wait(60)
        return ZONE

    with board(budget=60.0, slow=slow) as one:
        (source,) = one._sources
        start = source.start_or_join_reading

        def told() -> PendingReading:
            flight = start()
            joined.release()
            return flight

        monkeypatch.setattr(source, "start_or_join_reading", told)
        results: list[Readings] = []
        scrapers = [
            threading.Thread(target=lambda: results.append(one.read().readings)) for _ in range(50)
        ]
        for scraper in scrapers:
            scraper.start()
        assert all(joined.acquire(timeout=60) for _ in scrapers)
        together.set()
        for scraper in scrapers:
            scraper.join()
    assert results == [ZONE] * 50
    assert len(calls) == 1


def test_threads_end_with_the_board() -> None:
    before = threads()
    for _ in range(20):
        with board(a=lambda files: ZONE, b=lambda files: ZONE) as two:
            two.read()
    assert until(lambda: threads() <= before)
