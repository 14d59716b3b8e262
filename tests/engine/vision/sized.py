"""Layers of Qwen3-VL 2B (and Cosmos-Reason2) with random weights, to be timed.

`python -m tests.engine.vision.sized FOLDER` writes FOLDER/model.gguf, four of the language model's
28 layers with a vocabulary of 320, and FOLDER/mmproj.gguf, six of the encoder's 24, both in F16.
Its answers are of ASCII's signs, so that each token has a text.
"""

import sys
from pathlib import Path
from typing import Any

from tests.engine.vision import tiny, tiny_qwen

_TEXT = {"DIM": 2048, "HEADS": 16, "KV_HEADS": 8, "HEAD_DIM": 128, "HIDDEN": 6144, "LAYERS": 4}
_TEXT |= {"CONTEXT": 8192}
_SEES: dict[str, Any] = {"WIDTH": 1024, "HEADS": 16, "HIDDEN": 4096, "LAYERS": 6, "LEARNED": 48}
_SEES |= {"DEEPSTACK_AT": (1, 3, 5), "DEEPSTACK": 3, "LEAST": 64, "MOST": 4096}


def write(folder: Path) -> None:
    """Write the two files."""
    tiny.SECTIONS["qwen3vl"] = [24, 20, 20]
    for module, values in ((tiny, _TEXT), (tiny_qwen, _SEES)):
        for name, value in values.items():
            setattr(module, name, value)
    of_kind = tiny.weights

    def readable(kind: str) -> tiny.Weights:
        found = of_kind(kind)
        head = found.text["lm_head.weight"]
        head[:33] = head[127:] = 0
        return found

    tiny.weights = readable
    tiny.write_text(folder / "model.gguf", "qwen3vl")
    tiny.write_mmproj(folder / "mmproj.gguf", "qwen3vl")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
