"""tinygrad's cache of compiled kernels, for any number of threads; imported before it is used."""

import sqlite3
import threading

from tinygrad import helpers

_connect, _connecting, _connected = helpers.db_connection, threading.Lock(), threading.local()


def _connection_of_this_thread() -> sqlite3.Connection:
    """Return a thread's own connection to tinygrad's cache of compiled kernels.

    tinygrad makes one, which SQLite lets the first thread alone use. One for all threads would let
    two of them begin a transaction on it at a time, which is an error.
    """
    if not hasattr(_connected, "connection"):
        with _connecting:
            helpers._db_connection = None
            _connected.connection = _connect()
    connection: sqlite3.Connection = _connected.connection
    return connection


# Before any thread loads: whoever loads a model, or answers, need not be who used tinygrad first.
helpers.db_connection = _connection_of_this_thread
