"""Writes records as llama-bench does: csv, json, jsonl, sql, and the table for people."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from orinbench.judge.identity import model_type_suffix
from orinbench.judge.make_records import compact_json
from orinbench.judge.schema import FIELDS, LLAMA_DEFAULTS, Plain, Record
from orinbench.show.table import render_md


def as_llama_bench(record: Record) -> Plain:
    """Return a record as llama.cpp's own tools read it: nothing null that they compare by.

    compare-llama-bench.py joins rows whose fields are equal, and no null is equal to another. It
    knows no sequences at once, sampling or first text: the model's name has the test there.
    The commit of a patched tinygrad is its series' hash, which is all that differs between two.
    """
    if record.benchmark != "llama-bench":
        return vars(record)
    whole = {
        name: LLAMA_DEFAULTS.get(name) if value is None else value
        for name, value in vars(record).items()
    }
    whole["model_type"] = f"{record.model_type or ''}{model_type_suffix(record)}"
    series = record.environment.get("tinygrad_series")
    if series and record.backend.startswith("tinygrad"):
        whole["build_commit"] = series
    return whole


def render_json(records: Sequence[Record]) -> str:
    """Return one array."""
    plain = [as_llama_bench(record) for record in records]
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def render_jsonl(records: Sequence[Record]) -> str:
    """Return one object a line."""
    return "".join(compact_json(as_llama_bench(record)) + "\n" for record in records)


def render_csv(records: Sequence[Record]) -> str:
    """Return a header and a line per record; lists and objects are JSON inside a cell."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(FIELDS)
    plain = [as_llama_bench(record) for record in records]
    writer.writerows([_csv_cell(record[field]) for field in FIELDS] for record in plain)
    return text.getvalue()


def render_sql(records: Sequence[Record]) -> str:
    """Return SQL that creates llama-bench's table, with our columns too, and fills it."""
    columns = ",\n".join(f'  "{name}" {kind}' for name, kind in FIELDS.items())
    names = ", ".join(f'"{name}"' for name in FIELDS)
    lines = [f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n"]
    for record in map(as_llama_bench, records):
        values = ", ".join(_sql_value(record[field]) for field in FIELDS)
        lines.append(f"INSERT INTO llama_bench ({names}) VALUES ({values});\n")
    return "\n".join(lines)


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else compact_json(value)


def _sql_value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float):
        return repr(value)
    return "'" + _csv_cell(value).replace("'", "''") + "'"


RENDERERS: dict[str, Callable[[Sequence[Record]], str]] = {
    "csv": render_csv,
    "json": render_json,
    "jsonl": render_jsonl,
    "md": render_md,
    "sql": render_sql,
}
