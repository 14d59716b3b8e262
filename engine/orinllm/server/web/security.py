"""Who may ask: the right Host, no foreign Origin, a key, a body of a sane size."""

import hashlib
import hmac
import ipaddress
import re
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from orinllm.errors import BadInput
from orinllm.server.errors import ApiError

#: Paths that need no key: who watches a server, and the page that asks for one.
OPEN_PATHS = ("/health", "/")
#: Of every answer.
SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
]


def read_api_keys(path: Path, tell: Callable[[str], None]) -> tuple[str, ...]:
    """Return a file's keys, one a line; raises BadInput for none, or for one nobody can send.

    `tell` hears that others of this machine can read them.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise BadInput(f"--api-key-file {path}: {why}") from None
    keys = dict[str, None]()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not re.fullmatch(r"[\x21-\x7e]+", line):
            raise BadInput(
                f"--api-key-file {path}: line {number}: a key has no spaces and is ASCII; comments "
                "have lines of their own, which begin with #"
            )
        keys[line] = None
    if not keys:
        raise BadInput(f"--api-key-file {path}: holds no key; one a line was expected")
    if mode & (stat.S_IRGRP | stat.S_IROTH) and path.is_file():
        tell(f"--api-key-file {path}: others can read it (mode {stat.S_IMODE(mode):o}); chmod 600")
    return tuple(keys)


def checked_host(name: str) -> str:
    """Return a name of --allow-host; raises BadInput for what no Host header can say."""
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", name):
        raise BadInput(
            f"--allow-host {name!r}: a name without scheme and port was expected, as in board.lan"
        )
    return name


def checked_origin(origin: str) -> str:
    """Return an origin of --allow-origin; raises BadInput for what no browser says."""
    try:
        parts = urlsplit(origin)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        parts, port = urlsplit(""), ""
    right = f"{parts.scheme}://{parts.hostname}{port}"
    if origin != "*" and (origin != right or not parts.hostname):
        raise BadInput(
            f"--allow-origin {origin!r}: scheme and name in small letters were expected, without a "
            "path, as in https://page.example:8443; or * for all"
        )
    return origin


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ApiKeys:
    """The keys that a request may have; none: it needs none. They can be replaced while serving."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Take other keys from now on."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def contains(self, given: str) -> bool:
        """Say whether a key is one; all are compared, so that time says nothing."""
        digest = hashlib.sha256(given.encode()).digest()
        return sum([hmac.compare_digest(digest, key) for key in self._digests]) > 0


class RequestGuard:
    """Tells requests that may come in from others."""

    def __init__(self, keys: ApiKeys, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._keys = keys
        name = socket.gethostname().lower()
        known = ("localhost", name, f"{name.split('.')[0]}.local", *map(str.lower, hosts))
        self._hosts, self._origins = frozenset(known), frozenset(origins)

    def check_request(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError for a request that may not come in."""
        host = headers.get("host", "")
        if not self._is_known_host(host):
            # A page of another name that resolves to this machine (DNS rebinding) says its name.
            raise ApiError(
                403, f"Host '{host}' is not this server; --allow-host adds names", code="bad_host"
            )
        self._check_origin(scope, headers, host)
        # A browser asks without a key whether it may ask.
        if self._keys and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
            self._check_key(headers)

    def _is_known_host(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            return False
        if name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_origin(self, scope: Scope, headers: Headers, host: str) -> None:
        origin = headers.get("origin")
        if origin is None:
            foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            if not foreign or scope["method"] in ("GET", "HEAD"):
                return
        elif origin in (f"http://{host}", f"https://{host}") or self._origins & {origin, "*"}:
            return
        who = "a page of another site" if origin is None else f"Origin '{origin}'"
        raise ApiError(
            403,
            f"{who} may not ask this server; --allow-origin adds origins",
            code="bad_origin",
        )

    def _check_key(self, headers: Headers) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        if not self._keys.contains(given.strip()):
            message = "Incorrect API key provided." if given else "You didn't provide an API key."
            raise ApiError(
                401,
                f"{message} Send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
