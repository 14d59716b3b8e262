"""The tiny encoders of Qwen's vision models: for `transformers`, and as llama.cpp's files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
WIDTH, HEADS, HIDDEN, LAYERS, MERGE, EPS = 48, 3, 80, 4, 2, 1e-6
#: Layers of which each is without windows, and whose rows go beside a picture's.
FULL, DEEPSTACK_AT = 2, (1, 2)
DEEPSTACK = len(DEEPSTACK_AT)
#: The side of the square of learned positions.
LEARNED = 6
PATCH = {"qwen2vl": 14, "qwen25vl": 14, "qwen3vl": 16}
#: Pixels of a picture at least and at most, in blocks; one is enlarged, and one made smaller.
LEAST, MOST = 16, 36
#: Rows of the two pictures.
ROWS = {"qwen2vl": [35, 30], "qwen25vl": [35, 30], "qwen3vl": [35, 30]}
MEAN, STD = [0.48, 0.45, 0.4], [0.27, 0.26, 0.28]
_KINDS = {"qwen2vl": "qwen2vl_merger", "qwen25vl": "qwen2.5vl_merger", "qwen3vl": "qwen3vl_merger"}


def limits(kind: str) -> dict[str, int]:
    """Return the limits of a picture's pixels."""
    cell = (PATCH[kind] * MERGE) ** 2
    return {"shortest_edge": LEAST * cell, "longest_edge": MOST * cell}


def weights(kind: str, out: int, draw: Callable[..., Array]) -> dict[str, Array]:
    """Return the tensors by their names in `transformers`."""
    patch, found = PATCH[kind], dict[str, Array]()

    def linear(name: str, rows: int, columns: int, biased: bool = True) -> None:
        found[f"visual.{name}.weight"] = draw(rows, columns)
        if biased:
            found[f"visual.{name}.bias"] = draw(rows, by=0.1)

    def norm(name: str, width: int, rms: bool) -> None:
        found[f"visual.{name}.weight"] = draw(width, around=1, by=0.1)
        if not rms:
            found[f"visual.{name}.bias"] = draw(width, by=0.1)

    found["visual.patch_embed.proj.weight"] = draw(WIDTH, 3, 2, patch, patch, by=0.04)
    rms, three = kind == "qwen25vl", kind == "qwen3vl"
    if three:
        found["visual.patch_embed.proj.bias"] = draw(WIDTH, by=0.1)
        found["visual.pos_embed.weight"] = draw(LEARNED**2, WIDTH, by=0.3)
    hidden = 4 * WIDTH if kind == "qwen2vl" else HIDDEN
    names = {"qwen2vl": ("fc1", "fc2"), "qwen3vl": ("linear_fc1", "linear_fc2")}
    up, down = names.get(kind, ("up_proj", "down_proj"))
    for at in range(LAYERS):
        prefix = f"blocks.{at}."
        norm(f"{prefix}norm1", WIDTH, rms)
        norm(f"{prefix}norm2", WIDTH, rms)
        linear(f"{prefix}attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{prefix}attn.proj", WIDTH, WIDTH)
        if rms:
            linear(f"{prefix}mlp.gate_proj", hidden, WIDTH)
        linear(f"{prefix}mlp.{up}", hidden, WIDTH)
        linear(f"{prefix}mlp.{down}", WIDTH, hidden)
    joined = WIDTH * MERGE**2
    norm("merger.norm" if three else "merger.ln_q", WIDTH, rms)
    linear("merger.linear_fc1" if three else "merger.mlp.0", joined, joined)
    linear("merger.linear_fc2" if three else "merger.mlp.2", out, joined)
    for at in range(DEEPSTACK if three else 0):
        norm(f"deepstack_merger_list.{at}.norm", joined, rms=False)
        linear(f"deepstack_merger_list.{at}.linear_fc1", joined, joined)
        linear(f"deepstack_merger_list.{at}.linear_fc2", out, joined)
    return found


_NAMES = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    **dict.fromkeys(("mlp.up_proj", "mlp.fc1", "mlp.linear_fc1"), "ffn_up"),
    **dict.fromkeys(("mlp.down_proj", "mlp.fc2", "mlp.linear_fc2"), "ffn_down"),
    **dict.fromkeys(("merger.norm", "merger.ln_q"), "v.post_ln"),
    **dict.fromkeys(("merger.linear_fc1", "merger.mlp.0"), "mm.0"),
    **dict.fromkeys(("merger.linear_fc2", "merger.mlp.2"), "mm.2"),
}


def _tensors(kind: str, full: str, values: Array, old_names: bool) -> dict[str, Array]:
    """Return a tensor as the converter names it, in parts where it does so."""
    stem, _, end = full.removeprefix("visual.").rpartition(".")
    if stem.startswith("blocks."):
        _, at, stem = stem.split(".", 2)
        prefix = f"v.blk.{at}."
    elif stem.startswith("deepstack_merger_list."):
        _, at, stem = stem.split(".", 2)
        return {f"v.deepstack.{DEEPSTACK_AT[int(at)]}.{stem.removeprefix('linear_')}.{end}": values}
    else:
        prefix = ""
    short = prefix + _NAMES[stem]
    if old_names:
        swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        short = prefix + swapped.get(_NAMES[stem], _NAMES[stem])
    if stem == "patch_embed.proj" and end == "weight":
        return {f"{short}.weight": values[:, :, 0], f"{short}.weight.1": values[:, :, 1]}
    if stem == "attn.qkv" and kind != "qwen3vl":
        parts = zip("qkv", np.split(values, 3), strict=True)
        return {f"{prefix}attn_{name}.{end}": part for name, part in parts}
    return {f"{short}.{end}": values}


def write(path: Path, kind: str, found: dict[str, Array], old_names: bool) -> None:
    """Write the projector's file; `old_names` as older converters called ffn_up and ffn_down."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", _KINDS[kind])
    if kind == "qwen3vl":
        writer.add_bool("clip.use_gelu", True)
        writer.add_array(
            "clip.vision.is_deepstack_layers", [at in DEEPSTACK_AT for at in range(LAYERS)]
        )
    if kind == "qwen25vl":
        writer.add_bool("clip.use_silu", True)
        writer.add_uint32("clip.vision.n_wa_pattern", FULL)
    numbers: dict[str, Any] = {
        "image_size": LEARNED * PATCH[kind],
        "patch_size": PATCH[kind],
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "block_count": LAYERS,
        "attention.head_count": HEADS,
        "projection_dim": found["visual.merger.linear_fc2.weight"].shape[0]
        if kind == "qwen3vl"
        else found["visual.merger.mlp.2.weight"].shape[0],
        "spatial_merge_size": MERGE,
        "image_min_pixels": limits(kind)["shortest_edge"],
        "image_max_pixels": limits(kind)["longest_edge"],
    }
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", EPS)
    writer.add_array("clip.vision.image_mean", MEAN)
    writer.add_array("clip.vision.image_std", STD)
    for full, values in found.items():
        for name, part in _tensors(kind, full, values, old_names).items():
            half = part.ndim > 1 and not name.startswith("v.position_embd")
            writer.add_tensor(name, np.ascontiguousarray(part, np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
