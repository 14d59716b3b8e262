"""The exporter's HTTP: who is welcome, and how that changes while it runs."""

import base64
import gzip
import http.client
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import bcrypt
import pytest
from tests.telemetry.conftest import Show, idle, until
from tests.telemetry.orinexporter.served import ask, exporting, folder_of, served

from orinexporter import web
from orinexporter.webconfig import WebConfig, WebConfigError, load_web_config

TEXT, OPENMETRICS = "text/plain; version=0.0.4", "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        (f"{OPENMETRICS};version=1.0.0,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
        # Versions that are none.
        (f"{OPENMETRICS}; version=abc", TEXT),
        (f"{OPENMETRICS}; version=1..0", TEXT),
        (f"{OPENMETRICS}; version=1.x", TEXT),
    ],
)
def test_formats_methods_and_compression(accept: str, content_type: str, show: Show) -> None:
    with served(show(idle())) as server:
        status, headers, body = ask(server, "/metrics", Accept=accept)
        assert status == 200 and headers["content-type"].startswith(content_type)
        assert b"\njetson_module_power_watts 6.6" in body and "content-encoding" not in headers
        assert body.endswith(b"# EOF\n") == (content_type == OPENMETRICS)
        assert b'jetson_exporter_build_info{pythonversion="3.' in body
        assert b"\nprocess_resident_memory_bytes " in body and b"\nprocess_open_fds " in body
        headers, body = ask(server, "/metrics", accept_encoding="gzip", Accept=accept)[1:]
        assert headers["content-encoding"] == "gzip"
        assert b"jetson_module_power_watts 6.6" in gzip.decompress(body)
        status, headers, body = ask(server, "/metrics", "HEAD", Accept=accept)
        assert (status, body) == (200, b"") and headers["content-type"].startswith(content_type)
        assert int(headers["content-length"]) > 5000
        assert ask(server, "/metrics", "POST")[0] == 405


OURS = (
    *("127.0.0.1:9401", "[::1]:9401", "192.168.55.1", "localhost:9401", "LocalHost:9401"),
    "orin.example.org:9401",
)


def test_only_names_of_ours_are_served(show: Show) -> None:
    """A page of somebody else whose name was made to lead here must not read the board."""
    with served(show(idle()), hosts=("orin.example.org",)) as server:
        for host in (*OURS, "evil.example.org", "127.0.0.1.evil.example.org:9401"):
            assert ask(server, "/metrics", Host=host)[0] == (200 if host in OURS else 421), host


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
        server.replace_config(
            load_web_config(web_config(tmp_path, f"basic_auth_users: {{new: {hashed('x')}}}"))
        )
        assert ask(server, "/metrics", Authorization=basic("prom", "sesame"))[0] == 401
        assert ask(server, "/metrics", Authorization=basic("new", "x"))[0] == 200


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
        server.replace_config(load_web_config(file))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "/healthz", context=trust)
        renewed = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
        assert ask(server, "/healthz", context=renewed)[0] == 200
        old = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert ask(server, "/healthz", context=old)[0] == 200


def test_a_reload_that_fails_leaves_the_certificate_as_it_was(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    file = web_config(tmp_path, TLS)
    trust = ssl.create_default_context(cafile=str(tmp_path / "one.crt"))
    with served(show(idle()), load_web_config(file)) as server:
        # Half of a renewal: the certificate is new, its key is not there yet.
        (certificate(tmp_path, "two")[0]).replace(tmp_path / "one.crt")
        with pytest.raises(WebConfigError):
            server.replace_config(load_web_config(file))
        assert ask(server, "/healthz", context=trust)[0] == 200


def test_a_clients_certificate_is_asked_for(show: Show, tmp_path: Path) -> None:
    """From the start, by a reload that names another authority, and until one names none."""
    certificate(tmp_path, "one")
    authorities = [certificate(tmp_path, name) for name in ("client", "other")]
    trust = [ssl.create_default_context(cafile=str(tmp_path / "one.crt")) for _ in range(3)]
    for context, pair in zip(trust, authorities, strict=False):
        context.load_cert_chain(*pair)

    def config(authority: str) -> WebConfig:
        asks = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: "
        return load_web_config(
            web_config(tmp_path, TLS + (f"{asks}{authority}.crt\n" if authority else ""))
        )

    def is_admitted(context: ssl.SSLContext) -> bool:
        try:
            return ask(server, "/healthz", context=context)[0] == 200
        except (ssl.SSLError, ConnectionError):
            return False

    with served(show(idle()), config("client")) as server:
        assert [is_admitted(context) for context in trust] == [True, False, False]
        for authority, admitted in (
            ("other", [False, True, False]),
            ("", [True, True, True]),
            ("client", [True, False, False]),
        ):
            server.replace_config(config(authority))
            assert [is_admitted(context) for context in trust] == admitted


def test_a_reload_can_neither_begin_nor_end_tls(show: Show, tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    users = f"basic_auth_users: {{prom: {hashed('one')}}}\n"
    both, plain = (load_web_config(web_config(tmp_path, text)) for text in (TLS + users, users))
    for first, second, words in (
        (plain, both, "without TLS, and with only after a restart"),
        (both, plain, "with TLS, and without only after a restart"),
    ):
        with served(show(idle()), first) as server, pytest.raises(WebConfigError, match=words):
            server.replace_config(second)


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
        load_web_config(web_config(tmp_path, TLS)).new_ssl_context()


def test_sighup_reads_the_file_again_or_refuses(show: Show, tmp_path: Path) -> None:
    file = web_config(tmp_path, f"basic_auth_users: {{prom: {hashed('one')}}}")
    with exporting(folder_of(show(idle())), "--web-config", str(file)) as (process, url):

        def status(password: str) -> int:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
            connection.request(
                "GET", "/healthz", headers={"Authorization": basic("prom", password)}
            )
            return connection.getresponse().status

        assert process.stderr
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
