"""The history's file: a row for each run, and for each of its records (docs/reference/records.md).

Writers wait for each other; a write is one transaction. A reader sees whole runs only.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orinbench.errors import BenchError
from orinbench.judge.identity import device_label, measurement_identity
from orinbench.judge.load_results import completed_record
from orinbench.judge.make_records import compact_json
from orinbench.judge.schema import Plain, Record
from orinbench.show.output_formats import as_llama_bench

# "orin" in ASCII: tells a history from any other SQLite file (PRAGMA application_id).
APPLICATION_ID = 0x6F72696E
# Each entry takes the file from the version that is its index to the next; PRAGMA user_version is
# the number of entries that a file has had. Entries are never edited: a change is a new one.
MIGRATIONS = (
    """
    CREATE TABLE runs (
      id INTEGER PRIMARY KEY AUTOINCREMENT,
      digest TEXT NOT NULL UNIQUE,
      started TEXT NOT NULL,
      kept TEXT NOT NULL,
      origin TEXT NOT NULL,
      partial INTEGER NOT NULL,
      environment TEXT NOT NULL
    );
    CREATE TABLE records (
      run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
      position INTEGER NOT NULL,
      identity TEXT NOT NULL,
      device TEXT NOT NULL,
      benchmark TEXT NOT NULL,
      test TEXT NOT NULL,
      backend TEXT NOT NULL,
      model TEXT,
      software TEXT,
      unit TEXT NOT NULL,
      median REAL,
      ci95_low REAL,
      ci95_high REAL,
      mean REAL,
      sd REAL,
      samples INTEGER NOT NULL,
      error TEXT,
      record TEXT NOT NULL,
      PRIMARY KEY (run, position)
    );
    CREATE INDEX records_by_case ON records (identity, device, run);
    CREATE INDEX records_by_test ON records (benchmark, test, device);
    """,
    """
    CREATE TABLE pins (
      name TEXT PRIMARY KEY,
      run INTEGER NOT NULL REFERENCES runs (id) ON DELETE CASCADE
    )
    """,
)
LOCK_SECONDS = 10.0


@dataclass
class HistoryRun:
    """One run: `origin` is the command that measured it, or the file that it came from.

    Tests of each benchmark and devices are keys, in the order of the records.
    """

    id: int
    started: str  # ISO 8601, UTC
    origin: str
    partial: bool
    n_records: int = 0
    cases: dict[str, dict[str, None]] = field(default_factory=dict)
    devices: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordFilter:
    """Filter of the rows to show: each field is a word that its column contains, in any case."""

    test: str | None = None
    device: str | None = None

    def sql_condition(self) -> tuple[str, list[str]]:
        """Return a condition over `records` and its values."""
        given = {name: value for name, value in vars(self).items() if value}
        condition = " AND ".join(f"instr(lower(coalesce({name}, '')), ?)" for name in given)
        return condition or "1", [value.lower() for value in given.values()]


def history_path() -> Path:
    """Return $XDG_STATE_HOME/tinygrad-orin/history.db, with ~/.local/state as default."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "tinygrad-orin" / "history.db"


class History:
    """An open history; use as a context manager. Raises BenchError for all that goes wrong.

    An old file is brought to today's schema. A missing one is made with `write`, else refused.
    """

    def __init__(self, path: Path, write: bool = False, lock_seconds: float = LOCK_SECONDS) -> None:
        self.path = path
        self._lock_seconds = lock_seconds
        with self._raising_bench_errors():
            if path.exists() and not path.is_file():
                raise BenchError(f"{path}: is no regular file; a history is one")
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not path.exists() or not path.stat().st_size:
                raise BenchError(f"{path}: no history yet; llama-bench and suite write it")
            self._database = sqlite3.connect(path, timeout=lock_seconds, isolation_level=None)
            try:
                self._database.execute("PRAGMA foreign_keys = ON")
                self._migrate()
            except BaseException:
                self._database.close()
                raise

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add_run_once(self, records: Sequence[Record], origin: str) -> tuple[int, bool]:
        """Keep a run's records; return its id, and whether it is new: a run is kept once."""
        digest = hashlib.sha256(
            compact_json([_fields_for_digest(record) for record in records]).encode()
        )
        with self._raising_bench_errors(), self._transaction():
            known = self._database.execute(
                "SELECT id FROM runs WHERE digest = ?", [digest.hexdigest()]
            ).fetchone()
            if known:
                return int(known[0]), False
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            started = min((str(r.test_time) for r in records if r.test_time), default=now)
            run = self._database.execute(
                "INSERT INTO runs (digest, started, kept, origin, partial, environment)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                [
                    digest.hexdigest(),
                    started,
                    now,
                    origin,
                    int(any(record.partial for record in records)),
                    compact_json(records[0].environment),
                ],
            ).lastrowid
            assert run is not None
            self._database.executemany(
                f"INSERT INTO records VALUES ({', '.join('?' * 18)})",
                [_record_row(run, position, record) for position, record in enumerate(records)],
            )
        return run, True

    def runs(self, only: RecordFilter = RecordFilter()) -> list[HistoryRun]:
        """Return the runs that have a record which `only` lets through, the latest last."""
        condition, values = only.sql_condition()
        rows = self._query_rows(
            "SELECT runs.id, started, origin, partial, benchmark, test, device"
            f" FROM runs JOIN records ON run = runs.id WHERE {condition}"
            " ORDER BY started, runs.id, position",
            *values,
        )
        runs: dict[int, HistoryRun] = {}
        for id_, started, origin, partial, benchmark, test, device in rows:
            run = runs.setdefault(id_, HistoryRun(id_, started, origin, bool(partial)))
            run.n_records += 1
            run.cases.setdefault(benchmark, {})[test] = None
            run.devices[device] = None
        return list(runs.values())

    def run_ids(self) -> set[int]:
        """Return the ids of all runs."""
        return {id_ for (id_,) in self._query_rows("SELECT id FROM runs")}

    def find_run_id(self, name: str) -> int | None:
        """Return the run that a pinned name or a number means, None for another."""
        if (pinned := self.pinned_runs().get(name)) is not None:
            return pinned
        return int(name) if name.isdecimal() and int(name) in self.run_ids() else None

    def records(self, run: int) -> list[Record]:
        """Return a run's records; raises BenchError if there is no such run."""
        rows = self._query_rows("SELECT record FROM records WHERE run = ? ORDER BY position", run)
        if not rows:
            raise BenchError(f"{self.path}: has no run {run}; `orinbench history` lists them")
        return [completed_record(json.loads(text)) for (text,) in rows]

    def measured_records(
        self, only: RecordFilter = RecordFilter()
    ) -> list[tuple[int, str, str, Record]]:
        """Return (run, identity, device, record) of what has figures, in the order of the runs."""
        condition, values = only.sql_condition()
        rows = self._query_rows(
            "SELECT run, identity, device, record FROM records JOIN runs ON run = runs.id"
            f" WHERE coalesce(median, mean) IS NOT NULL AND {condition}"
            " ORDER BY started, run, position",
            *values,
        )
        return [
            (run, case, device, completed_record(json.loads(text)))
            for run, case, device, text in rows
        ]

    def remove_run(self, run: int) -> None:
        """Forget a run; raises BenchError if there is no such run."""
        with self._raising_bench_errors(), self._transaction():
            if not self._database.execute("DELETE FROM runs WHERE id = ?", [run]).rowcount:
                raise BenchError(f"{self.path}: has no run {run}; `orinbench history` lists them")

    def pin_run(self, name: str, run: int) -> None:
        """Give a run a name; a name that another run had is this one's now. Raises BenchError."""
        if not name.isprintable() or not name.strip() or name.isdecimal():
            raise BenchError(f"history pin {name!r}: want a name, which is no number")
        if run not in self.run_ids():
            raise BenchError(f"{self.path}: has no run {run}; `orinbench history` lists them")
        with self._raising_bench_errors(), self._transaction():
            self._database.execute("INSERT OR REPLACE INTO pins VALUES (?, ?)", [name, run])

    def pinned_runs(self) -> dict[str, int]:
        """Return the runs that have names."""
        return dict(self._query_rows("SELECT name, run FROM pins ORDER BY name"))

    def _query_rows(self, query: str, *values: Any) -> list[Any]:
        with self._raising_bench_errors():
            return self._database.execute(query, values).fetchall()

    def _migrate(self) -> None:
        """Bring a new or old file to today's schema."""
        if self._schema_version() == len(MIGRATIONS):
            return
        with self._transaction():
            version = self._schema_version()  # another process may have been quicker
            if version == 0:
                self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statements in MIGRATIONS[version:]:
                for statement in statements.split(";"):
                    self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _schema_version(self) -> int:
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (tables,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != APPLICATION_ID and (tables or version):
            raise BenchError(
                f"{self.path}: is a SQLite file of something else; give --history another path"
            )
        if version > len(MIGRATIONS):
            raise BenchError(
                f"{self.path}: written by a newer orinbench (schema {version}, this one knows "
                f"{len(MIGRATIONS)}): update it, or give --history another path"
            )
        return int(version)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Hold the file's write lock from the first statement on; all or nothing is written."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextmanager
    def _raising_bench_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BenchError(f"{self.path}: cannot be written: {error.strerror}") from None
        except OverflowError:  # SQLite's numbers end at 2^63
            raise BenchError(
                f"{self.path}: has no such run; `orinbench history` lists them"
            ) from None
        except sqlite3.OperationalError as error:
            reason = str(error)
            if "locked" in reason:
                reason = f"another process kept it locked for {self._lock_seconds:g} s"
            raise BenchError(f"{self.path}: {reason}") from None
        except sqlite3.DatabaseError as error:
            raise BenchError(
                f"{self.path}: is no history or a broken one ({error}); move it away, or give "
                "--history another path"
            ) from None


def _fields_for_digest(record: Record) -> Plain:
    """Return what of a record is not a default, so that a new field changes no digest.

    It is of the form that files have, so that a run is the same as its own result file.
    """
    plain = as_llama_bench(record)
    return {name: value for name, value in plain.items() if value not in (None, [], {})}


def _record_row(run: int, position: int, record: Record) -> list[Any]:
    names = "benchmark test backend model_type software unit median_ts ci95_low_ts ci95_high_ts"
    columns = [getattr(record, name) for name in f"{names} avg_ts stddev_ts".split()]
    whole = compact_json({name: value for name, value in vars(record).items() if value is not None})
    numbers = [len(record.samples_ts), record.error]
    return [
        run,
        position,
        measurement_identity(record),
        device_label(record),
        *columns,
        *numbers,
        whole,
    ]
