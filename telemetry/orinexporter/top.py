"""The board in a terminal: `jetson-exporter top`."""

import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orinboard.board import BoardState
from orinboard.boundary import boundary
from orinboard.readings import Core, Readings
from orinboard.sources import Board
from orinexporter.history import core_loads
from orinexporter.page import LEAST_WATTS, full_scale, passive_trip, size

#: Length of a bar, in characters.
BAR = 20


def bar(value: float, full: float, style: str = "green") -> ProgressBar:
    """A bar of `value` over `full`."""
    return ProgressBar(total=full, completed=min(value, full), width=BAR, complete_style=style)


def grid() -> Table:
    """A table without lines: what, how much, a bar."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=22, overflow="ellipsis", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=20)
    table.add_column(width=BAR)
    return table


def gauges(readings: Readings, watts: float) -> Table:
    """Power, GPU, temperature, fans; `watts` is the greatest power seen yet."""
    state, table = BoardState(readings), grid()
    if state.watts is not None:
        full = full_scale(max(watts, state.watts), LEAST_WATTS)
        table.add_row("module power", f"{state.watts:.1f} W", bar(state.watts, full, "yellow"))
    for gpu in readings.gpus:
        if gpu.load is not None:
            table.add_row(f"GPU {gpu.name} load", f"{gpu.load:.1%}", bar(gpu.load, 1))
        if gpu.current_hz is not None:
            most = gpu.max_hz or gpu.current_hz
            clock = f"{gpu.current_hz / 1e6:.0f} of {most / 1e6:.0f} MHz"
            table.add_row(f"GPU {gpu.name} clock", clock, bar(gpu.current_hz, most))
    if state.hottest is not None:
        trip = passive_trip(readings)
        style = "red" if state.hottest > trip - 5 else "green"
        said = f"{state.hottest:.1f} of {trip:.0f} °C"
        table.add_row("hottest zone", said, bar(state.hottest, trip, style))
    for fan in readings.fans:
        said = "– rpm" if fan.rpm is None else f"{fan.rpm} rpm"
        table.add_row(fan.name, said, bar(fan.pwm or 0, 1))
    return table


def memory(readings: Readings) -> Table:
    """Memory, swap, and who has how much of the GPU's."""
    table, host = grid(), readings.host
    if host and host.memory_bytes and host.memory_available_bytes is not None:
        used = host.memory_bytes - host.memory_available_bytes
        said = f"{size(used)} of {size(host.memory_bytes)}"
        table.add_row("memory", said, bar(used, host.memory_bytes))
    if readings.memory and readings.memory.nvmap_bytes is not None:
        table.add_row("of it for the GPU", size(readings.memory.nvmap_bytes), "")
    if host and host.swap_bytes and host.swap_free_bytes is not None:
        used = host.swap_bytes - host.swap_free_bytes
        said = f"{size(used)} of {size(host.swap_bytes)}"
        table.add_row("swap", said, bar(used, host.swap_bytes))
    if emc := readings.emc:
        most = emc.max_hz or emc.current_hz or 0
        clock = f"{(emc.current_hz or 0) / 1e6:.0f} of {most / 1e6:.0f} MHz"
        table.add_row("memory clock", clock, bar(emc.current_hz or 0, most))
    if readings.emc_load is not None:
        table.add_row("memory load", f"{readings.emc_load:.0%}", bar(readings.emc_load, 1))
    for process in readings.processes[:5]:
        table.add_row(f"  {process.name} {process.pid}", size(process.nvmap_bytes), "")
    return table


def cpus(readings: Readings, before: tuple[Core, ...]) -> Table:
    """Every CPU's load and clock."""
    table = grid()
    loads = core_loads(before, readings.host.cores if readings.host else ())
    clocks = {c.cpu: c.current_hz for c in readings.cpu.clocks} if readings.cpu else {}
    for cpu in sorted({*loads, *clocks}):
        hertz = clocks.get(cpu)
        said = [f"{loads[cpu]:.0%}"] if cpu in loads else []
        said += [f"{hertz / 1e6:.0f} MHz"] if hertz else []
        table.add_row(f"CPU {cpu}", " at ".join(said), bar(loads.get(cpu, 0), 1))
    return table


def zones(readings: Readings) -> Table:
    """Every zone that answers, and the engines that root sees."""
    table, trip = grid(), passive_trip(readings)
    for zone in readings.zones:
        if zone.celsius is not None:
            style = "red" if zone.celsius > trip - 5 else "green"
            table.add_row(zone.name, f"{zone.celsius:.1f} °C", bar(zone.celsius, trip, style))
    for engine in readings.engines:
        clock = "on" if engine.current_hz is None else f"{engine.current_hz / 1e6:.0f} MHz"
        table.add_row(f"engine {engine.name}", "off" if engine.enabled is False else clock, "")
    return table


def rails(readings: Readings) -> Group:
    """Watts by rail, and what their sum holds."""
    table = grid()
    for rail in readings.rails:
        said = "–" if rail.watts is None else f"{rail.watts:.2f} W"
        table.add_row(f"{rail.name} {rail.device}", said, "")
    whole = boundary(readings.rails)
    words = whole.words if whole else "unknown, as nobody knows which of these rails to add"
    return Group(table, Text(f"the sum: {words}", style="dim"))


def screen(readings: Readings, before: tuple[Core, ...], watts: float) -> Group:
    """Everything, one part below the other; a part that the board does not have is left out."""
    state, board = BoardState(readings), readings.identity
    title = Text(f"{board.model}, L4T {board.l4t or 'unknown'}" if board else "no Jetson here")
    if mode := readings.power_mode:
        title.append(f", power mode {mode.name or mode.id}")
    for name in state.throttling:
        title.append(f"  {name}", style="bold red")
    parts = [gauges(readings, watts), cpus(readings, before), memory(readings)]
    parts.append(zones(readings))
    if readings.rails:
        parts.append(rails(readings))  # type: ignore[arg-type]
    shown = [part for part in parts if not isinstance(part, Table) or part.row_count]
    return Group(title, *(piece for part in shown for piece in (Text(), part)))


def screens(board: Board, interval: float) -> Iterator[Group]:
    """One screen after the other, for ever."""
    before: tuple[Core, ...] = ()
    watts = 0.0
    while True:
        readings = board.read().readings
        watts = max(watts, BoardState(readings).watts or 0.0)
        yield screen(readings, before, watts)
        before = readings.host.cores if readings.host else ()
        time.sleep(interval)


def show(board: Board, interval: float, console: Console) -> None:
    """Until Ctrl-C; one screen where the output is no terminal."""
    shown = screens(board, interval)
    if not console.is_terminal:
        next(shown)
        console.print(next(shown))
        return
    try:
        with Live(next(shown), console=console, screen=True, auto_refresh=False) as live:
            for picture in shown:
                live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return
