"""The board in a terminal: `jetson-exporter top`.

The screen scrolls by lines where the board has more of them than the terminal. `q` ends it.
"""

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orinboard.board import BoardState
from orinboard.readings import CoreTicks, Readings
from orinboard.sources import BoardReader
from orinboard.summed_rails import find_rails_to_sum
from orinexporter.history import core_loads
from orinexporter.page import LEAST_WATTS, bytes_text, full_scale, throttle_celsius

#: Length of a bar, in characters.
BAR = 20
#: What no name of a board has, and what a terminal would obey: C0, DEL and C1 controls, and marks
#: without a width, some of which turn the rest of a line around.
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
#: What the keys do to the first line that is shown: lines, or pages.
KEYS: dict[bytes, tuple[int, int]] = {
    b"\x1b[A": (-1, 0),
    b"\x1bOA": (-1, 0),
    b"k": (-1, 0),
    b"\x1b[B": (1, 0),
    b"\x1bOB": (1, 0),
    b"j": (1, 0),
    b"\x1b[5~": (0, -1),
    b"\x1b[6~": (0, 1),
    b" ": (0, 1),
    b"\x1b[H": (0, -1000),
    b"\x1b[F": (0, 1000),
}
#: One key: an escape sequence, or a byte.
KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", flags=re.DOTALL)


def safe_text(text: str) -> Text:
    """A text of the board's, which is shown and neither obeyed nor read as markup."""
    return Text(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text))


def gauge_bar(value: float, full: float, style: str = "green") -> ProgressBar:
    """A bar of `value` over `full`."""
    return ProgressBar(total=full, completed=min(value, full), width=BAR, complete_style=style)


def three_column_table() -> Table:
    """A table without lines: what, how much, a bar."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=22, overflow="ellipsis", no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=20)
    table.add_column(width=BAR)
    return table


def overview_table(readings: Readings, watts: float) -> Table:
    """Power, GPU, temperature, fans; `watts` is the greatest power seen yet."""
    state, table = BoardState(readings), three_column_table()
    if state.module_watts is not None:
        full = full_scale(max(watts, state.module_watts), LEAST_WATTS)
        said = f"{state.module_watts:.1f} W"
        table.add_row("module power", said, gauge_bar(state.module_watts, full, "yellow"))
    for gpu in readings.gpus:
        if gpu.load is not None:
            load = f"{gpu.load:.1%}"
            table.add_row(safe_text(f"GPU {gpu.name} load"), load, gauge_bar(gpu.load, 1))
        if gpu.current_hz is not None:
            most = gpu.max_hz or gpu.current_hz
            name, drawn = safe_text(f"GPU {gpu.name} clock"), gauge_bar(gpu.current_hz, most)
            table.add_row(name, f"{gpu.current_hz / 1e6:.0f} of {most / 1e6:.0f} MHz", drawn)
    if (celsius := state.junction_or_hottest_celsius) is not None:
        trip = throttle_celsius(readings)
        style = "red" if celsius > trip - 5 else "green"
        said = f"{celsius:.1f} of {trip:.0f} °C"
        table.add_row("hottest zone", said, gauge_bar(celsius, trip, style))
    for fan in readings.fans:
        said = "– rpm" if fan.rpm is None else f"{fan.rpm} rpm"
        table.add_row(safe_text(fan.name), said, gauge_bar(fan.pwm or 0, 1))
    return table


def memory_table(readings: Readings) -> Table:
    """Memory, swap, and who has how much of the GPU's."""
    table, host = three_column_table(), readings.host
    if host and host.memory_bytes and host.memory_available_bytes is not None:
        used = host.memory_bytes - host.memory_available_bytes
        said = f"{bytes_text(used)} of {bytes_text(host.memory_bytes)}"
        table.add_row("memory", said, gauge_bar(used, host.memory_bytes))
    if readings.memory and readings.memory.nvmap_bytes is not None:
        table.add_row("of it for the GPU", bytes_text(readings.memory.nvmap_bytes), "")
    if host and host.swap_bytes and host.swap_free_bytes is not None:
        used = host.swap_bytes - host.swap_free_bytes
        said = f"{bytes_text(used)} of {bytes_text(host.swap_bytes)}"
        table.add_row("swap", said, gauge_bar(used, host.swap_bytes))
    if emc := readings.emc:
        most = emc.max_hz or emc.current_hz or 0
        clock = f"{(emc.current_hz or 0) / 1e6:.0f} of {most / 1e6:.0f} MHz"
        table.add_row("memory clock", clock, gauge_bar(emc.current_hz or 0, most))
    if (active := readings.emc_activity_hz) is not None:
        table.add_row("memory active", f"{active / 1e6:.0f} MHz", "")
    for process in readings.processes[:5]:
        name = safe_text(f"  {process.name} {process.pid}")
        table.add_row(name, bytes_text(process.nvmap_bytes), "")
    return table


def cpu_table(readings: Readings, before: tuple[CoreTicks, ...]) -> Table:
    """Every CPU's load and clock."""
    table = three_column_table()
    loads = core_loads(before, readings.host.cores if readings.host else ())
    clocks = {c.cpu: c.current_hz for c in readings.cpu.clocks} if readings.cpu else {}
    for cpu in sorted({*loads, *clocks}):
        hertz = clocks.get(cpu)
        said = [f"{loads[cpu]:.0%}"] if cpu in loads else []
        said += [f"{hertz / 1e6:.0f} MHz"] if hertz else []
        table.add_row(f"CPU {cpu}", " at ".join(said), gauge_bar(loads.get(cpu, 0), 1))
    return table


def zone_and_engine_table(readings: Readings) -> Table:
    """Every zone that answers, and the engines that root sees."""
    table, trip = three_column_table(), throttle_celsius(readings)
    for zone in readings.zones:
        if zone.celsius is not None:
            style = "red" if zone.celsius > trip - 5 else "green"
            drawn = gauge_bar(zone.celsius, trip, style)
            table.add_row(safe_text(zone.name), f"{zone.celsius:.1f} °C", drawn)
    for engine in readings.engines:
        said = "on" if engine.current_hz is None else f"{engine.current_hz / 1e6:.0f} MHz"
        busy = "" if engine.load is None else f"{engine.load:.0%} at "
        load_bar = "" if engine.load is None else gauge_bar(engine.load, 1)
        said = "off" if engine.enabled is False else busy + said
        table.add_row(safe_text(f"engine {engine.name}"), said, load_bar)
    return table


def rail_table_with_boundary(readings: Readings) -> Group:
    """Watts by rail, and what their sum holds."""
    table = three_column_table()
    for rail in readings.rails:
        said = "–" if rail.watts is None else f"{rail.watts:.2f} W"
        table.add_row(safe_text(f"{rail.name} {rail.device}"), said, "")
    whole = find_rails_to_sum(readings.rails)
    words = whole.words if whole else "unknown, as nobody knows which of these rails to add"
    return Group(table, Text(CONTROLS.sub("", f"the sum: {words}"), style="dim"))


def board_screen(readings: Readings, before: tuple[CoreTicks, ...], watts: float) -> Group:
    """Everything, one part below the other; a part that the board does not have is left out."""
    state, board = BoardState(readings), readings.identity
    title = safe_text(f"{board.model}, L4T {board.l4t or 'unknown'}" if board else "no Jetson here")
    if mode := readings.power_mode:
        title.append_text(safe_text(f", power mode {mode.name or mode.id}"))
    for name in state.raised_alerts:
        title.append_text(safe_text(f"  {name}")).stylize("bold red", len(title) - len(name))
    parts = [overview_table(readings, watts), cpu_table(readings, before)]
    parts += [memory_table(readings), zone_and_engine_table(readings)]
    if readings.rails:
        parts.append(rail_table_with_boundary(readings))  # type: ignore[arg-type]
    shown = [part for part in parts if not isinstance(part, Table) or part.row_count]
    return Group(title, *(piece for part in shown for piece in (Text(), part)))


class ScrolledScreen:
    """As many lines of a picture as the terminal has, from `first` on; the last one says more."""

    def __init__(self, picture: Group) -> None:
        self.picture, self.first = picture, 0
        self._keys: tuple[int, int] = (0, 0)

    def scroll(self, lines: int, pages: int) -> None:
        """Move with the next drawing, which knows how long the picture is."""
        self._keys = self._keys[0] + lines, self._keys[1] + pages

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.picture, options.update(height=None), pad=False)
        shown = max(console.height - 1, 1)
        (by, pages), self._keys = self._keys, (0, 0)
        wanted = self.first + by + pages * max(shown - 1, 1)
        self.first = min(max(wanted, 0), max(len(lines) - shown, 0))
        for line in islice(lines, self.first, self.first + shown):
            yield from line
            yield Segment.line()
        last = min(self.first + shown, len(lines))
        said = f"lines {self.first + 1}-{last} of {len(lines)}; arrows, PgUp, PgDn; q ends"
        yield Text(said[: console.width], style="dim", no_wrap=True, end="")


def iter_board_screens(
    board: BoardReader, interval: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[Group]:
    """One screen after the other, for ever."""
    before: tuple[CoreTicks, ...] = ()
    watts = 0.0
    while True:
        readings = board.read().readings
        watts = max(watts, BoardState(readings).module_watts or 0.0)
        yield board_screen(readings, before, watts)
        before = readings.host.cores if readings.host else ()
        wait(interval)


@contextmanager
def key_reader(descriptor: int) -> Iterator[Callable[[float], list[bytes]]]:
    """Ask the terminal behind `descriptor` for keys as they are pressed: none waits for Enter."""
    if not os.isatty(descriptor):

        def nothing(seconds: float) -> list[bytes]:
            time.sleep(seconds)
            return []

        yield nothing
        return
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> list[bytes]:
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        # A terminal that has gone away is one that ends.
        return KEY.findall(os.read(descriptor, 1024)) or [b"q"]

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class QuitError(Exception):
    """Somebody pressed `q`."""


def show_board(board: BoardReader, interval: float, console: Console) -> None:
    """Until `q` or Ctrl-C; one screen where the output is no terminal."""
    if not console.is_terminal:
        shown = iter_board_screens(board, interval)
        next(shown)
        console.print(next(shown))
        return
    with key_reader(sys.stdin.fileno()) as pressed:

        def wait(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                for key in pressed(left):
                    if key in (b"q", b"Q"):
                        raise QuitError
                    window.scroll(*KEYS.get(key, (0, 0)))
                    live.refresh()

        pictures = iter_board_screens(board, interval, wait)
        window = ScrolledScreen(next(pictures))
        with Live(window, console=console, screen=True, auto_refresh=False) as live:
            try:
                for window.picture in pictures:
                    live.refresh()
            except (KeyboardInterrupt, QuitError):
                return
