"""Answers as a worker does; a repetition takes as many milliseconds as speed.txt beside it says.

Each process is lucky or not by a percent or so, for as long as it lives.
"""

import json
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MILLISECONDS = float(Path(__file__).parents[2].joinpath("speed.txt").read_text())
LUCK = random.gauss(1.0, 0.01)

ANSWERS: dict[str, dict[str, Any]] = {
    "Open": {
        "type": "Identity",
        "software": f"tinygrad {version('tinygrad')}",
        "build_commit": version("tinygrad"),
        "build_number": None,
        "device": "CPU",
        "arch": "x",
        "renderer": "x",
        "device_name": None,
        "driver": None,
        "n_threads": 1,
    },
    "Load": {
        "type": "Loaded",
        "load_s": 0.1,
        "decode_path": "jit",
        "included": "nothing",
        "chunk": 32,
    },
    "WarmUp": {
        "type": "WarmedUp",
        "seconds": 0.1,
        "repetition_s": 0.01,
        "compile_s": 0.0,
        "kernels_compiled": 0,
        "kernels_per_token": 1,
        "launches_per_token": 1,
        "type_k": "f16",
        "type_v": "f16",
    },
}

for line in sys.stdin:
    asked = json.loads(line)["type"]
    answer = ANSWERS.get(asked) or {
        "type": "Measured",
        "ns": round(MILLISECONDS * LUCK * random.gauss(1.0, 0.001) * 1e6),
        "ended_s": time.monotonic(),
        "peak_device_bytes": 1,
        "peak_rss_bytes": 1,
        "kernels_compiled": 0,
    }
    print(json.dumps(answer), flush=True)
