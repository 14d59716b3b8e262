"""The page in a real browser: live with JavaScript, whole without it."""

import html
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.conftest import DEVFREQ, Tree, idle, maxn_load

from orinboard.files import Roots
from orinboard.replay import TreeOnDisk
from orinboard.sensors.debugfs import NVMAP_CLIENTS
from orinboard.sources import SOURCES, BoardReader
from orinexporter import page
from orinexporter.exporter import Exporter
from orinexporter.history import moment_of_readings
from orinexporter.web import ExporterServer

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


def dom(url: str, profile: Path, *more: str) -> str:
    """The page's document after six seconds of the browser's time."""
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=6000",
            "--hide-scrollbars",
            "--dump-dom",
            *more,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


class Watched(Exporter):
    """Puts the GPU to work once its page has been asked for."""

    stage: TreeOnDisk
    pages = 0

    def html_page(self) -> bytes:
        body = super().html_page()
        self.pages += 1
        self.stage.apply_changes({f"{DEVFREQ}/device/load": "871\n"})
        return body


@pytest.mark.parametrize("javascript", [True, False])
def test_the_page(
    javascript: bool,
    show: Callable[[Tree], Roots],
    stage: TreeOnDisk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # --dump-dom itself needs scripts, so that the page is given none.
    if not javascript:
        monkeypatch.setattr(page, "LIVE_JS", "")
    with BoardReader(show(idle())) as board:
        exporter = Watched(board)
        exporter.stage = stage
        with ExporterServer(("127.0.0.1", 0), exporter) as server:
            text = dom(server.url, tmp_path)
    assert "VDD_GPU_SOC" in text and "45.6 °C" in text and "under voltage" in text
    if javascript:
        assert exporter.pages >= 2 and "<b>87.1 %</b>" in text and 'class="lost"' not in text
    else:
        assert exporter.pages == 1 and "<b>0.0 %</b>" in text


#: Puts into the title what is wider than the window.
WIDTHS = """<script>
// A window of Chromium is 500 wide at least, a frame in it may be narrower.
const wide = [...document.querySelectorAll("*")].filter(
  (e) => e.getBoundingClientRect().right > innerWidth + 0.5 && !e.closest("svg"));
parent.document.title = innerWidth + " " + document.documentElement.scrollWidth + " " +
  wide.map((e) => e.outerHTML.slice(0, 60)).join("; ");
</script>"""


@pytest.mark.parametrize("width", [320, 768, 1280, 1600])
def test_nothing_is_wider_than_the_window(
    width: int, show: Callable[[Tree], Roots], tmp_path: Path
) -> None:
    clients = "CLIENT PROCESS PID SIZE\nuser a-program-with-a-long-name 4711 1741312K\n"
    tree = maxn_load() | {NVMAP_CLIENTS: clients}
    with BoardReader(show(tree), SOURCES, budget=10.0) as board:
        exporter = Exporter(board)
        for seconds in range(30):
            exporter._history.append(
                moment_of_readings(board.read().readings, time.monotonic() - 30 + seconds)
            )
        shown = html.escape(exporter.html_page().decode() + WIDTHS)
    (tmp_path / "page.html").write_text(
        f'<iframe style="width:{width}px;height:1200px;border:0" srcdoc="{shown}"></iframe>'
    )
    text = dom(f"file://{tmp_path}/page.html", tmp_path, "--window-size=1800,1300")
    found = re.search(r"<title>(\d+) (\d+) (.*?)</title>", text)
    assert found and (int(found[1]), int(found[2]), found[3]) == (width, width, "")
