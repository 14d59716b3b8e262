"""Budgets: a source that blocks, raises or crawls costs itself and nothing else."""

import threading
import time
from collections.abc import Callable

import pytest
from tests.telemetry.conftest import Tree, idle

from orinboard.files import Files, Roots
from orinboard.readings import Cpu, Readings, Zone
from orinboard.sources import TIMEOUT, Board, Flight
from orinexporter.service import Exporter

ZONE = Readings(zones=(Zone("tj", 40.0),))


def board(budget: float = 0.5, **readers: Callable[[Files], Readings]) -> Board:
    return Board(Roots(), readers, budget=budget, readers=readers)


def threads() -> set[threading.Thread]:
    """The readers' threads that live; a test compares sets, as one of an earlier test may end."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("read ")}


def test_a_source_that_blocks_for_ever() -> None:
    release = threading.Event()
    calls = []

    def hangs(files: Files) -> Readings:
        calls.append(1)
        release.wait()
        return Readings(cpu=Cpu((0,)))

    with board(hangs=hangs, works=lambda files: ZONE) as both:
        begun = time.monotonic()
        first = both.read()
        assert 0.5 <= time.monotonic() - begun < 5
        assert first.readings == ZONE
        assert first.outcomes["hangs"].errors == (TIMEOUT,)
        before = threads()
        begun = time.monotonic()
        for _ in range(50):
            assert both.read().readings == ZONE
        # The budget was spent once: nobody waits 50 times for it again; no thread is added.
        assert time.monotonic() - begun < 20
        assert threads() <= before
        assert len(calls) == 1
        release.set()
        deadline = time.monotonic() + 60
        while both.read().readings.cpu is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert both.read().outcomes["hangs"].errors == ()


def test_a_source_that_blocks_does_not_block_a_scrape(stage_board: Board) -> None:
    exporter = Exporter(stage_board)
    begun = time.monotonic()
    text = exporter.exposition()[1].decode()
    assert time.monotonic() - begun < 5
    assert 'jetson_scrape_source_success{source="hangs"} 0.0' in text
    assert f'jetson_read_errors_total{{errno="{TIMEOUT}",source="hangs"}} 1.0' in text
    assert "jetson_module_power_watts 6.6" in text


@pytest.fixture
def stage_board(show: Callable[[Tree], Roots]) -> Board:
    from orinboard.sensors.hwmon import read_rails

    roots = show(idle())
    forever = threading.Event()
    readers = {"rails": read_rails, "hangs": lambda files: (forever.wait(), Readings())[1]}
    return Board(roots, readers, budget=0.5, readers=readers)


def test_a_source_that_raises_costs_only_itself() -> None:
    def breaks(files: Files) -> Readings:
        raise RuntimeError("a board nobody thought of")

    with board(breaks=breaks, works=lambda files: ZONE) as both:
        snapshot = both.read()
        assert snapshot.readings == ZONE
        assert snapshot.outcomes["breaks"].errors == ("RuntimeError",)
        assert both.read().outcomes["breaks"].errors == ("RuntimeError",)


def test_a_source_the_board_does_not_have_is_absent() -> None:
    with board(nothing=lambda files: Readings()) as one:
        assert one.read().outcomes == {}


def test_readers_at_the_same_time_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    joined, together = threading.Semaphore(0), threading.Event()

    def slow(files: Files) -> Readings:
        calls.append(1)
        together.wait(60)
        return ZONE

    with board(budget=60.0, slow=slow) as one:
        (source,) = one._sources
        start = source.start

        def told() -> Flight:
            flight = start()
            joined.release()
            return flight

        monkeypatch.setattr(source, "start", told)
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
    deadline = time.monotonic() + 60
    while not threads() <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before
