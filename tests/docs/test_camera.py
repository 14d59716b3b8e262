"""docs/examples/camera.py, with a camera and a model that are made up."""

import runpy
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.docs.pages import REPOSITORY

from orinllm.model import Model

EXAMPLE = REPOSITORY / "docs" / "examples" / "camera.py"
FRAMES = 12


class Camera:
    """A frame each 10 ms, one of which is missed; then none, once one was seen."""

    seen: ClassVar[list[Any]]

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def read(self) -> tuple[bool, Any]:
        """Return whether there is a frame, and it."""
        self.asked += 1
        while True:
            SLEEP(0.01)
            if self.asked < FRAMES or self.seen:
                break
        good = self.asked <= FRAMES and self.asked != 5
        return good, np.full((2, 2, 3), (self.asked, 0, 200), np.uint8) if good else None


SLEEP = time.sleep


def test_frames_are_dropped_and_a_camera_that_stops_is_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, made, rests = list[Any](), list[Camera](), list[float]()
    Camera.seen = seen

    def generate(messages: Any, sampling: object, max_tokens: int) -> Any:
        picture, text = messages[0]["content"]
        seen.append(picture["image"][0, 0].tolist())
        SLEEP(0.035)
        return SimpleNamespace(text=f"{text['text']} {len(seen)}")

    def capture(number: int) -> Camera:
        made.append(Camera(number))
        return made[0]

    cv2 = SimpleNamespace(
        VideoCapture=capture, COLOR_BGR2RGB=4, cvtColor=lambda frame, code: frame[..., ::-1]
    )
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    monkeypatch.setattr(Model, "load", lambda *files, **more: SimpleNamespace(generate=generate))
    monkeypatch.setattr("time.sleep", rests.append)
    monkeypatch.setattr(sys, "argv", ["camera.py", "model.gguf", "mmproj.gguf", "3"])
    with pytest.raises(SystemExit, match="the camera gives no frames"):
        runpy.run_path(str(EXAMPLE))
    assert made[0].number == 3 and made[0].asked == FRAMES + 30 and sum(rests) > 3
    assert all(pixel[:2] == [200, 0] for pixel in seen)
    order = [pixel[2] for pixel in seen]
    assert order == sorted(set(order))
    assert any(after - before > 1 for before, after in pairwise(order))
    assert capsys.readouterr().out.splitlines()[-1] == f"What do you see? {len(order)}"
