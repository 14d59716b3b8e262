"""The page in a real browser: live with JavaScript, whole without it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.telemetry.conftest import Tree, idle

from exporter import page
from exporter.scenario import DEVFREQ
from exporter.service import Exporter
from exporter.web import Server
from jetson.files import Roots
from jetson.replay import Stage
from jetson.sources import Board

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


def dom(url: str, profile: Path) -> str:
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
            "--dump-dom",
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

    stage: Stage
    pages = 0

    def page(self) -> bytes:
        body = super().page()
        self.pages += 1
        self.stage.apply({f"{DEVFREQ}/device/load": "871\n"})
        return body


@pytest.mark.parametrize("javascript", [True, False])
def test_the_page(
    javascript: bool,
    show: Callable[[Tree], Roots],
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # --dump-dom itself needs scripts, so that the page is given none.
    if not javascript:
        monkeypatch.setattr(page, "LIVE_JS", "")
    with Board(show(idle())) as board:
        exporter = Watched(board)
        exporter.stage = stage
        with Server(("127.0.0.1", 0), exporter) as server:
            text = dom(server.url, tmp_path)
    assert "VDD_GPU_SOC" in text and "45.6 °C" in text and "under voltage" in text
    if javascript:
        assert exporter.pages >= 2 and "<b>87.1 %</b>" in text and 'class="lost"' not in text
    else:
        assert exporter.pages == 1 and "<b>0.0 %</b>" in text
