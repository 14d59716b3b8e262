"""Options of `orinllm serve`: each wrong key, host, origin or name is a line that names it."""

from pathlib import Path

import pytest
from tests.engine.models import smollm2

from orinllm.errors import BadInput
from orinllm.server.engine import read_description_and_template
from orinllm.server.options import EngineOptions, HttpOptions, checked_grace, parse_share
from orinllm.server.server_process import serve
from orinllm.server.web.security import checked_host, checked_origin, read_api_keys


def keys(path: Path, raw: bytes, mode: int = 0o600) -> tuple[tuple[str, ...], list[str]]:
    """Return a file's keys, and what was told beside."""
    path.write_bytes(raw)
    path.chmod(mode)
    told = list[str]()
    return read_api_keys(path, told.append), told


def test_a_file_of_keys_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    raw = b"\xef\xbb\xbf# of March\r\n\r\nfirst-key\r\n  # indented\n\tsecond \nfirst-key\n\n"
    assert keys(path, raw) == (("first-key", "second"), [])
    assert keys(path, b"key", 0o640) == (
        ("key",),
        [f"--api-key-file {path}: others can read it (mode 640); chmod 600"],
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "holds no key"),
        (b"# only\n\n", "holds no key"),
        (b"one\n\ntwo # of March", "line 3: a key has no spaces"),
        ("schlüssel".encode(), "line 1: a key has no spaces and is ASCII"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, raw: bytes, says: str) -> None:
    with pytest.raises(BadInput) as refused:
        keys(tmp_path / "keys", raw)
    assert f"--api-key-file {tmp_path / 'keys'}: {says}" in str(refused.value)
    with pytest.raises(BadInput, match="Is a directory"):
        read_api_keys(tmp_path, print)


@pytest.mark.parametrize(
    "host", ["", "a b", "http://board.lan", "board.lan:80", "a/b", "-a", "*", "board.lan."]
)
def test_hosts_that_cannot_be(host: str) -> None:
    assert checked_host("board-1.lan") == "board-1.lan"
    with pytest.raises(BadInput, match=r"^--allow-host '"):
        checked_host(host)


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "page.example",
        "https://",
        "https://a.example/",
        "https://a.example/x",
        "https://A.example",
        "https://a.example:port",
        "https://me@a.example",
        "null",
        "http://[",
        "**",
    ],
)
def test_origins_that_cannot_be(origin: str) -> None:
    for right in ("*", "https://a.example", "http://127.0.0.1:3000", "capacitor://localhost"):
        assert checked_origin(right) == right
    with pytest.raises(BadInput, match=r"^--allow-origin '"):
        checked_origin(origin)


@pytest.mark.parametrize("alias", ["", " ", "a\nb", "a ", "\x1b[1m"])
def test_names_that_cannot_be(alias: str) -> None:
    with pytest.raises(BadInput, match=r"^--alias '"):
        serve(
            EngineOptions(smollm2(), context=64), HttpOptions("127.0.0.1", 0, alias), False, print
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 86401.0])
def test_graces_that_cannot_be(value: float) -> None:
    assert (checked_grace(0), checked_grace(86400), parse_share("70%")) == (0, 86400, 0.7)
    with pytest.raises(BadInput, match=r"^--grace "):
        checked_grace(value)


def test_a_template_that_is_none_names_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    for source, says in ((b"{% for %}", "Expected an expression"), (b"\xff", "utf-8")):
        path.write_bytes(source)
        with pytest.raises(BadInput) as refused:
            read_description_and_template(EngineOptions(smollm2(), context=64, template=path))
        assert str(refused.value).startswith(f"--chat-template {path}: ")
        assert says in str(refused.value) and "tokenizer." not in str(refused.value)
