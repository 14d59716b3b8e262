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
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.engine.vision import tiny, tiny_qwen

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
        "hidden_size": tiny.dim(kind),
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


_QWENS = {
    "qwen2vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen25vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}


def _qwen(kind: str) -> Any:
    """Return a model of pictures of any size."""
    wide, rope = tiny.dim(kind), {"rope_type": "default", "rope_theta": 1e4}
    text = _text(kind) | {"rope_parameters": rope | {"mrope_section": tiny.SECTIONS[kind]}}
    if kind == "qwen3vl":
        vision: dict[str, Any] = {
            "num_position_embeddings": tiny_qwen.LEARNED**2,
            "out_hidden_size": wide,
        }
        vision["deepstack_visual_indexes"] = tiny_qwen.DEEPSTACK_AT
    else:
        del text["head_dim"]
        vision = {"window_size": 112, "fullatt_block_indexes": [1, 3], "out_hidden_size": wide}
    vision |= {
        "depth": tiny_qwen.LAYERS,
        "hidden_size": tiny_qwen.WIDTH,
        "intermediate_size": tiny_qwen.HIDDEN,
        "num_heads": tiny_qwen.HEADS,
        "patch_size": tiny_qwen.PATCH[kind],
    }
    if kind == "qwen2vl":
        vision |= {"embed_dim": tiny_qwen.WIDTH, "hidden_size": wide, "mlp_ratio": 4}
        del vision["window_size"], vision["fullatt_block_indexes"], vision["out_hidden_size"]
        del vision["intermediate_size"]
    config, model = _QWENS[kind]
    return model(config(text_config=text, vision_config=vision, image_token_id=IMAGE))


def model_of(kind: str) -> Any:
    """Return a model with the tiny weights."""
    if kind in _QWENS:
        model: Any = _qwen(kind)
    elif kind == "gemma3":
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
        model = Gemma3ForConditionalGeneration(config)
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


def _ids(kind: str) -> list[int]:
    ids: list[int] = []
    for part in tiny.prompt(kind):
        ids += [part] if isinstance(part, int) else [IMAGE] * tiny.rows(kind)[part[0]]
    return ids


def record_qwen(kind: str) -> dict[str, Any]:
    """Return rows of both pictures, the first logits, and 24 greedy tokens."""
    model, limits = model_of(kind), tiny_qwen.limits(kind)
    processor = Qwen2VLImageProcessorPil(
        size=limits,
        patch_size=tiny_qwen.PATCH[kind],
        image_mean=tiny_qwen.MEAN,
        image_std=tiny_qwen.STD,
    )
    images = [Image.fromarray(picture) for picture in tiny.pictures(kind)]
    both = processor(images=images, return_tensors="pt")
    counts = (both["image_grid_thw"].prod(-1) // tiny_qwen.MERGE**2).tolist()
    assert counts == tiny.rows(kind), (kind, counts, both["image_grid_thw"])
    seen = model.model.get_image_features(both["pixel_values"], both["image_grid_thw"])
    parts = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
    rows = torch.cat([torch.cat(list(part)) for part in parts], dim=-1).detach().numpy()
    order = [part[0] for part in tiny.prompt(kind) if not isinstance(part, int)]
    shown = processor(images=[images[at] for at in order], return_tensors="pt")
    ids, said, first = _ids(kind), list[int](), None
    for _ in range(24):
        inputs = torch.tensor([ids + said])
        found = model(
            input_ids=inputs, mm_token_type_ids=(inputs == IMAGE).int(), use_cache=False, **shown
        )
        logits = found.logits[0, -1].detach()
        first = logits.numpy() if first is None else first
        said.append(int(logits.argmax()))
    return {f"{kind}.rows": rows, f"{kind}.logits": first, f"{kind}.tokens": np.array(said)}


def record(kind: str) -> dict[str, Any]:
    """Return rows of all tiles, the first logits, and 24 greedy tokens."""
    model = model_of(kind)
    pixels = [pixels_of(kind, picture) for picture in tiny.pictures(kind)]
    assert [len(each) for each in pixels] == tiny.tiles(kind)
    values = torch.from_numpy(np.concatenate(pixels))
    given = values if kind == "gemma3" else values[None]
    features = model.model.get_image_features(given).pooler_output
    ids, said, first = _ids(kind), list[int](), None
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
    everything: dict[str, Any] = record("gemma3") | record("idefics3")
    for name in tiny.QWENS:
        everything |= record_qwen(name)
    np.savez_compressed(Path(__file__).with_name("recorded.npz"), **everything)
