"""`jetson-exporter wall`: the energy of benchmark records, and a wall meter's beside it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orinboard.wall import MeterError, WallMeter, load_wall_meter


def runs(file: Path) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each record of an `orinbench -o jsonl` file with each of its energies; raises MeterError."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise MeterError(f"{file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            energies = record.get("energy") or []
        except (ValueError, AttributeError):
            raise MeterError(f"{file}, line {number}: no record of orinbench's -o jsonl") from None
        for energy in [energies] if isinstance(energies, Mapping) else energies:
            if energy and energy.get("started") is not None and energy.get("ended") is not None:
                yield record, energy


def beside(meter: WallMeter, record: Mapping[str, Any], energy: Mapping[str, Any]) -> list[str]:
    """One row: what was run, the record's joules and the wall's, and what they are per token."""
    wall = meter.joules(energy["started"], energy["ended"])
    module, tokens = energy["joules"], energy.get("tokens")
    row = [str(record.get("backend") or ""), str(record.get("test") or ""), f"{module:.2f}"]
    if wall is None:
        return [*row, "not covered", "", "", ""]
    row += [f"{wall:.2f}", f"{module / wall:.1%}" if wall else ""]
    row += [f"{module / tokens:.3g}", f"{wall / tokens:.3g}"] if tokens else ["", ""]
    return row


def show_wall(meter_file: Path, records: Path, console: Console) -> None:
    """Print the table; raises MeterError."""
    meter = load_wall_meter(meter_file)
    table = Table(box=None, pad_edge=False)
    table.add_column("backend")
    table.add_column("test")
    columns = ("record J", "wall J", "record / wall", "record J/token", "wall J/token")
    for name in columns:
        table.add_column(name, justify="right")
    words = set()
    for record, energy in runs(records):
        table.add_row(*beside(meter, record, energy))
        words.add(energy.get("boundary") or "sum of its rails")
    if not table.row_count:
        raise MeterError(f"{records}: no record in it has energy")
    console.print(table)
    console.print(f"record: {'; '.join(sorted(words))}. wall: all of the machine.", style="dim")
