"""The exporter's HTTP towards clients that are slow, silent, or too many."""

import contextlib
import http.client
import os
import socket
import time
from urllib.parse import urlsplit

import pytest
from tests.telemetry.conftest import Show, idle, until
from tests.telemetry.orinexporter.served import ask, exporting, folder_of, served

from orinboard.energy import EnergySampler
from orinboard.files import FileReader, Roots
from orinboard.readings import Rail, Readings
from orinboard.sources import BoardReader
from orinexporter import web
from orinexporter.exporter import Exporter
from orinexporter.web import ExporterServer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_five_hundred_dripping_clients(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent requests, a byte now and then: no thread each, and scrapes are answered."""
    monkeypatch.setattr(web.LimitedConnection, "patience", 2.0)
    with served(show(idle())) as server:
        before, threads = descriptors(), len(os.listdir("/proc/self/task"))
        dripping = []
        for _ in range(500):
            one = socket.create_connection(server.address)
            one.sendall(b"GET /metrics HTTP/1.1\r\nHo")
            dripping.append(one)
        assert ask(server, "/metrics")[0] == 200
        assert len(os.listdir("/proc/self/task")) <= threads + web.WORKERS + 20
        # Ours, and the server's end of those that it holds.
        assert descriptors() - before - 500 <= web.most_connections() + 20

        def cut() -> bool:
            for one in dripping:
                try:
                    one.send(b"x")
                except OSError:
                    continue
            return descriptors() - before - 500 <= 12

        assert until(cut), "a client that drips is cut, however often it sends"
        for one in dripping:
            one.close()
        assert ask(server, "/healthz")[0] == 200


def test_an_answer_gives_the_client_new_time(show: Show) -> None:
    with served(show(idle())) as server:
        connection = http.client.HTTPConnection(*server.address, timeout=20)
        ends = []
        for _ in range(2):
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            (client,) = server._server.server_state.connections
            assert isinstance(client, web.LimitedConnection)
            ends.append(client._deadline.when())
        assert ends[1] > ends[0]
        connection.close()


def test_of_too_many_the_one_that_waits_longest_is_cut(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.LimitedConnection, "most", lambda _: 3)
    with served(show(idle())) as server:
        clients = []
        for number in range(4):
            clients.append(socket.create_connection(server.address, timeout=20))
            there = server._server.server_state.connections
            assert until(lambda: len(there) == min(number + 1, 3))  # noqa: B023
        with contextlib.suppress(ConnectionResetError):
            assert clients[0].recv(1) == b""
        for client in clients[1:]:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        for client in clients:
            client.close()


def test_of_too_many_a_scraper_outranks_a_dripper(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was answered stays, although it has waited longer than those that never asked."""
    monkeypatch.setattr(web.LimitedConnection, "most", lambda _: 4)
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(show(idle())) as server, contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            client = socket.create_connection(server.address, timeout=20)
            return stack.enter_context(contextlib.closing(client))

        def answered() -> bool:
            scraper.sendall(ask)
            data = b""
            while not data.endswith(b"ok\n") and (more := scraper.recv(4096)):
                data += more
            return data.endswith(b"ok\n")

        scraper = connect()
        assert answered()
        for _ in range(12):
            connect().sendall(b"GET /metr")
            time.sleep(0.02)
        assert answered()
        # Nor do those outrank it who were answered once and then drip.
        for _ in range(12):
            connect().sendall(ask + b"GET /metr")
            time.sleep(0.02)
        assert answered()


def test_clients_accepted_in_one_go_do_not_cut_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "most_connections", lambda: 4)
    with web.ListeningSocket(socket.AF_INET) as listening, contextlib.ExitStack() as stack:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)

        def accept() -> socket.socket:
            stack.enter_context(socket.create_connection(listening.getsockname()))
            return stack.enter_context(listening.accept()[0])

        served_clients = [accept() for _ in range(4)]
        listening.guarded = lambda: [one.fileno() for one in served_clients]
        together = [accept() for _ in range(4)]
        assert [one.send(b"a") for one in together] == [1] * 4
        accept()  # the fifth that waits for its handshake
        with pytest.raises(BrokenPipeError):
            together[0].send(b"a")


def test_a_client_that_never_reads_its_answer(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.LimitedConnection, "patience", 1.0)
    with served(show(idle())) as server:
        before = descriptors()
        deaf = socket.create_connection(server.address)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        assert until(lambda: descriptors() <= before + 1)
        deaf.close()


def test_few_descriptors(show: Show) -> None:
    """With a limit of 64, idle clients take no scrape's place."""
    limit = ("prlimit", "--nofile=64")
    with exporting(folder_of(show(idle())), before=limit) as (_, url):
        where = urlsplit(url)
        idlers = [
            socket.create_connection((where.hostname, where.port), timeout=30) for _ in range(200)
        ]
        # Behind 200 who are cut only when their time is up it would wait a minute.
        connection = http.client.HTTPConnection(where.netloc, timeout=30)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        for one in idlers:
            one.close()


def test_health_knows_the_samplers_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sensor that blocks for ever: the page goes on, and says that energy does not."""
    monkeypatch.setattr("orinboard.energy.STALE_SECONDS", 0.3)
    answers = iter([Readings(rails=(Rail("VDD_IN", "1-0040", watts=5.0),))] * 3)

    def blocks(files: FileReader) -> Readings:
        answer = next(answers, None)
        if answer is None:
            time.sleep(30)
        return answer or Readings()

    sampler = EnergySampler(hertz=50, readers=[blocks])
    exporter = Exporter(BoardReader(Roots(), ()), sampler)
    with exporter, ExporterServer(("127.0.0.1", 0), exporter) as server:
        assert until(lambda: ask(server, "/healthz")[0] == 503)
        assert b"the energy sampler's last sample is " in ask(server, "/healthz")[2]
        text = ask(server, "/metrics")[2].decode()
        assert 'jetson_scrape_source_success{source="energy"} 0.0' in text
