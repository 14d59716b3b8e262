"""The architecture table: what the networks are that GGUF files name.

`config_of` makes a Config of a file's metadata and tensors, or raises BadInput: what is not in the
table, and what would be computed wrong, is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orinllm.errors import BadInput
from orinllm.network.arch.gemma import gemma2_config, gemma3_config
from orinllm.network.arch.gemma4 import gemma4_config
from orinllm.network.arch.gpt_oss import gpt_oss_config
from orinllm.network.arch.header import Header, TensorShapeAndType, Vector
from orinllm.network.arch.lfm2 import lfm2_config
from orinllm.network.arch.llama import granite_config, llama_config, mistral3_config, smollm3_config
from orinllm.network.arch.nemotron_h import nemotron_h_config
from orinllm.network.arch.phi import phi3_config
from orinllm.network.arch.qwen import qwen2_config, qwen3_config, qwen3moe_config, qwen3vl_config
from orinllm.network.arch.qwen35 import qwen35_config, qwen35_mtp_config
from orinllm.network.arch.tensor_check import WantedTensor, check_tensors, wanted_tensors
from orinllm.network.arch.tinygrad_llm import tinygrad_config
from orinllm.network.config import Config

__all__ = [
    "ARCHITECTURES",
    "TensorShapeAndType",
    "Vector",
    "WantedTensor",
    "config_of",
    "require_mtp_config",
    "wanted_tensors",
]


@dataclass(frozen=True)
class Family:
    """Makes a Config of a header; `rope_tensors`: the file may scale positions by tensors.

    `reads`: keys of _FOREIGN_KEYS that it knows.
    """

    config: Callable[[Header], Config]
    rope_tensors: bool = False
    reads: tuple[str, ...] = ()
    block: Callable[[Header], Config] | None = None  # of what proposes later tokens


ARCHITECTURES: Mapping[str, Family] = {
    "llama": Family(llama_config, rope_tensors=True),
    "mistral3": Family(mistral3_config, rope_tensors=True, reads=("attention.temperature_scale",)),
    "smollm3": Family(smollm3_config),
    "granite": Family(granite_config, rope_tensors=True),
    "granitemoe": Family(granite_config, rope_tensors=True),
    "qwen2": Family(qwen2_config),
    "qwen3": Family(qwen3_config),
    "qwen3moe": Family(qwen3moe_config),
    "qwen2vl": Family(qwen2_config),
    "qwen3vl": Family(qwen3vl_config),
    "qwen3vlmoe": Family(qwen3vl_config),
    "gemma2": Family(gemma2_config, reads=("attn_logit_softcapping",)),
    "gemma3": Family(gemma3_config),
    "phi3": Family(phi3_config, rope_tensors=True),
    "gpt-oss": Family(gpt_oss_config),
    "lfm2": Family(lfm2_config),
    "lfm2moe": Family(lfm2_config),
    "qwen35": Family(qwen35_config, block=qwen35_mtp_config),
    "qwen35moe": Family(qwen35_config, block=qwen35_mtp_config),
    "nemotron_h": Family(nemotron_h_config),
    "nemotron_h_moe": Family(nemotron_h_config),
    "granitehybrid": Family(granite_config, rope_tensors=True),
    "gemma4": Family(gemma4_config, rope_tensors=True),
    **dict.fromkeys(("olmoe", "deepseek2", "glm4moe"), Family(tinygrad_config)),
}

# Names close to supported ones that stand for another network, and what it has.
_OTHER_NETWORKS = {
    "mistral4": "latent attention",
    "qwen2moe": "a gated shared expert",
    "qwen3next": "a gated delta net",
    "gemma": "norms and a head of its own",
    "gemma3n": "embeddings by layer",
    "phi2": "layers in parallel",
    "phimoe": "experts and layer norms",
    "llama4": "chunked attention",
}
# Keys that would change the network, whatever the architecture.
_FOREIGN_KEYS = {
    "attention.temperature_scale": "a scale of queries by position",
    "attn_logit_softcapping": "soft-capping of scores",
    "rope.scaling.alpha": "a scaling of the rotary base",
    "rope.scaling.yarn_ext_factor": "YaRN's extrapolation factor",
    "rope.scaling.yarn_attn_factor": "YaRN's attention factor",
}


def config_of(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorShapeAndType],
    vector: Vector,
    max_context: int | None = None,
) -> Config:
    """Return what a file's network computes.

    `metadata` has the file's key-values as Python values, `tensors` shapes and types by name,
    `vector` returns the values of a small F32 tensor. `max_context` is how many tokens a sequence
    may have (None: as many as trained), on which longrope's frequencies depend. Raises BadInput,
    one line, for what is not supported or not a language model.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = f" ({_OTHER_NETWORKS[name]})" if name in _OTHER_NETWORKS else ""
        raise BadInput(
            f"architecture {name!r}{reason} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    header = Header(metadata, tensors, vector, max_context or 0)
    trained = header.whole_number("context_length")
    header = Header(metadata, tensors, vector, trained if max_context is None else max_context)
    family = ARCHITECTURES[name]
    header.refuse_keys({k: why for k, why in _FOREIGN_KEYS.items() if k not in family.reads})
    config = family.config(header)
    if config.layers:
        check_tensors(config, tensors, family.rope_tensors, header.whole_number("block_count"))
    return config


def require_mtp_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorShapeAndType],
    vector: Vector,
    max_context: int,
) -> Config:
    """Return the Config of the block behind a file's layers that proposes later tokens (MTP).

    As `config_of`, of a model of one layer. Raises BadInput where the file has none that is known.
    """
    header = Header(metadata, tensors, vector, max_context)
    family = ARCHITECTURES.get(header.architecture)
    if not header.n_mtp_blocks:
        raise BadInput(
            f"{header.architecture}.nextn_predict_layers is missing from the file's metadata: it "
            "has no block that proposes tokens (MTP)"
        )
    if family is None or family.block is None:
        known = ", ".join(name for name, family in ARCHITECTURES.items() if family.block)
        raise BadInput(
            f"the block of architecture {header.architecture} that proposes tokens (MTP) is not "
            f"supported; those of {known} are"
        )
    config = family.block(header)
    check_tensors(config, tensors, family.rope_tensors, header.whole_number("block_count"))
    return config
