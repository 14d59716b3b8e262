"""Say what a camera sees: python camera.py MODEL MMPROJ [CAMERA]; needs opencv-python."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cv2

from orinllm.model import Model

model = Model.load(sys.argv[1], mmproj=sys.argv[2], context=4096)
camera = cv2.VideoCapture(*(int(n) if n.isdigit() else n for n in sys.argv[3:] or "0"))


def print_description(frame: object) -> None:
    """Say what a frame shows."""
    picture = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    seen = [{"type": "image", "image": picture}, {"type": "text", "text": "What do you see?"}]
    print(model.generate([{"role": "user", "content": seen}], max_tokens=48).text, flush=True)


with ThreadPoolExecutor(1) as pool:
    answer, last = pool.submit(print, end=""), time.monotonic()
    while time.monotonic() < last + 3:  # seconds without a frame
        good, frame = camera.read()
        last = time.monotonic() if good else last
        if good and answer.done():  # other frames are dropped
            answer.result()  # raises what went wrong
            answer = pool.submit(print_description, frame)
sys.exit("the camera gives no frames")
