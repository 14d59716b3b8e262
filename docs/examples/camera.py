"""Say what a camera sees, again and again: python camera.py MODEL MMPROJ [CAMERA].

Needs OpenCV (pip install opencv-python). Frames that come while the model answers are dropped.
"""

import sys
import threading
import time
from typing import Any

import cv2

from orinllm.choose.sampling import Sampling
from orinllm.model import Model

model = Model.load(sys.argv[1], mmproj=sys.argv[2], context=4096)
camera = cv2.VideoCapture(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
newest, there = list[Any](), threading.Event()


def watch() -> None:
    """Keep the newest frame alone; none for three seconds is the end."""
    missed = 0
    while missed < 30:
        good, frame = camera.read()
        missed = 0 if good else missed + 1
        if good:
            newest[:] = [frame]
            there.set()
        else:
            time.sleep(0.1)
    newest.clear()
    there.set()


threading.Thread(target=watch, daemon=True).start()
while there.wait():
    there.clear()
    if not (frames := newest.copy()):
        sys.exit("the camera gives no frames")
    picture = cv2.cvtColor(frames[0], cv2.COLOR_BGR2RGB)
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What do you see?"}]
    answer = model.generate(
        [{"role": "user", "content": parts}], Sampling(temperature=0), max_tokens=48
    )
    print(answer.text, flush=True)
