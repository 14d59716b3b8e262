"""Tiny vision models: the same random weights for a GGUF file, its mmproj and `transformers`.

Values are such as halves hold, so that no file rounds them. record.py needs nothing of the engine,
and this file neither. tiny_qwen.py has the encoders of pictures of any size.
"""

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from tests.engine.vision import tiny_qwen

Array = NDArray[np.float32]
DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 64, 2, 1, 64, 128, 3
WINDOW, CONTEXT = 24, 256
VISION_DIM, VISION_HEADS, VISION_HIDDEN, VISION_LAYERS = 48, 3, 80, 2
SIZE, PATCH, MERGE = 32, 4, 2
SIDE = SIZE // PATCH
ROWS = (SIDE // MERGE) ** 2
EPS, VISION_EPS = 1e-6, 1e-6
LONGEST = 64
QWENS = ("qwen2vl", "qwen25vl", "qwen3vl")
KINDS = ("gemma3", "idefics3", *QWENS)
#: Pairs of a head that turn by time, row and column.
SECTIONS = {"qwen2vl": [8, 12, 12], "qwen25vl": [8, 12, 12], "qwen3vl": [12, 10, 10]}
#: A picture's place in a prompt: the index of the picture, and of its tile.
Place = tuple[int, int]
_SPECIAL = {
    "gemma3": ["<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>"],
    "idefics3": [
        "<fake_token_around_image>",
        "<global-img>",
        "<image>",
        "<|im_start|>",
        "<end_of_utterance>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ],
    **{
        kind: [
            f"<|{name}|>" for name in "vision_start vision_end image_pad im_start im_end".split()
        ]
        for kind in QWENS
    },
}
_ENDS = {"gemma3": "<end_of_turn>", "idefics3": "<end_of_utterance>"}
TEMPLATES = {
    "gemma3": (
        "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else "
        "m['role']) + '\n' }}{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
        "{% for item in m['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
        "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
        "{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "idefics3": (
        "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
        "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    **dict.fromkeys(
        QWENS,
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for item in m['content'] %}"
        "{% if item['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
        "{% elif 'text' in item %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ),
}


def dim(kind: str) -> int:
    """Return the width of the language model; Qwen2's heads are as wide as it by their number."""
    return HEADS * HEAD_DIM if kind in ("qwen2vl", "qwen25vl") else DIM


def tokens(kind: str) -> list[str]:
    """Return the vocabulary: bytes as byte-level BPE spells them, then special tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in spelled]
    spelled |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    found = [spelled[byte] for byte in range(256)] + _SPECIAL[kind]
    return found + [f"<unused{at}>" for at in range(320 - len(found))]


@dataclass
class Weights:
    """Tensors by their names in `transformers`: of the language model, and of the rest."""

    kind: str
    text: dict[str, Array] = field(default_factory=dict)
    vision: dict[str, Array] = field(default_factory=dict)


def weights(kind: str) -> Weights:
    """Return the weights of a family."""
    rng, found = np.random.default_rng(37), Weights(kind)

    def draw(*shape: int, around: float = 0.0, by: float | None = None) -> Array:
        spread = shape[-1] ** -0.5 if by is None else by
        return (rng.normal(around, spread, shape)).astype(np.float16).astype(np.float32)

    text, gemma, wide = found.text, kind == "gemma3", dim(kind)
    near = 0.0 if gemma else 1.0
    text["embed_tokens.weight"] = draw(len(tokens(kind)), wide, by=0.05)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    for at in range(LAYERS):
        prefix = f"layers.{at}."
        for name in norms:
            text[f"{prefix}{name}.weight"] = draw(wide, around=near, by=0.1)
        if gemma or kind == "qwen3vl":
            for name in ("q_norm", "k_norm"):
                text[f"{prefix}self_attn.{name}.weight"] = draw(HEAD_DIM, around=near, by=0.1)
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
        for name, n in (rows | {"v_proj": KV_HEADS * HEAD_DIM}).items():
            text[f"{prefix}self_attn.{name}.weight"] = draw(n, wide)
            if kind in ("qwen2vl", "qwen25vl"):
                text[f"{prefix}self_attn.{name}.bias"] = draw(n, by=0.1)
        text[f"{prefix}self_attn.o_proj.weight"] = draw(wide, HEADS * HEAD_DIM)
        text[f"{prefix}mlp.gate_proj.weight"] = draw(HIDDEN, wide)
        text[f"{prefix}mlp.up_proj.weight"] = draw(HIDDEN, wide)
        text[f"{prefix}mlp.down_proj.weight"] = draw(wide, HIDDEN)
    text["norm.weight"] = draw(wide, around=near, by=0.1)
    if not gemma:
        text["lm_head.weight"] = draw(len(tokens(kind)), wide)
    vision = found.vision
    if kind in QWENS:
        vision |= tiny_qwen.weights(kind, wide, draw)
        return found
    vision["embeddings.patch_embedding.weight"] = draw(VISION_DIM, 3, PATCH, PATCH, by=0.15)
    vision["embeddings.patch_embedding.bias"] = draw(VISION_DIM, by=0.1)
    vision["embeddings.position_embedding.weight"] = draw(SIDE**2, VISION_DIM, by=0.3)
    for at in range(VISION_LAYERS):
        for name, (n, m) in _LAYER.items():
            vision[f"encoder.layers.{at}.{name}.weight"] = (
                draw(n, m) if m else draw(n, around=1, by=0.1)
            )
            vision[f"encoder.layers.{at}.{name}.bias"] = draw(n, by=0.1)
    vision["post_layernorm.weight"] = draw(VISION_DIM, around=1, by=0.1)
    vision["post_layernorm.bias"] = draw(VISION_DIM, by=0.1)
    if gemma:
        vision["mm_soft_emb_norm.weight"] = draw(VISION_DIM, by=0.1)
        vision["mm_input_projection_weight"] = draw(VISION_DIM, DIM, by=0.15)
    else:
        vision["modality_projection.proj.weight"] = draw(DIM, VISION_DIM * MERGE**2, by=0.1)
    return found


_LAYER = {
    "layer_norm1": (VISION_DIM, 0),
    "self_attn.q_proj": (VISION_DIM, VISION_DIM),
    "self_attn.k_proj": (VISION_DIM, VISION_DIM),
    "self_attn.v_proj": (VISION_DIM, VISION_DIM),
    "self_attn.out_proj": (VISION_DIM, VISION_DIM),
    "layer_norm2": (VISION_DIM, 0),
    "mlp.fc1": (VISION_HIDDEN, VISION_DIM),
    "mlp.fc2": (VISION_DIM, VISION_HIDDEN),
}
_TEXT_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_VISION_NAMES = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "mm_soft_emb_norm": "mm.soft_emb_norm",
    "mm_input_projection_weight": "mm.input_projection",
    "modality_projection.proj": "mm.model.fc",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def _add(writer: gguf.GGUFWriter, name: str, values: Array) -> None:
    """Positions are floats, as the converter has them: llama.cpp adds no halves."""
    half = values.ndim > 1 and not name.startswith("v.position_embd")
    writer.add_tensor(name, values.astype(np.float16) if half else values)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: Array, heads: int) -> Array:
    """Return rows of q or k in the order of llama's rotation in a GGUF file."""
    pairs = values.reshape(heads, 2, HEAD_DIM // 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


def write_text(path: Path, kind: str, experts: int = 0) -> None:
    """Write the language model's file.

    experts: so many which are alike, and of which each token takes two, stand for a feed-forward
    part. What they make together is what it makes.
    """
    gemma, found = kind == "gemma3", weights(kind)
    name = {"idefics3": "llama", "qwen25vl": "qwen2vl"}.get(kind, kind)
    name += "moe" if experts else ""
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(dim(kind))
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(1e6 if gemma else 1e4)
    if gemma:
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern([True, False, True])
    if kind in QWENS:
        writer.add_rope_dimension_sections([*SECTIONS[kind], 0])
    if kind == "qwen3vl":
        writer.add_num_deepstack_layers(tiny_qwen.DEEPSTACK)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
    _write_vocabulary(writer, kind)
    for full, values in found.text.items():
        stem, _, end = full.rpartition(".")
        parts = stem.split(".", 2)
        layer = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        key = parts[2] if layer else parts[0]
        if key == "post_attention_layernorm":
            short = "post_attention_norm" if gemma else "ffn_norm"
        else:
            short = _TEXT_NAMES[key]
        if name == "llama" and key in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _interleaved(values, HEADS if "q_proj" in key else KV_HEADS)
        if gemma and values.ndim == 1:
            values = values + 1
        if experts and short.startswith("ffn_") and values.ndim == 2:
            short, values = f"{short}_exps", np.stack([values] * experts)
        if short == "ffn_up_exps":
            router = np.random.default_rng(len(layer)).normal(0, 1, (experts, dim(kind)))
            writer.add_tensor(f"{layer}ffn_gate_inp.weight", router.astype(np.float32))
        _add(writer, f"{layer}{short}.{end}", values)
    _write(writer)


def _write_vocabulary(writer: gguf.GGUFWriter, kind: str) -> None:
    found, special = tokens(kind), set(_SPECIAL[kind])
    writer.add_vocab_size(len(found))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(found)
    types = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in found]
    writer.add_token_types(types)
    writer.add_token_merges(["a n"])
    end = found.index(_ENDS.get(kind, "<|im_end|>"))
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATES[kind])


def write_mmproj(path: Path, kind: str, old_names: bool = False) -> None:
    """Write the projector's file; `old_names` as older converters called ffn_up and ffn_down."""
    if kind in QWENS:
        tiny_qwen.write(path, kind, weights(kind).vision, old_names)
        return
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIZE,
        "patch_size": PATCH,
        "embedding_length": VISION_DIM,
        "feed_forward_length": VISION_HIDDEN,
        "block_count": VISION_LAYERS,
        "attention.head_count": VISION_HEADS,
        "projection_dim": DIM,
        "projector.scale_factor": MERGE,
    }
    if kind == "idefics3":
        numbers["preproc_image_size"] = LONGEST
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", VISION_EPS)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    for full, values in weights(kind).vision.items():
        stem, _, end = full.rpartition(".")
        layer = ""
        if full == "mm_input_projection_weight":
            stem, end = full, "weight"
        elif stem.startswith("encoder.layers."):
            _, _, at, stem = stem.split(".", 3)
            layer = f"v.blk.{at}."
        short = _VISION_NAMES[stem]
        if old_names:
            short = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(short, short)
        if stem == "mm_soft_emb_norm":
            values = values + 1
        _add(writer, f"{layer}{short}.{end}", values)
    _write(writer)


def pictures(kind: str) -> list[NDArray[np.uint8]]:
    """Return the pictures of a prompt: two of odd sizes."""
    rng = np.random.default_rng(7)
    sizes = {"gemma3": [(45, 70), (33, 31)], "idefics3": [(40, 61), (90, 30)]}.get(
        kind, [(150, 210), (30, 400)]
    )
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def tiles(kind: str) -> list[int]:
    """Return how many tiles each picture has."""
    return [5, 3] if kind == "idefics3" else [1, 1]


def rows(kind: str) -> list[int]:
    """Return how many rows a tile of each picture has."""
    return tiny_qwen.ROWS[kind] if kind in QWENS else [ROWS, ROWS]


def prompt(kind: str) -> list[int | Place]:
    """Return a prompt: text, and tiles between it, longer than a chunk of the CPU's path."""
    rng, found = np.random.default_rng(11), list[int | Place]()

    def say(n: int) -> None:
        found.extend(int(token) for token in rng.integers(33, 127, n))

    say(9)
    for picture, n in enumerate(tiles(kind)):
        for tile in range(n):
            say(2)
            found.append((picture, tile))
        say(8)
    if kind in QWENS:
        found.append((0, 0))  # once more, at another position
    say(5)
    return found
