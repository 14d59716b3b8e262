"""A headless Chromium that shows a page as a phone, a screen or a printer would.

It is driven over `--remote-debugging-pipe` (file descriptors 3 and 4, a NUL behind each message),
which needs no library: https://chromedevtools.github.io/devtools-protocol/.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ANSWER_SECONDS = 120.0


class Chromium:
    """One browser with one page; use as a context manager."""

    def __init__(self, profile: Path, *flags: str) -> None:
        assert CHROMIUM is not None
        self._profile, self._flags = profile, flags
        self._next = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> "Chromium":
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The shell puts the pipes where Chromium wants them, whatever numbers they have here.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, str(CHROMIUM)),
                *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--remote-debugging-pipe", f"--user-data-dir={self._profile}"),
                *(*self._flags, "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self.ask("Target.getTargets", session=None)["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.ask(
            "Target.attachToTarget", session=None, targetId=page["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ProcessLookupError):
            os.close(self._out)
            os.close(self._in)
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def ask(self, method: str, session: str | None = "page", **parameters: Any) -> Any:
        """Send a command and return its result; raises RuntimeError if Chromium refuses it."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._events.append(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(f"no answer from {CHROMIUM}")
            if not (data := os.read(self._in, 1 << 20)):
                raise RuntimeError(f"{CHROMIUM} ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def show(self, page: Path, width: int, scheme: str = "light", height: int = 900) -> None:
        """Open a file in a window of `width` CSS pixels; below 600 it is a phone."""
        phone = width < 600
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self._events.clear()
        self.ask("Page.navigate", url=page.absolute().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """Return what a script in the page yields; the page's own policy does not bind it."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since it was opened."""
        return [of["request"]["url"] for of in self._seen("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Return what the browser's log says of the page."""
        return [of["entry"]["text"] for of in self._seen("Log.entryAdded")]

    def _seen(self, method: str) -> list[dict[str, Any]]:
        """Return what events of a kind say, those until now."""
        self.evaluate("0")
        return [event["params"] for event in self._events if event.get("method") == method]

    def screenshot(self, path: Path, whole: bool = True, clip: float | None = None) -> None:
        """Write a PNG of the page, or of its first `clip` CSS pixels."""
        parameters: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            height = min(size["height"], clip or size["height"])
            parameters["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": height,
                                  "scale": 1}  # fmt: skip
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", **parameters)["data"]))

    def print_pdf(self, path: Path) -> None:
        """Write the page as a printer gets it, on A4."""
        answer = self.ask("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(answer["data"]))
