"""An exporter for tests: one in this process, and the command as a user starts it."""

import http.client
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orinboard.files import Roots
from orinboard.sources import BoardReader
from orinexporter.exporter import Exporter
from orinexporter.web import ExporterServer
from orinexporter.webconfig import WebConfig


@contextmanager
def served(
    roots: Roots, config: WebConfig | None = None, hosts: tuple[str, ...] = ()
) -> Iterator[ExporterServer]:
    exporter = Exporter(BoardReader(roots))
    with exporter, ExporterServer(("127.0.0.1", 0), exporter, config, hosts) as server:
        yield server


def ask(
    server: ExporterServer,
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


def folder_of(roots: Roots) -> str:
    """Return the folder of a board's tree, for --replay."""
    return os.path.dirname(roots.sys)


@contextmanager
def exporting(
    folder: Path | str, *flags: str, before: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command on a recording or a tree; yield it and its URL."""
    line = [sys.executable, "-m", "orinexporter.cli", "--replay", str(folder)]
    process = subprocess.Popen(
        [*before, *line, "--listen", "127.0.0.1:0", *flags], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr
        yield process, next(line for line in process.stderr if "serving " in line).split()[-1]
    finally:
        process.kill()
        process.communicate()
