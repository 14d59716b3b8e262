"""Write golden/transformers.json: log-probabilities of synthetic tiny models by transformers.

Run with torch, which is no dependency of the tests, installed beside orinbench and transformers:
`python -m tests.benchmarks.check.transformers_golden`. All is float64 on a CPU.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.benchmarks.check.llama_cpp_golden import excerpt, prompt

from orinbench.model import open_model
from orinbench.synth import write_synthetic

GOLDEN = Path(__file__).parent / "golden/transformers.json"
CONTEXT = 512
# Names of a layer's tensors there, by their names in a GGUF file.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# ... of networks that have no norms behind their parts.
_PLAIN = {
    **_LAYER,
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
Key = Callable[[str], Any]


def _gemma2(key: Key, vocab: int) -> tuple[Any, dict[str, str], float]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_sizes(key, vocab),
        head_dim=key("attention.key_length"),
        query_pre_attn_scalar=key("attention.key_length"),
        sliding_window=key("attention.sliding_window"),
        attn_logit_softcapping=key("attn_logit_softcapping"),
        final_logit_softcapping=key("final_logit_softcapping"),
    )
    return Gemma2ForCausalLM(config), _LAYER, 1.0  # the converter adds 1 to the norms' weights


def _sizes(key: Key, vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": key("rope.freq_base")},
        "attn_implementation": "eager",  # the other ones leave soft caps out
    }


def _ministral3(key: Key, vocab: int) -> tuple[Any, dict[str, str], float]:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    rope = {
        "rope_type": "yarn",
        "rope_theta": key("rope.freq_base"),
        "factor": key("rope.scaling.factor"),
        "original_max_position_embeddings": key("rope.scaling.original_context_length"),
        "mscale": 1.0,
        "mscale_all_dim": key("rope.scaling.yarn_log_multiplier"),
        "llama_4_scaling_beta": key("attention.temperature_scale"),
    }
    sizes = {**_sizes(key, vocab), "rope_parameters": rope}
    config = Ministral3Config(**sizes, head_dim=key("attention.key_length"))
    config.tie_word_embeddings = True
    return Ministral3ForCausalLM(config), _PLAIN, 0.0


def _qwen3vl(key: Key, vocab: int) -> tuple[Any, dict[str, str], float]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": key("rope.freq_base")}
    sizes = {
        **_sizes(key, vocab),
        "rope_parameters": {**rope, "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        "head_dim": key("attention.key_length"),
        "tie_word_embeddings": True,
    }
    config = Qwen3VLConfig(text_config=sizes, tie_word_embeddings=True)
    return Qwen3VLForConditionalGeneration(config), _PLAIN, 0.0


#: By shape: its network, names of tensors, and what the file adds to the weights of norms.
CASES = {"tiny-gemma2": _gemma2, "tiny-mistral3": _ministral3, "tiny-qwen3vl": _qwen3vl}


def logits(path: Path, shape: str) -> NDArray[np.float64]:
    """Return the logits after each token of the prompt."""
    import torch  # type: ignore[import-not-found]
    from gguf.quants import dequantize

    info = open_model(path)
    trunk = "model.language_model." if "vl" in shape else "model."
    head = {"token_embd.weight": f"{trunk}embed_tokens.weight", "output.weight": "lm_head.weight"}
    head["output_norm.weight"] = f"{trunk}norm.weight"

    def key(name: str) -> Any:
        return info.metadata[f"{info.architecture}.{name}"]

    torch.set_default_dtype(torch.float64)
    model, names, added = CASES[shape](key, info.vocab_size)
    state = {}
    for name, tensor in info.tensors.items():
        raw = info.gguf.tensor_bytes(name).reshape(int(np.prod(tensor.shape[:-1])), -1)
        values = dequantize(raw, tensor.type).reshape(tensor.shape).astype(np.float64)
        if "norm" in name:
            values = values - added
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".", 3)
            if info.architecture == "mistral3" and part in ("attn_q", "attn_k"):
                # The converter puts the rows of a pair side by side.
                pairs = values.reshape(-1, info.head_dim // 2, 2, values.shape[-1])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            state[f"{trunk}layers.{layer}.{names[part]}.{kind}"] = torch.tensor(values)
        else:
            state[head[name]] = torch.tensor(values)
    missing, unexpected = model.double().load_state_dict(state, strict=False)
    others = [name for name in missing if "lm_head" not in name and "visual" not in name]
    assert not unexpected and not others, (others, unexpected)
    model.tie_weights()
    model.eval()
    with torch.no_grad():
        found: NDArray[np.float64] = model(torch.tensor([prompt()])).logits[0].numpy()
    return found


def main() -> None:
    """Write the file."""
    golden = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in CASES:
            path = Path(folder) / f"{shape}.gguf"
            write_synthetic(path, shape, "F32", 0)
            golden[shape] = excerpt(logits(path, shape))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
