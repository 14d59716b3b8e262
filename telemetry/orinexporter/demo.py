"""The whole chain on any machine: a made-up board, the exporter, Prometheus with our rules.

`python -m orinexporter.demo`, or `make telemetry-demo`.
"""

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from orinboard.energy import EnergySampler
from orinboard.replay import Player
from orinboard.sources import Board
from orinexporter import scenario
from orinexporter.cli import parse_address, refusal, say
from orinexporter.prometheus import Prometheus, PrometheusError
from orinexporter.service import Exporter
from orinexporter.web import Server

#: The rules in the source tree; an installed package gets `--rules`.
RULES = Path(__file__).resolve().parent.parent / "rules"
#: Seconds between looks at the alerts.
WATCH_SECONDS = 2.0


def watch(
    prometheus: Prometheus,
    stop: threading.Event,
    tell: Callable[[str], None],
    interval: float = WATCH_SECONDS,
) -> None:
    """Tell when an alert begins or ends to fire, until `stop`."""
    known: dict[str, str] = {}
    while not stop.wait(interval):
        firing = prometheus.firing()
        for name in firing.keys() - known.keys():
            tell(f"alert {name} fires: {firing[name]}")
        for name in known.keys() - firing.keys():
            tell(f"alert {name} is over")
        known = firing


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--listen",
    default="127.0.0.1:9401",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Where the exporter serves.",
)
@click.option(
    "--prometheus",
    "prometheus_listen",
    default="127.0.0.1:9090",
    metavar="HOST:PORT",
    callback=parse_address,
    help="Where Prometheus serves.",
)
@click.option(
    "--rules",
    default=RULES,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of recording and alert rules.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="End after this long. Default: at Ctrl-C.",
)
def demo(
    listen: tuple[str, int],
    prometheus_listen: tuple[str, int],
    rules: Path,
    seconds: float | None,
) -> None:
    """Watch a made-up Jetson work, throttle and cool down, two minutes a round."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Player(scenario.frames) as player, Board(player.stage.roots) as board:
        exporter = Exporter(board, EnergySampler(player.stage.roots, monotonic=True))
        try:
            server = Server(listen, exporter)
        except OSError as error:
            raise click.UsageError(refusal(listen, error)) from None
        host, port = server.address
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with exporter, server:
            try:
                with Prometheus(
                    {"jetson": [address]},
                    sorted(rules.glob("*.yml")),
                    listen="{}:{}".format(*prometheus_listen),
                ) as prometheus:
                    say(f"the board:  {server.url}")
                    say(f"Prometheus: {prometheus.url}/graph?g0.expr=jetson_module_power_watts")
                    say(f"alerts:     {prometheus.url}/alerts (the board throttles after 45 s)")
                    say("Ctrl-C ends all of it")
                    if seconds is not None:
                        threading.Timer(seconds, stop.set).start()
                    watch(prometheus, stop, say)
            except PrometheusError as error:
                raise click.UsageError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demonstration with `argv` (the process's own arguments by default) and exit."""
    try:
        demo.main(args=argv, prog_name="telemetry-demo", standalone_mode=False)
    except click.ClickException as error:
        say(error.format_message())
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
