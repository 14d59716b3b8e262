"""Record what `transformers` makes of the tiny models, in recorded.npz beside this file.

    pip install torch==2.13.0 transformers==5.23.0 pillow gguf
    python tests/engine/vision/record.py

torch is no dependency of the tests, which compare with the record.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from PIL import Image
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.engine.vision import tiny

IMAGE = 319  # the last token of the vocabulary stands for a row
MEAN = STD = [0.5, 0.5, 0.5]


def _vision() -> dict[str, Any]:
    return {
        "hidden_size": tiny.VISION_DIM,
        "intermediate_size": tiny.VISION_HIDDEN,
        "num_hidden_layers": tiny.VISION_LAYERS,
        "num_attention_heads": tiny.VISION_HEADS,
        "image_size": tiny.SIZE,
        "patch_size": tiny.PATCH,
        "layer_norm_eps": tiny.VISION_EPS,
        "hidden_act": "gelu_pytorch_tanh",
    }


def _text(kind: str) -> dict[str, Any]:
    return {
        "vocab_size": len(tiny.tokens(kind)),
        "hidden_size": tiny.DIM,
        "intermediate_size": tiny.HIDDEN,
        "num_hidden_layers": tiny.LAYERS,
        "num_attention_heads": tiny.HEADS,
        "num_key_value_heads": tiny.KV_HEADS,
        "head_dim": tiny.HEAD_DIM,
        "max_position_embeddings": tiny.CONTEXT,
        "rms_norm_eps": tiny.EPS,
        "tie_word_embeddings": kind == "gemma3",
        "pad_token_id": 0,
    }


def model_of(kind: str) -> Any:
    """Return a model with the tiny weights."""
    if kind == "gemma3":
        more = {
            "sliding_window": tiny.WINDOW,
            "query_pre_attn_scalar": tiny.HEAD_DIM,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
        config: Any = Gemma3Config(
            text_config=_text(kind) | more,
            vision_config=_vision() | {"vision_use_head": False},
            mm_tokens_per_image=tiny.ROWS,
            image_token_index=IMAGE,
        )
        model: Any = Gemma3ForConditionalGeneration(config)
    else:
        config = Idefics3Config(
            text_config=_text(kind) | {"model_type": "llama", "rope_theta": 1e4},
            vision_config=_vision(),
            scale_factor=tiny.MERGE,
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        )
        model = Idefics3ForConditionalGeneration(config)
    found = tiny.weights(kind)
    names = dict(model.named_parameters())
    used = set()
    for part, ends in ((found.text, ("language_model.", "text_model.")), (found.vision, ("",))):
        for name, values in part.items():
            (full,) = [
                n
                for n in names
                if n == name
                or (
                    n.endswith(name)
                    and (part is found.text) == any(f"{end}{name}" in n for end in ends if end)
                )
            ]
            names[full].data.copy_(torch.from_numpy(values.reshape(names[full].shape)))
            used.add(full)
    left = {n for n in names if n not in used and n != "lm_head.weight"}
    assert not left, left
    return model.eval()


def pixels_of(kind: str, picture: Any) -> Any:
    """Return a picture's tiles as the processor makes them: (tiles, 3, size, size)."""
    image = Image.fromarray(picture)
    if kind == "gemma3":
        size = {"height": tiny.SIZE, "width": tiny.SIZE}
        processor: Any = Gemma3ImageProcessorPil(size=size, image_mean=MEAN, image_std=STD)
        return processor(images=[image], return_tensors="np")["pixel_values"]
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": tiny.LONGEST},
        max_image_size={"longest_edge": tiny.SIZE},
        image_mean=MEAN,
        image_std=STD,
    )
    return processor(images=[[image]], return_tensors="np")["pixel_values"][0]


def record(kind: str) -> dict[str, Any]:
    """Return rows of all tiles, the first logits, and 24 greedy tokens."""
    model = model_of(kind)
    pixels = [pixels_of(kind, picture) for picture in tiny.pictures(kind)]
    assert [len(each) for each in pixels] == tiny.tiles(kind)
    values = torch.from_numpy(np.concatenate(pixels))
    given = values if kind == "gemma3" else values[None]
    features = model.model.get_image_features(given).pooler_output
    ids: list[int] = []
    for part in tiny.prompt(kind):
        ids += [part] if isinstance(part, int) else [IMAGE] * tiny.ROWS
    said, first = list[int](), None
    for _ in range(24):
        inputs = torch.tensor([ids + said])
        more = {"token_type_ids": (inputs == IMAGE).long()} if kind == "gemma3" else {}
        found = model(input_ids=inputs, pixel_values=given, use_cache=False, **more)
        logits = found.logits[0, -1].detach()
        first = logits.numpy() if first is None else first
        said.append(int(logits.argmax()))
    rows = torch.cat(list(features)).detach().reshape(-1, tiny.DIM).numpy()
    return {f"{kind}.rows": rows, f"{kind}.logits": first, f"{kind}.tokens": np.array(said)}


if __name__ == "__main__":
    np.savez_compressed(
        Path(__file__).with_name("recorded.npz"), **record("gemma3"), **record("idefics3")
    )
