"""The server's page in a real browser: pictures dropped, chosen, of a camera, or none."""

import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.benchmarks.show.chromium import CHROMIUM, Chromium
from tests.engine.server.live import PATIENCE, Started, command
from tests.engine.vision import tiny

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("page")
    tiny.write_text(folder / "tiny.gguf", "gemma3")
    tiny.write_mmproj(folder / "mmproj.gguf", "gemma3")
    flags = ("--mmproj", str(folder / "mmproj.gguf"))
    with command(folder / "tiny.gguf", folder / "log", *flags) as started:
        yield started


class Page:
    """The page, as a person uses it."""

    def __init__(self, browser: Chromium) -> None:
        self.browser = browser

    def wait(self, expression: str) -> Any:
        """Return what a script yields once that is something."""
        until = time.monotonic() + PATIENCE
        while not (found := self.browser.evaluate(expression)):
            assert time.monotonic() < until, expression
            time.sleep(0.05)
        return found

    def drop(self, *files: Path) -> None:
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.browser.ask("Input.dispatchDragEvent", type=kind, x=200, y=200, data=data)

    def click(self, name: str) -> None:
        self.browser.evaluate(f"$({name!r}).click(); 0")

    def send(self, text: str) -> None:
        self.browser.evaluate(f"$('text').value = {text!r}; $('form').requestSubmit(); 0")
        self.wait("running === null")

    def last_body(self) -> Any:
        """Return the last request to the model."""
        sent = [
            event["params"]
            for event in self.browser._events
            if event.get("method") == "Network.requestWillBeSent"
            and event["params"]["request"]["url"].endswith("/chat/completions")
        ][-1]
        data = self.browser.ask("Network.getRequestPostData", requestId=sent["requestId"])
        return json.loads(data["postData"])


def test_pictures_on_the_page(server: Started, tmp_path: Path) -> None:
    for at, picture in enumerate(tiny.pictures("gemma3")):
        Image.fromarray(picture).save(tmp_path / f"photo{at}.png")
    (tmp_path / "notes.txt").write_text("words")
    (tmp_path / "large.png").write_bytes(bytes((5 << 20) + 1))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    with Chromium(tmp_path / "profile") as browser:
        page = Page(browser)
        browser.ask("Page.navigate", url=server.url)
        page.wait("document.readyState === 'complete' && typeof take === 'function'")

        page.drop(tmp_path / "photo0.png", tmp_path / "notes.txt", tmp_path / "large.png")
        page.wait("document.querySelectorAll('#shown img').length === 1")
        errors = page.wait("[...document.querySelectorAll('.error')].map(e => e.textContent)")
        assert errors == ["notes.txt is no picture", "large.png is larger than 5 MB"]
        assert page.wait("document.querySelector('#shown img').naturalWidth") == 70

        node = browser.ask("DOM.getDocument", depth=-1)["root"]["nodeId"]
        chooser = browser.ask("DOM.querySelector", nodeId=node, selector="#file")["nodeId"]
        files = [str(tmp_path / "photo1.png")]
        browser.ask("DOM.setFileInputFiles", nodeId=chooser, files=files)
        page.wait("document.querySelectorAll('#shown img').length === 2")
        page.send("What?")
        page.wait("document.querySelector('.assistant span').textContent")
        (message,) = page.last_body()["messages"]
        assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
        assert browser.evaluate("document.querySelectorAll('.user img').length") == 2
        assert browser.evaluate("document.querySelectorAll('#shown img').length") == 0

        page.drop(tmp_path / "broken.png")
        page.wait("document.querySelectorAll('#shown img').length === 1")
        page.send("And this?")
        said = page.wait("document.querySelector('main').lastChild.textContent")
        assert "the picture is damaged" in said or "it is no picture" in said
        assert browser.evaluate("$('text').value") == "And this?"
        assert len(page.last_body()["messages"]) == 3  # with what was seen before
        page.click("camera")
        page.wait("$('talk').lastChild.textContent.startsWith('no camera: ')")
        assert not [line for line in browser.complaints() if "400" not in line]


def test_a_camera_on_the_page(server: Started, tmp_path: Path) -> None:
    """One that Chromium makes up."""
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    with Chromium(tmp_path / "profile", *flags) as browser:
        page = Page(browser)
        browser.ask("Page.navigate", url=server.url)
        page.wait("document.readyState === 'complete' && typeof photograph === 'function'")
        page.click("camera")
        assert page.wait("!$('seen').hidden && $('seen').videoWidth") == 640
        assert browser.evaluate("$('camera').textContent") == "Take"
        page.click("camera")
        assert page.wait("document.querySelector('#shown img')?.naturalWidth") == 640
        assert browser.evaluate("$('seen').hidden && $('seen').srcObject.active") is False
        page.send("What?")
        (message,) = page.last_body()["messages"]
        head, _, data = message["content"][0]["image_url"]["url"].partition(",")
        assert head == "data:image/jpeg;base64"
        photo = Image.open(io.BytesIO(base64.b64decode(data)))
        assert photo.size == (640, 480) and len(photo.getcolors(1 << 20) or ()) > 9
        page.wait("document.querySelector('.assistant span').textContent")
        assert not browser.complaints()
        browser.evaluate("Object.defineProperty(navigator, 'mediaDevices', {}); 0")
        page.click("camera")
        assert page.wait("$('file').hasAttribute('capture')")  # without HTTPS: a phone's own
