"""PasswordCheck and versions of TLS: what is tried, what is known, what waits for what."""

import socket
import ssl
import threading
from pathlib import Path

import bcrypt
import pytest
from tests.telemetry.conftest import Show, idle, until
from tests.telemetry.orinexporter.served import ask, served
from tests.telemetry.orinexporter.test_web import TLS, basic, certificate, hashed, web_config

from orinexporter.webconfig import PasswordCheck, load_web_config


def test_a_wrong_password_stays_wrong() -> None:
    """A tried password is not taken for a right one; a password holds for its own user."""
    passwords = PasswordCheck({"a": hashed("one").encode(), "b": hashed("two").encode()})
    for _ in range(2):
        for wrong in (("a", b"two"), ("nobody", b"")):
            assert not passwords.verify_with_bcrypt(*wrong)
            assert not passwords.was_right_before(*wrong)
    assert passwords.verify_with_bcrypt("a", b"one") and passwords.was_right_before("a", b"one")
    assert not passwords.was_right_before("b", b"one")


def test_the_least_version_of_tls(tmp_path: Path) -> None:
    certificate(tmp_path, "one")
    for line, least in (("", ssl.TLSVersion.TLSv1_2), ("TLS13", ssl.TLSVersion.TLSv1_3)):
        text = TLS + (f"  min_version: {line}\n" if line else "")
        context = load_web_config(web_config(tmp_path, text)).new_ssl_context()
        assert context and context.minimum_version == least


def test_guesses_of_passwords_hold_no_scrape_up(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known users come in at once, however many others guess."""
    file = web_config(tmp_path, f"basic_auth_users:\n  prom: {hashed('sesame')}\n")
    go_on = threading.Event()
    check = bcrypt.checkpw

    def slow(password: bytes, stored: bytes) -> bool:
        if password == b"guess":
            go_on.wait(60)
        return check(password, stored)

    with served(show(idle()), load_web_config(file)) as server:
        monkeypatch.setattr(bcrypt, "checkpw", slow)
        right = basic("prom", "sesame")
        assert ask(server, "/metrics", Authorization=right)[0] == 200
        clients = [socket.create_connection(server.address) for _ in range(20)]
        for client in clients:
            head = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: "
            client.sendall(f"{head}{basic('prom', 'guess')}\r\n\r\n".encode())
        assert until(lambda: server._password_workers._work_queue.qsize() == len(clients) - 1)
        assert ask(server, "/metrics", Authorization=right)[0] == 200
        go_on.set()
        assert clients[-1].recv(12) == b"HTTP/1.1 401"
        for client in clients:
            client.close()
