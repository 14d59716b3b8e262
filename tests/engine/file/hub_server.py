"""A hub on loopback: the part of its HTTP interface that huggingface_hub asks, and its bad days."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Files by repository. `cut`: bytes after which an answer ends; `lies`: sends other bytes.

    odd, headers: what it says of a repository in place of its list, and with its files.
    """

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    cut: int | None = None
    lies: bool = False
    pause: float = 0.0
    failing: int | None = None  # HTTP status of every answer
    odd: dict[str, bytes] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def __enter__(self) -> str:
        hub = self

        class Handler(_Handler):
            world = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    world: Hub

    def log_message(self, *given: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, head: bool) -> None:
        hub = self.world
        hub.asked.append(f"{self.command} {self.path}")
        if hub.failing is not None:
            return self._send(hub.failing, b"{}", {})
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"})
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            return self._model(path.removeprefix("/api/models/"))
        owner, name, _, _, file = path[1:].split("/", 4)
        content = hub.files.get(f"{owner}/{name}", {}).get(file)
        if content is None:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self._file(content, head, hub.headers.get(f"{owner}/{name}", {}))

    def _model(self, repository: str) -> None:
        repository = "/".join(repository.split("/")[:2])
        if (odd := self.world.odd.get(repository)) is not None:
            return self._send(200, odd, {})
        if (files := self.world.files.get(repository)) is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        entries = [{"rfilename": file} for file in files]
        body = {"id": repository, "sha": COMMIT, "siblings": entries}
        return self._send(200, json.dumps(body).encode(), {})

    def _file(self, content: bytes, head: bool, more: dict[str, str]) -> None:
        digest = hashlib.sha256(content).hexdigest()
        said = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{digest}"',
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "Accept-Ranges": "bytes",
        } | more
        body, status = content, 200
        if asked := self.headers.get("Range"):
            self.world.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            said["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            body, status = content[start:], 206
        if self.world.lies:
            body = bytes(len(body))
        self._send(status, body, said, head)

    def _send(self, status: int, body: bytes, said: dict[str, str], head: bool = False) -> None:
        self.send_response(status)
        for name, value in said.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if head:
            return
        time.sleep(self.world.pause)
        cut = self.world.cut if len(body) > 1000 else None
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
