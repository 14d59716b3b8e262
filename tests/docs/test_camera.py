"""docs/examples/camera.py, with a camera and a model that are made up."""

import runpy
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.docs.pages import REPOSITORY

from orinllm.model import Model

EXAMPLE = REPOSITORY / "docs" / "examples" / "camera.py"
FRAMES, MISSED = 12, 5


class Camera:
    """A frame each 5 ms, one of which is missed; then none, once two were seen."""

    def __init__(self, number: int | str) -> None:
        self.number, self.asked, self.n_seen = number, 0, 0

    def read(self) -> tuple[bool, Any]:
        """Return whether there is a frame, and it."""
        time.sleep(0.005)
        self.asked += self.asked < FRAMES or self.n_seen > 1
        good = self.asked <= FRAMES and self.asked != MISSED
        return good, np.full((2, 2, 3), (self.asked, 0, 200), np.uint8) if good else None


def look(monkeypatch: pytest.MonkeyPatch, generate: Any, *flags: str) -> Camera:
    """Run the example until its end; each frame that it asks for is a second of its clock."""
    made = list[Camera]()

    def capture(number: int | str) -> Camera:
        made.append(Camera(number))
        return made[0]

    cv2 = SimpleNamespace(
        VideoCapture=capture, COLOR_BGR2RGB=4, cvtColor=lambda frame, code: frame[..., ::-1]
    )
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    model = SimpleNamespace(generate=lambda *args, **more: generate(made[0], *args))
    monkeypatch.setattr(Model, "load", lambda *files, **more: model)
    monkeypatch.setattr("time.monotonic", lambda: made[0].asked)
    monkeypatch.setattr(sys, "argv", ["camera.py", "model.gguf", "mmproj.gguf", *flags])
    with pytest.raises(SystemExit, match="the camera gives no frames"):
        runpy.run_path(str(EXAMPLE))
    return made[0]


def test_frames_are_dropped_and_a_camera_that_stops_is_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[Any]()

    def generate(camera: Camera, messages: Any) -> Any:
        picture, text = messages[0]["content"]
        camera.n_seen += 1
        seen.append(picture["image"][0, 0].tolist())
        until = camera.asked + 3
        while camera.asked < min(until, FRAMES - 1):
            time.sleep(0.001)
        return SimpleNamespace(text=f"{text['text']} {len(seen)}")

    camera = look(monkeypatch, generate, "3")
    assert camera.number == 3 and camera.asked == FRAMES + 3
    assert all(pixel[:2] == [200, 0] for pixel in seen)
    order = [pixel[2] for pixel in seen]
    assert order == sorted(set(order)) and order[1] - order[0] > 2
    assert capsys.readouterr().out.splitlines()[-1] == f"What do you see? {len(order)}"


def test_a_pipeline_is_a_camera_and_an_error_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first frame, and not one line a frame."""

    def generate(camera: Camera, messages: Any) -> Any:
        camera.n_seen = 2
        raise ValueError(camera.number)

    with pytest.raises(ValueError, match="nvarguscamerasrc ! appsink"):
        look(monkeypatch, generate, "nvarguscamerasrc ! appsink")
