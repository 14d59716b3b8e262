"""The exporter's HTTP towards clients that are slow, strange, or not welcome."""

import base64
import contextlib
import gzip
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import bcrypt
import pytest
from tests.telemetry.conftest import Tree, idle

from orinboard.energy import EnergySampler
from orinboard.files import Files, Roots
from orinboard.readings import Rail, Readings
from orinboard.sources import Board
from orinexporter import web
from orinexporter.service import Exporter
from orinexporter.web import Server
from orinexporter.webconfig import WebConfig, WebConfigError, load_web_config

Show = Callable[[Tree], Roots]


@contextmanager
def served(
    roots: Roots, config: WebConfig | None = None, hosts: tuple[str, ...] = ()
) -> Iterator[Server]:
    exporter = Exporter(Board(roots))
    with exporter, Server(("127.0.0.1", 0), exporter, config, hosts) as server:
        yield server


def ask(
    server: Server,
    path: str,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    host, port = server.address
    if context is None:
        connection = http.client.HTTPConnection(host, port, timeout=20)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=20, context=context)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def test_head_says_what_get_would(show: Show) -> None:
    with served(show(idle())) as server:
        status, headers, body = ask(server, "/metrics", "HEAD")
        assert (status, body) == (200, b"") and headers["content-type"].startswith("text/plain")
        assert int(headers["content-length"]) > 5000
        assert ask(server, "/metrics", "POST")[0] == 405


def test_gzip_for_those_who_take_it(show: Show) -> None:
    with served(show(idle())) as server:
        status, headers, body = ask(server, "/metrics", accept_encoding="gzip")
        assert status == 200 and headers["content-encoding"] == "gzip"
        assert b"jetson_module_power_watts 6.6" in gzip.decompress(body)
        assert "content-encoding" not in ask(server, "/metrics")[1]


def test_the_release_and_the_process(show: Show) -> None:
    with served(show(idle())) as server:
        text = ask(server, "/metrics")[2].decode()
    assert 'jetson_exporter_build_info{pythonversion="3.' in text
    assert "\nprocess_resident_memory_bytes " in text and "\nprocess_open_fds " in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9401", 200),
        ("[::1]:9401", 200),
        ("192.168.55.1", 200),
        ("localhost:9401", 200),
        ("LocalHost:9401", 200),
        ("orin.example.org:9401", 200),
        ("evil.example.org", 421),
        ("127.0.0.1.evil.example.org:9401", 421),
    ],
)
def test_only_names_of_ours_are_served(host: str, status: int, show: Show) -> None:
    """A page of somebody else whose name was made to lead here must not read the board."""
    with served(show(idle()), hosts=("orin.example.org",)) as server:
        assert ask(server, "/metrics", Host=host)[0] == status


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def web_config(folder: Path, text: str) -> Path:
    file = folder / "web.yml"
    file.write_text(text)
    return file


def hashed(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


def test_basic_auth(show: Show, tmp_path: Path) -> None:
    file = web_config(tmp_path, f"basic_auth_users:\n  prom: {hashed('sesame')}\n")
    with served(show(idle()), load_web_config(file)) as server:
        status, headers, body = ask(server, "/metrics")
        assert status == 401 and headers["www-authenticate"].startswith("Basic ")
        assert b"jetson" not in body
        for given in (
            basic("prom", "wrong"),
            basic("nobody", "sesame"),
            basic("nobody", ""),
            "Basic %%%",
            "Basic é",
            "Bearer sesame",
            "Basic " + base64.b64encode(b"no colon").decode(),
        ):
            assert ask(server, "/metrics", Authorization=given)[0] == 401, given
        for _ in range(2):
            assert ask(server, "/metrics", Authorization=basic("prom", "sesame"))[0] == 200
        # Another file while it serves: who had a password before has none now.
        server.reload(
            load_web_config(web_config(tmp_path, f"basic_auth_users: {{new: {hashed('x')}}}"))
        )
        assert ask(server, "/metrics", Authorization=basic("prom", "sesame"))[0] == 401
        assert ask(server, "/metrics", Authorization=basic("new", "x"))[0] == 200


@pytest.mark.parametrize("version", ["abc", "1..0", "1.x"])
def test_a_version_that_is_none(version: str, show: Show) -> None:
    with served(show(idle())) as server:
        accept = f"application/openmetrics-text; version={version}"
        status, _, body = ask(server, "/metrics", Accept=accept)
        assert status == 200 and b"jetson_info{" in body


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    files = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
         "subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return files


TLS = "tls_server_config:\n  cert_file: one.crt\n  key_file: one.key\n"


def test_tls_with_a_certificate_that_changes(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    file = web_config(tmp_path, TLS)
    trust = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    with served(show(idle()), load_web_config(file)) as server:
        assert server.url.startswith("https://")
        assert ask(server, "/healthz", context=trust)[0] == 200
        certificate(tmp_path, "one")  # renewed: other key, same names of files
        server.reload(load_web_config(file))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "/healthz", context=trust)
        renewed = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
        assert ask(server, "/healthz", context=renewed)[0] == 200
        old = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert ask(server, "/healthz", context=old)[0] == 200


def test_tls_asks_for_a_clients_certificate(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    crt, key = certificate(tmp_path, "client")
    asks = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: client.crt\n"
    config = load_web_config(web_config(tmp_path, TLS + asks))
    trust = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    with served(show(idle()), config) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(server, "/healthz", context=trust)
        trust.load_cert_chain(crt, key)
        assert ask(server, "/healthz", context=trust)[0] == 200


def test_a_reload_that_fails_leaves_the_certificate_as_it_was(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    file = web_config(tmp_path, TLS)
    trust = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    with served(show(idle()), load_web_config(file)) as server:
        # Half of a renewal: the certificate is new, its key is not there yet.
        (certificate(tmp_path, "two")[0]).replace(tmp_path / "one.crt")
        with pytest.raises(WebConfigError):
            server.reload(load_web_config(file))
        assert ask(server, "/healthz", context=trust)[0] == 200


def test_a_reload_can_ask_for_a_clients_certificate(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    authorities = [certificate(tmp_path, name) for name in ("client", "other")]
    trust = [ssl.create_default_context(cafile=str(tmp_path / "one.crt")) for _ in range(3)]
    for context, pair in zip(trust, authorities, strict=False):
        context.load_cert_chain(*pair)

    def ask_for(authority: str) -> list[bool]:
        asks = f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n"
        text = f"{asks}  client_ca_file: {authority}.crt\n"
        server.reload(load_web_config(web_config(tmp_path, text)))
        return [admitted(context) for context in trust]

    def admitted(context: ssl.SSLContext) -> bool:
        try:
            return ask(server, "/healthz", context=context)[0] == 200
        except (ssl.SSLError, ConnectionError):
            return False

    with served(show(idle()), load_web_config(web_config(tmp_path, TLS))) as server:
        assert admitted(trust[2])
        assert ask_for("client") == [True, False, False]
        # An authority that is no longer named is trusted no more.
        assert ask_for("other") == [False, True, False]


def test_a_reload_can_neither_begin_nor_end_tls(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    users = f"basic_auth_users: {{prom: {hashed('one')}}}\n"
    both, plain = (load_web_config(web_config(tmp_path, text)) for text in (TLS + users, users))
    for first, second, words in (
        (plain, both, "without TLS, and with only after a restart"),
        (both, plain, "with TLS, and without only after a restart"),
    ):
        with (
            served(show(idle()), first) as server,
            pytest.raises(WebConfigError, match=words),
        ):
            server.reload(second)


def test_clients_that_never_begin_tls_take_no_descriptors(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "most_connections", lambda: 8)
    monkeypatch.setattr(web, "HANDSHAKE_SECONDS", 600.0)
    certificate(tmp_path, "one")
    trust = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    with served(show(idle()), load_web_config(web_config(tmp_path, TLS))) as server:
        kept = http.client.HTTPSConnection(*server.address, timeout=60, context=trust)
        kept.request("GET", "/healthz")
        kept.getresponse().read()
        silent = [socket.create_connection(server.address, timeout=60) for _ in range(40)]

        def waiting(client: socket.socket) -> bool:
            client.setblocking(False)
            try:
                return client.recv(1) != b""
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False

        assert until(lambda: sum(map(waiting, silent)) <= 8)
        assert ask(server, "/healthz", context=trust)[0] == 200
        # A client that is through the handshake is not one of them.
        kept.request("GET", "/healthz")
        assert kept.getresponse().status == 200
        kept.close()
        for client in silent:
            client.close()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{TLS}  client_ca_file: a", "client_ca_file and a client_auth_type that verifies go"),
        (f"{TLS}  client_auth_type: VerifyClientCertIfGiven", "client_ca_file and a client_auth"),
        ("tls_server_confg: {}", "'tls_server_confg' is not understood"),
        ("tls_server_config: {cert_file: a}", "key_file is missing"),
        ("tls_server_config: {cert_file: a, key_file: b, cipher: x}", "'cipher' is not understood"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS10}", "TLS12, TLS13"),
        ("basic_auth_users: {me: sesame}", "me has no bcrypt hash; make one: htpasswd -nBC 10 me"),
        ("basic_auth_users: [me]", "is no mapping"),
        ("- a", "it is no mapping"),
        ("{", "no YAML"),
    ],
)
def test_a_bad_file_is_refused_in_a_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = web_config(tmp_path, text)
    with pytest.raises(WebConfigError) as caught:
        load_web_config(file)
    assert str(caught.value).startswith(f"{file}: ") and complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match=r"one.crt.*one.key: No such file"):
        load_web_config(web_config(tmp_path, TLS)).context()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_five_hundred_dripping_clients(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent requests, a byte now and then: no thread each, and scrapes are answered."""
    monkeypatch.setattr(web, "DEADLINE_SECONDS", 2.0)
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
    monkeypatch.setattr(web, "most_connections", lambda: 3)
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
    monkeypatch.setattr(web, "most_connections", lambda: 4)
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


def test_clients_accepted_in_one_go_do_not_cut_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "most_connections", lambda: 4)
    with web.Listening(socket.AF_INET) as listening, contextlib.ExitStack() as stack:
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
    monkeypatch.setattr(web, "DEADLINE_SECONDS", 1.0)
    with served(show(idle())) as server:
        before = descriptors()
        deaf = socket.create_connection(server.address)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        assert until(lambda: descriptors() <= before + 1)
        deaf.close()


def test_few_descriptors(show: Show) -> None:
    """With a limit of 64, idle clients take no scrape's place."""
    folder = os.path.dirname(show(idle()).sys)
    process = subprocess.Popen(
        ["prlimit", "--nofile=64", sys.executable, "-m", "orinexporter.cli", "--replay", folder,
         "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr
        line = next(line for line in process.stderr if "serving " in line)
        port = int(line.rstrip("/\n").rpartition(":")[2])
        idlers = []
        for _ in range(200):
            idlers.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        # Behind 200 who are cut only when their time is up it would wait a minute.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        for one in idlers:
            one.close()
    finally:
        process.kill()
        process.communicate()


def test_sighup_reads_the_file_again_or_refuses(show: Show, tmp_path: Path) -> None:
    folder = os.path.dirname(show(idle()).sys)
    file = web_config(tmp_path, f"basic_auth_users: {{prom: {hashed('one')}}}")
    process = subprocess.Popen(
        [sys.executable, "-m", "orinexporter.cli", "--replay", folder, "--listen", "127.0.0.1:0",
         "--web-config", str(file)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr
        line = next(line for line in process.stderr if "serving " in line)
        port = int(line.rstrip("/\n").rpartition(":")[2])

        def status(password: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request(
                "GET", "/healthz", headers={"Authorization": basic("prom", password)}
            )
            return connection.getresponse().status

        assert (status("one"), status("two")) == (200, 401)
        file.write_text("nonsense: 1")
        process.send_signal(signal.SIGHUP)
        assert "SIGHUP: all stays as it was: " in process.stderr.readline()
        assert status("one") == 200
        file.write_text(f"basic_auth_users: {{prom: {hashed('two')}}}")
        process.send_signal(signal.SIGHUP)
        assert "is read again" in process.stderr.readline()
        assert (status("one"), status("two")) == (401, 200)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_health_knows_the_samplers_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sensor that blocks for ever: the page goes on, and says that energy does not."""
    monkeypatch.setattr("orinboard.energy.STALE_SECONDS", 0.3)
    answers = iter([Readings(rails=(Rail("VDD_IN", "1-0040", watts=5.0),))] * 3)

    def blocks(files: Files) -> Readings:
        answer = next(answers, None)
        if answer is None:
            time.sleep(30)
        return answer or Readings()

    sampler = EnergySampler(hertz=50, readers=[blocks])
    exporter = Exporter(Board(Roots(), ()), sampler)
    with exporter, Server(("127.0.0.1", 0), exporter) as server:
        assert until(lambda: ask(server, "/healthz")[0] == 503)
        assert b"the energy sampler's last sample is " in ask(server, "/healthz")[2]
        text = ask(server, "/metrics")[2].decode()
        assert 'jetson_scrape_source_success{source="energy"} 0.0' in text
