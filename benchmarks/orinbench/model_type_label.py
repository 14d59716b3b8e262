"""llama.cpp's name of a model: "llama 1B Q6_K" is architecture, size class and file type.

Source: `llama_model_desc` of llama.cpp 0.5.0, that is `load_arch_hparams` of each architecture in
src/models/ and `llama_ftype_name` in src/llama-model-loader.cpp.
"""

from collections import Counter
from typing import TYPE_CHECKING

from gguf import LlamaFileType

if TYPE_CHECKING:
    from orinbench.model import ModelInfo

# By architecture and number of layers; where that is not enough, `_size_class` looks closer.
_SIZE_CLASSES = {
    "llama": {16: "1B", 22: "1B", 26: "3B", 28: "3B", 30: "256M", 32: "8B", 36: "8B"}
    | {40: "13B", 48: "34B", 60: "30B", 80: "70B"},
    "qwen2": {24: "1B", 28: "7B", 32: "7B", 36: "3B", 40: "13B", 48: "14B", 64: "32B", 80: "70B"},
    "qwen3": {28: "1.7B", 36: "8B", 40: "14B", 64: "32B"},
    "qwen3moe": {48: "30B.A3B", 94: "235B.A22B"},
    "qwen35": {24: "2B", 32: "9B", 64: "27B"},
    "qwen35moe": {40: "35B.A3B", 48: "122B.A10B", 60: "397B.A17B"},
    "smollm3": {36: "3B"},
    "granite": {32: "3B", 64: "30B"},
    "granitemoe": {24: "1B.A400M", 32: "3B.A800M"},
    "gemma3": {18: "270M", 26: "1B", 32: "8B", 34: "4B", 48: "12B", 62: "27B"},
    "phi3": {24: "1B", 32: "3B", 40: "14B"},
    "gpt-oss": {24: "20B", 36: "120B"},
    "olmoe": {16: "A1.7B"},
    "deepseek2": {27: "16B", 47: "30B.A3B", 60: "236B", 61: "671B"},
    "glm4moe": {46: "106B.A12B", 48: "102B.A12B", 92: "355B.A32B"},
}
# By architecture, layers and embedding length.
_NARROW_CLASSES = {
    ("qwen2", 24, 1024): "0.5B",
    ("qwen2", 28, 1536): "1.5B",
    ("qwen3", 28, 1024): "0.6B",
    ("qwen3", 36, 2560): "4B",
    ("granite", 40, 2048): "2B",
    ("granite", 40, 2560): "3B",
    ("granite", 40, 4096): "8B",
    ("qwen35", 24, 1024): "0.8B",
    ("qwen35", 32, 2560): "4B",
}
_EIGHT_EXPERTS = {32: "8x7B", 56: "8x22B"}  # of the llama architecture: Mixtral
_BITS_PER_WEIGHT = {"IQ2_S": "2.5", "IQ2_M": "2.7", "IQ3_XS": "3.3", "IQ3_XXS": "3.0625"} | {
    "IQ3_S": "3.4375",
    "IQ4_XS": "4.25",
}
_SUFFIXES = {"_S": " - Small", "_M": " - Medium", "_L": " - Large"}
# A file without general.file_type is called after its most frequent tensor type; of types with
# several file types, one is taken.
_GUESSES = {"F32": "all F32", "Q4_K": "Q4_K - Medium", "Q5_K": "Q5_K - Medium"}


def type_label(model: "ModelInfo") -> str:
    """Return what llama-bench prints as the model's type."""
    return f"{model.architecture} {_size_class(model)} {_file_type(model)}"


def _size_class(model: "ModelInfo") -> str:
    architecture, layers = model.architecture, model.n_layers
    if architecture == "llama":
        if model.metadata.get("llama.expert_count") == 8:
            return _EIGHT_EXPERTS.get(layers, "?B")
        if layers == 32 and model.vocab_size == 49152:
            return "3B"
        if layers == 32 and model.vocab_size < 40000:
            return "7B"
        if layers == 80 and model.n_heads == model.n_kv_heads:
            return "65B"
    if architecture == "qwen2" and layers == 40 and model.n_heads == 20:
        return "4B"
    narrow = _NARROW_CLASSES.get((architecture, layers, model.n_embd))
    return narrow or _SIZE_CLASSES.get(architecture, {}).get(layers, "?B")


def _file_type(model: "ModelInfo") -> str:
    number = model.metadata.get("general.file_type")
    if number is None:
        counts: Counter[str] = Counter()
        most = ""
        for tensor in model.tensors.values():  # of equally frequent types the first to get there
            counts[tensor.type.name] += 1
            if counts[tensor.type.name] > counts[most]:
                most = tensor.type.name
        return f"(guessed) {_GUESSES.get(most) or _file_type_name(most)}"
    try:
        name = LlamaFileType(number).name.removeprefix("MOSTLY_")
    except ValueError:
        return "unknown, may not work"
    return _file_type_name(name)


def _file_type_name(name: str) -> str:
    if name == "ALL_F32":
        return "all F32"
    if name == "MXFP4_MOE":
        return "MXFP4 MoE"
    if name == "IQ3_M":
        return "IQ3_S mix - 3.66 bpw"
    if bits := _BITS_PER_WEIGHT.get(name):
        return f"{name} - {bits} bpw"
    if name[:-2].endswith("_K"):
        return name[:-2] + _SUFFIXES[name[-2:]]
    return name
