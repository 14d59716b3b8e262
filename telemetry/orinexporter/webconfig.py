"""TLS and passwords from a file, as all of Prometheus' exporters take it (`web.config.file`)."""

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bcrypt
import yaml

#: Known keys of the format; all others are refused, as nothing may be ignored in silence.
TLS_KEYS = frozenset({"cert_file", "key_file", "client_ca_file", "client_auth_type", "min_version"})
KEYS = {"tls_server_config": TLS_KEYS, "basic_auth_users": None}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
CLIENTS = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
#: Somebody who does not exist costs as long as somebody who does: the hash of nothing, at bcrypt's
#: usual cost of 10.
NOBODY = b"$2b$10$WxHK.jgLfoOK2AzX.7iDhOmy21ithoqyFa7QRbkhSEEiyaELaK3P6"


class WebConfigError(ValueError):
    """A file that cannot be used; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Contents of the file: users with bcrypt hashes, and TLS's own settings (None: no TLS)."""

    users: dict[str, bytes] = field(default_factory=dict)
    tls: dict[str, str] | None = None

    def new_ssl_context(self) -> ssl.SSLContext | None:
        """The context to serve with; None without TLS. Raises WebConfigError."""
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self.tls.get("min_version", "TLS12")]
        context.verify_mode = CLIENTS[self.tls.get("client_auth_type", "NoClientCert")]
        try:
            context.load_cert_chain(self.tls["cert_file"], self.tls["key_file"])
            if ca := self.tls.get("client_ca_file"):
                context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(value for key, value in self.tls.items() if key.endswith("_file"))
            raise WebConfigError(f"{names}: {error.strerror or error}") from None
        return context


class RenewableSslContext(ssl.SSLContext):
    """A context whose settings can be replaced whole while a server holds it."""

    current: ssl.SSLContext

    def wrap_bio(self, *arguments: Any, **keywords: Any) -> ssl.SSLObject:
        """Wrap a new connection; called by asyncio."""
        return self.current.wrap_bio(*arguments, **keywords)


class PasswordCheck:
    """Check of passwords. One that was right before is known by its hash, as bcrypt is slow."""

    def __init__(self, users: dict[str, bytes]) -> None:
        self._users = users
        self._known: set[bytes] = set()

    def was_right_before(self, user: str, password: bytes) -> bool:
        """True if they were right before; takes no time."""
        return self._digest(user, password) in self._known

    def verify_with_bcrypt(self, user: str, password: bytes) -> bool:
        """True if they belong together; takes about 50 ms."""
        right = bcrypt.checkpw(password[:72], self._users.get(user, NOBODY))
        if not right or user not in self._users:
            return False
        self._known.add(self._digest(user, password))
        return True

    def _digest(self, user: str, password: bytes) -> bytes:
        return hashlib.sha256(self._users.get(user, NOBODY) + b"\0" + password).digest()


def load_web_config(file: Path) -> WebConfig:
    """Read the file; raises WebConfigError."""
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise WebConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WebConfigError(f"{file}: no YAML: {' '.join(str(error).split())}") from None
    try:
        return parse_web_config(data or {}, file.parent)
    except ValueError as error:
        raise WebConfigError(f"{file}: {error}") from None


def parse_web_config(data: Any, folder: Path) -> WebConfig:
    """The configuration in `data`, its files relative to `folder`; raises ValueError."""
    for key in require_mapping(data, "it"):
        if key not in KEYS:
            raise ValueError(f"{key!r} is not understood; there are {', '.join(KEYS)}")
    users = {}
    for user, hashed in require_mapping(
        data.get("basic_auth_users") or {}, "basic_auth_users"
    ).items():
        stored = str(hashed).encode()
        try:
            bcrypt.checkpw(b"", stored)
        except ValueError:
            raise ValueError(
                f"basic_auth_users: {user} has no bcrypt hash; make one: htpasswd -nBC 10 {user}"
            ) from None
        users[str(user)] = stored
    if "tls_server_config" not in data:
        return WebConfig(users)
    tls = require_mapping(data["tls_server_config"], "tls_server_config")
    for key in tls:
        if key not in TLS_KEYS:
            raise ValueError(
                f"tls_server_config: {key!r} is not understood; there are "
                f"{', '.join(sorted(TLS_KEYS))}"
            )
    for key in ("cert_file", "key_file"):
        if not tls.get(key):
            raise ValueError(f"tls_server_config: {key} is missing")
    verifies = tls.get("client_auth_type", "NoClientCert") != "NoClientCert"
    if verifies != bool(tls.get("client_ca_file")):
        raise ValueError(
            "tls_server_config: client_ca_file and a client_auth_type that verifies go together"
        )
    for key, allowed in (("min_version", VERSIONS), ("client_auth_type", CLIENTS)):
        if key in tls and tls[key] not in allowed:
            raise ValueError(f"tls_server_config: {key} is one of {', '.join(allowed)}")
    found = {
        key: str(folder / value) if key.endswith("_file") else str(value)
        for key, value in tls.items()
    }
    return WebConfig(users, found)


def require_mapping(data: Any, name: str) -> dict[str, Any]:
    """`data`; raises ValueError unless it is a mapping."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} is no mapping of names to values")
    return data
