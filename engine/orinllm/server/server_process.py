"""`orinllm serve`: the process, from its socket to its exit code."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from orinllm.batching.sequence import SchedulerObserver
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.server.app import make_app
from orinllm.server.engine import ServedModel, load_engine, read_description_and_template
from orinllm.server.model_thread import ModelThread, SystemdWatchdog
from orinllm.server.options import EngineOptions, HttpOptions
from orinllm.server.web.connection import CLIENT_SECONDS, LimitedConnection
from orinllm.server.web.overwrite_watch import FileLeases
from orinllm.server.web.security import ApiKeys, is_loopback, read_api_keys
from orinllm.server.web.systemd_notify import tell_systemd

#: Exit code where the model does not load, or the engine fails.
EXIT_FAILED = 1
# Where systemd puts the sockets that it hands over (sd_listen_fds(3)).
_FIRST_FD = 3
# Clients that may wait to be accepted.
_BACKLOG = 512
# Seconds for answers that were cut off to reach who reads them, and for the thread to end.
_LAST_SECONDS = 5.0
# Seconds for what is under way to hear that its client is gone.
_LAST_MOMENT = 0.5
# Seconds in which the request of a connection that was made before the end must be here, and
# between looks at it.
_ARRIVAL_SECONDS, _LOOK_SECONDS = 1.0, 0.01
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Tell = Callable[[str], None]


class _UvicornServer(uvicorn.Server):
    """Uvicorn's server without its signals: `_ServerProcess` has its own.

    `deaf` is called when nobody can ask any more.
    """

    deaf: Callable[[], None]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what listens and what is idle; whoever asked until now gets an answer.

        So does who has just connected: the request is on its way.
        """
        loop = asyncio.get_running_loop()
        for server in self.servers:
            server.close()
        end = loop.time() + _ARRIVAL_SECONDS
        await asyncio.sleep(_LOOK_SECONDS)
        while any(map(_has_sent_nothing, self.server_state.connections)) and loop.time() < end:
            await asyncio.sleep(_LOOK_SECONDS)
        loop.call_soon(self.deaf)  # the first pause comes behind the closing
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _has_sent_nothing(connection: object) -> bool:
    """Say whether a client has connected and sent nothing yet."""
    assert isinstance(connection, LimitedConnection)
    return connection.cycle is None and not connection.transport.is_closing()


def serve(options: EngineOptions, http: HttpOptions, insecure: bool, tell: Tell) -> int:
    """Serve a model until a signal; return the exit code. Raises BadInput, one line."""
    given = _inherited_socket()
    if given is not None:
        http = replace(http, host=given.getsockname()[0])
    if not http.keys and not insecure and not is_loopback(http.host):
        raise BadInput(
            f"--host {http.host}: others would reach this server, and it asks for no key; add "
            "--api-key-file FILE, or say --insecure"
        )
    description, _ = read_description_and_template(options)
    files = [*description.network.gguf.paths]
    if isinstance(options.draft, Path):
        files += GGUF.open(options.draft).paths
    if options.mmproj is not None:
        files.append(options.mmproj)
    name = description.network.gguf.path.stem if http.alias is None else http.alias
    if not name.isprintable() or name != name.strip() or not name:
        raise BadInput(
            f"--alias {name!r}: a name of printable characters was expected, as in --alias smollm2"
        )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with given or _make_listening_socket(http) as listening:
        try:
            process = _ServerProcess(options, http, name, tell)
            process.patient = given is not None
            process.files = files
            return asyncio.run(process.run(listening))
        finally:  # the exit code is known; Python gives up our handlers while it ends, not these
            for number in (*_SIGNALS, signal.SIGHUP, signal.SIGIO):
                signal.signal(number, signal.SIG_IGN)


def _inherited_socket() -> socket.socket | None:
    """Return the socket that a unit of systemd's holds for this process; None: there is none.

    It goes on to listen while one server ends and the next one loads. Raises BadInput for one that
    is not of TCP.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    if pid != str(os.getpid()) or count in ("", "0"):
        return None
    given = socket.socket(fileno=_FIRST_FD)
    listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if count != "1" or not listens or given.family not in (socket.AF_INET, socket.AF_INET6):
        raise BadInput("LISTEN_FDS: one listening TCP socket was expected, as of ListenStream=8000")
    given.set_inheritable(False)
    return given


def _make_listening_socket(http: HttpOptions) -> socket.socket:
    """Return a listening socket; raises BadInput where the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)  # who reads the address may come before the loop runs
    except OSError as error:
        raise BadInput(
            f"--host {http.host} --port {http.port}: {error.strerror or error}; a free address of "
            "this machine was expected"
        ) from None
    listening.set_inheritable(False)
    return listening


class _ServerProcess:
    """One server: its signals, what it tells systemd, and how it ends."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, options: EngineOptions, http: HttpOptions, name: str, tell: Tell) -> None:
        self._http, self._tell, self._name = http, tell, name
        self._options, self._keys = options, ApiKeys(http.keys)
        self.files: list[Path] = []  # of the models
        self.patient = False  # clients wait in the socket's queue while the model loads
        self._settled = asyncio.Event()  # it loaded, did not, or need not
        self._leases: FileLeases | None = None
        self._model_thread = ModelThread(self._load_engine, SystemdWatchdog())
        self._model_thread.on_loaded, self._model_thread.on_failure = (
            self._on_loaded,
            self._on_failure,
        )
        config = uvicorn.Config(
            make_app(self._model_thread, http, name, self._keys),
            http=LimitedConnection.subclass_with_metrics(self._model_thread.metrics),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(CLIENT_SECONDS),
        )
        self._server, self._url = _UvicornServer(config), ""
        self._server.deaf = lambda: self._model_thread.stop(self._http.grace)
        self._code, self._mendable, self._signals = 0, "", 0

    async def run(self, listening: socket.socket) -> int:
        """Serve until the end; return the exit code. Raises BadInput if the model cannot load."""
        self._loop = asyncio.get_running_loop()
        # Not the loop's own handlers, which go with it: a signal behind the end changes no code.
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_signal)
        signal.signal(signal.SIGIO, self._on_signal)
        self._leases = FileLeases(self.files)
        for path, why in self._leases.missing.items():
            self._tell(
                f"{path}: whoever overwrites it in place ends this server without a word ({why}); "
                "rename a new file over it instead"
            )
        host, port = listening.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._tell(f"loading {self._name}; {self._url}/health says when it is ready")
        self._model_thread.start()
        if self.patient:
            await self._settled.wait()
        # A task of its own: it looks ten times a second whether it shall end.
        await asyncio.create_task(self._server.serve([listening]))
        if self._mendable:
            raise BadInput(self._mendable)
        if not self._model_thread.ends_within(_LAST_SECONDS):
            # The thread is in the middle of loading, or of a launch that does not return.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)
        return self._code

    def _load_engine(self, watch: SchedulerObserver) -> ServedModel:
        self._model_thread.metrics.start_measuring_energy()
        return load_engine(self._options, watch, lambda text: tell_systemd(f"STATUS={text}"))

    def _on_loaded(self, engine: ServedModel) -> None:
        self._tell(f"{engine.description}: {self._url}")
        tell_systemd(f"READY=1\nSTATUS={engine.description}")
        self._settled.set()

    def _on_failure(self, why: str, mendable: bool) -> None:
        tell_systemd(f"STATUS={why}")
        if mendable:
            self._mendable = why
        else:
            self._tell(f"orinllm: {why}")
            self._code = EXIT_FAILED
        self._end_within(_LAST_SECONDS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        others: dict[int, Callable[[], None]] = {
            signal.SIGHUP: self._reload_api_keys,
            signal.SIGIO: self._on_file_overwrite,
        }
        what = others.get(number, self._on_stop_signal)
        with contextlib.suppress(RuntimeError):  # the loop is closed: this is the end
            self._loop.call_soon_threadsafe(what)

    def _reload_api_keys(self) -> None:
        """Read the keys again; where that fails, the old ones stay."""
        path = self._http.key_file
        if path is None:
            self._tell("SIGHUP: there is no --api-key-file to read again")
            return
        tell_systemd(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            keys = read_api_keys(path, self._tell)
        except BadInput as error:
            self._tell(f"{error}; the keys are what they were")
        else:
            self._keys.replace(keys)
            self._tell(f"--api-key-file {path}: {len(keys)} key{'s'[: len(keys) != 1]} read again")
        tell_systemd("READY=1")

    def _on_file_overwrite(self) -> None:
        """End while the model's file is still whole: its pages go when it is overwritten."""
        if self._leases is None or (path := self._leases.threatened_file) is None or self._signals:
            return
        self._tell(
            f"{path}: another program overwrites this file, which is in use; the server ends. "
            "Write a new file beside it, and rename that"
        )
        self._code = EXIT_FAILED
        self._on_stop_signal()

    def _on_stop_signal(self) -> None:
        """End in order; a second signal cuts answers off, a third waits for nobody."""
        self._signals += 1
        if self._signals > 1:
            self._model_thread.stop(0)
            self._loop.call_later(
                _LAST_SECONDS if self._signals == 2 else 0, self._abort_connections
            )
            return
        tell_systemd("STOPPING=1")
        self._tell(f"stopping: answers under way have {self._http.grace:g} s")
        self._end_within(self._http.grace + _LAST_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._loop.call_later(seconds, self._abort_connections)
        self._server.should_exit = True
        self._settled.set()

    def _abort_connections(self) -> None:
        """Let go of clients that read the end of their answers too slowly, and of what is left."""
        for connection in list(self._server.server_state.connections):
            assert isinstance(connection, LimitedConnection)
            connection.transport.abort()
        self._loop.call_later(_LAST_MOMENT, setattr, self._server, "force_exit", True)
