"""Architectures that only tinygrad.llm's own Transformer runs, and what of them it computes wrong.

Source of what is refused: tinygrad/llm/model.py of tinygrad 0.13.0 against src/models of llama.cpp
0.5.0. It has no rotary scaling, no expert groups, and takes the router's function from whether
there is a bias for choosing.
"""

from orinllm.errors import BadInput
from orinllm.network.arch.header import Header
from orinllm.network.config import Config

_REASONS = {
    "olmoe": "its norms of q and k over all heads have no kernels",
    "deepseek2": "its latent attention has no kernels",
    "glm4moe": "its shared expert has no kernels",
}
# llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_*.
_SOFTMAX, _SIGMOID = 1, 2


def tinygrad_config(header: Header) -> Config:
    """Return a Config without layers that says why; raises BadInput for what would be wrong."""
    name = header.architecture
    scaling = header.text("rope.scaling.type", "none")
    if scaling != "none":
        raise BadInput(
            f"{name}.rope.scaling.type is {scaling!r}: {name} is supported without scaling only"
        )
    header.refuse_keys({"rope.scaling.factor": "rotary scaling of this architecture"})
    if header.has_key("expert_group_count") and header.whole_number("expert_group_count") > 1:
        raise BadInput(f"{name}.expert_group_count: groups of experts are not supported")
    biased = any(tensor.endswith("exp_probs_b.bias") for tensor in header.tensors)
    if header.has_key("expert_gating_func"):
        function = header.whole_number("expert_gating_func")
        if function != (_SIGMOID if biased else _SOFTMAX):
            raise BadInput(
                f"{name}.expert_gating_func is {function} "
                f"{'with' if biased else 'without'} a bias for choosing: not supported"
            )
    # tinygrad.llm reads these without a default.
    for key in ("attention.head_count", "attention.head_count_kv"):
        header.whole_number(key)
    header.positive_number("rope.freq_base")
    head = header.tensors.get("output.weight") or header.tensors.get("token_embd.weight")
    if head is None:
        raise BadInput("the file is no language model: it has no matrix token_embd.weight")
    return Config(
        architecture=name,
        dim=header.whole_number("embedding_length"),
        vocab_size=head.shape[0],
        trained_context=header.whole_number("context_length"),
        norm_eps=header.positive_number("attention.layer_norm_rms_epsilon"),
        layers=(),
        general_only=_REASONS[name],
    )
