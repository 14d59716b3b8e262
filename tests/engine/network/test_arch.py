"""The architecture table: what it makes of files, and what it refuses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.engine.network.hybrid_models import MODELS

from orinbench.synth.shapes import QUANTS, SHAPES, WeightDraw
from orinllm.errors import BadInput
from orinllm.network.arch import ARCHITECTURES, config_of
from orinllm.network.arch.gemma4 import gemma4_config
from orinllm.network.arch.header import Header
from orinllm.network.arch.nemotron_h import nemotron_h_config
from orinllm.network.arch.qwen35 import qwen35_config
from orinllm.network.config import Config
from orinllm.network.layer import (
    AddToResidual,
    Experts,
    Layer,
    Linear,
    Norm,
    Operation,
    X,
)


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    type: int = 0


class File:
    """Metadata and tensors of a shape, as the table wants them, without a file."""

    def __init__(self, name: str) -> None:
        shape = SHAPES[name]
        self.key = shape.architecture
        sizes = {
            "block_count": shape.n_blocks,
            "context_length": shape.context_length,
            "embedding_length": shape.n_embd,
            "feed_forward_length": shape.n_ff,
            "attention.head_count": shape.n_heads,
            "attention.head_count_kv": shape.head_count_kv,
            "attention.key_length": shape.head_dim,
            "attention.layer_norm_rms_epsilon": shape.norm_eps,
            "rope.freq_base": shape.rope_theta,
            "rope.dimension_count": shape.n_rot or shape.head_dim,
            **shape.metadata,
        }
        if shape.n_experts:
            sizes |= {
                "expert_count": shape.n_experts,
                "expert_used_count": shape.n_experts_used,
                "expert_feed_forward_length": shape.n_ff,
            }
        self.metadata: dict[str, Any] = {"general.architecture": self.key}
        self.metadata |= {f"{self.key}.{key}": value for key, value in sizes.items()}
        self.tensors = {name: Tensor(dims) for name, dims, _ in shape.tensors()}

    def set(self, key: str, value: object) -> "File":
        self.metadata[f"{self.key}.{key}"] = value
        return self

    def config(self) -> Config:
        def vector(name: str) -> np.typing.NDArray[np.float32]:
            return np.linspace(1, 3, self.tensors[name].shape[0], dtype=np.float32)

        return config_of(self.metadata, self.tensors, vector)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_synthetic_shape_has_a_config(shape: str) -> None:
    config, wanted = File(shape).config(), SHAPES[shape]
    assert (config.architecture, config.dim) == (wanted.architecture, wanted.n_embd)
    assert len(config.layers) == wanted.n_layers
    assert config.vocab_size == wanted.vocab_size
    assert config.general_only is None
    attention = next(iter(config.attention_by_layer.values()))
    assert (attention.heads, attention.kv_heads) == (wanted.n_heads, wanted.n_kv_heads)


def experts_of(config: Config) -> Experts:
    mix = config.layers[0].experts_operation
    assert mix is not None
    return mix.experts


def test_the_27b_of_gemma_scales_scores_by_its_width() -> None:
    file = File("tiny-gemma3").set("block_count", 62)
    for index in range(62):
        for name, tensor in list(file.tensors.items()):
            if name.startswith("blk.0."):
                file.tensors[name.replace("blk.0.", f"blk.{index}.")] = tensor
        for part, shape in (("attn_q", (128, 256)), ("attn_output", (256, 128))):
            file.tensors[f"blk.{index}.{part}.weight"] = Tensor(shape)
    file.set("attention.head_count", 2)
    assert file.config().attention_by_layer[0].scale == (256 // 2) ** -0.5
    assert File("tiny-gemma3").config().attention_by_layer[0].scale == 64**-0.5


def test_pairs_turn_by_parts_of_a_position() -> None:
    """By turns, as far as a section goes (Qwen3-VL); without sections positions have one part."""
    file = File("tiny-qwen3vl")
    assert not file.config().uses_mrope
    config = file.set("rope.dimension_sections", [12, 10, 10, 0]).config()
    rope = config.attention_by_layer[0].rope
    assert rope is not None and rope.axes == (*(0, 1, 2) * 10, 0, 0)
    assert (
        config.n_deepstack_parts == 0
        and file.set("n_deepstack_layers", 1).config().n_deepstack_parts == 1
    )
    layers = len(config.layers)
    with pytest.raises(BadInput, match=f"n_deepstack_layers is {layers} of {layers} layers"):
        file.set("n_deepstack_layers", layers).config()
    with pytest.raises(BadInput, match="together 32 pairs"):
        file.set("rope.dimension_sections", [12, 10, 9, 1]).config()


def test_yarn_by_hand() -> None:
    """Pairs between those that turn 32 times and once over 4,096 tokens are mixed in a line."""
    file = File("tiny-yarn").set("rope.freq_base", 10000.0).set("rope.scaling.factor", 32.0)
    file.set("rope.scaling.original_context_length", 4096)
    rope = file.config().attention_by_layer[0].rope
    # 64 ln(4096 / (32 * 2 pi)) / (2 ln 10000) = 10.5, and with one turn 22.5.
    assert rope is not None and len(rope.frequencies) == 32
    for pair, kept in ((10, 1.0), (11, 1 - 1 / 13), (22, 1 - 12 / 13), (23, 0.0), (24, 0.0)):
        plain = 10000 ** (-2 * pair / 64)
        assert rope.frequencies[pair] == pytest.approx(plain * (kept + (1 - kept) / 32))
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(32))
    scaled = file.set("rope.scaling.yarn_log_multiplier", 0.5).config().attention_by_layer[0].rope
    assert scaled is not None
    assert scaled.magnitude == pytest.approx((1 + 0.1 * math.log(32)) / (1 + 0.05 * math.log(32)))


def test_keys_that_files_leave_out_or_set_to_nothing() -> None:
    oss = File("tiny-gptoss").set("attention.sliding_window_pattern", 0).config()
    assert all(attention.window for attention in oss.attention_by_layer.values())
    granite = File("tiny-granite").set("rope.scaling.finetuned", False).config()
    assert granite.attention_by_layer[0].rope is None
    granite = File("tiny-granite").set("residual_scale", 0.0).config()
    assert {op.scale for op in granite.layers[0].operations if isinstance(op, AddToResidual)} == {
        1.0
    }
    file = File("tiny-qwen3moe").set("feed_forward_length", 1024).set("expert_weights_scale", 0.0)
    del file.metadata["qwen3moe.expert_feed_forward_length"]
    experts = experts_of(file.config())
    assert (experts.hidden, experts.scale) == (256, 1.0)


def test_a_pattern_of_windows_may_be_a_list() -> None:
    flags = [True, False, False, True]
    oss = File("tiny-gptoss").set("attention.sliding_window_pattern", flags).config()
    assert [bool(attention.window) for attention in oss.attention_by_layer.values()] == flags
    with pytest.raises(BadInput, match="has 1 entries; 4, one a layer, were expected"):
        File("tiny-gptoss").set("attention.sliding_window_pattern", [True]).config()


def test_soft_caps() -> None:
    assert File("tiny-gemma3").set("final_logit_softcapping", 30.0).config().logit_softcap == 30
    file = File("tiny-gemma2")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"):
        del file.metadata[f"gemma2.{key}"]
    config = file.config()
    assert config.logit_softcap == 30
    caps = [(a.softcap, a.window) for a in config.attention_by_layer.values()]
    assert caps == [(50, 4096), (50, 0)] * 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mistral4", "latent attention"),
        ("gemma3n", "embeddings by layer"),
        ("mamba", ""),
        (None, ""),
        (7, ""),
    ],
)
def test_other_networks_are_refused_by_name(name: object, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        config_of({"general.architecture": name}, {}, lambda name: np.ones(1, np.float32))
    text = str(caught.value)
    assert text.startswith(f"architecture {name!r}{f' ({hint})' if hint else ''} is not supported")
    assert text.endswith(", ".join(ARCHITECTURES)) and "\n" not in text


@pytest.mark.parametrize(
    ("shape", "key", "value", "message"),
    [
        ("tiny", "rope.scaling.type", "ntk", "'ntk', which is not supported; supported are none"),
        ("tiny", "rope.scaling.type", 3, "a string was expected"),
        ("tiny", "rope.dimension_count", 32, "the whole head, 64, was expected"),
        ("tiny-qwen2", "rope.dimension_count", 66, "an even number up to the head's 64"),
        ("tiny", "rope.freq_base", 0.0, "a number above 0 was expected"),
        ("tiny", "attention.layer_norm_rms_epsilon", float("nan"), "a finite number"),
        ("tiny", "attention.value_length", 32, "values of another length than keys"),
        ("tiny", "attention.head_count_kv", 3, "no multiple of attention.head_count_kv, 3"),
        ("tiny", "attention.head_count", [4], "2 whole numbers of at least 1, one a layer"),
        ("tiny", "attention.head_count", "4", "a whole number of at least 1 was expected"),
        ("tiny", "block_count", True, "a whole number of at least 1 was expected"),
        ("tiny", "block_count", 10**15, "block_count is 1000000000000000, more than the file's"),
        ("tiny", "block_count", 3, "tensor blk.2.attn_norm.weight is missing"),
        ("tiny", "block_count", 1, "tensor blk.1.attn_q.weight (and 8 more) is not part of"),
        ("tiny", "attention.temperature_scale", 0.1, "a scale of queries by position"),
        ("tiny-granite", "logit_scale", 0.0, "a number other than 0 was expected"),
        ("tiny-qwen3moe", "expert_shared_feed_forward_length", 512, "a shared expert"),
        ("tiny-mixtral", "expert_used_count", 9, "at most 8 was expected"),
        ("tiny-qwen3moe", "expert_group_count", 4, "groups are not supported"),
        ("tiny-qwen3moe", "leading_dense_block_count", 1, "dense layers before the experts"),
    ],
)
def test_bad_metadata_is_refused(shape: str, key: str, value: object, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        File(shape).set(key, value).config()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_q_norm.weight": Tensor((64,))}, "blk.0.attn_q_norm.weight is not part of"),
        ({"blk.0.ffn_up.scale": Tensor((1,))}, "tensor blk.0.ffn_up.scale is not part of"),
        ({"blk.0.ffn_up_shexp.weight": Tensor((4, 4))}, "blk.0.ffn_up_shexp.weight is not part"),
        ({"blk.0.attn_v.weight": Tensor((64, 256))}, "(128, 256) was expected"),
        ({"blk.0.attn_v.weight": Tensor((128, 256), 17)}, "has the GGML type 17"),
        ({"output_norm.weight": Tensor((256,), 1)}, "has the type F16; F32 was expected"),
        ({"token_embd.weight": None}, "has no matrix token_embd.weight"),
        ({"blk.1.ffn_down.weight": None}, "tensor blk.1.ffn_down.weight is missing"),
    ],
)
def test_other_tensors_are_refused(change: Mapping[str, Tensor | None], message: str) -> None:
    file = File("tiny")
    for name, tensor in change.items():
        if tensor is None:
            del file.tensors[name]
        else:
            file.tensors[name] = tensor
    with pytest.raises(BadInput) as caught:
        file.config()
    assert message in str(caught.value)


def test_what_only_tinygrad_llm_runs_says_why() -> None:
    def load(**metadata: object) -> Config:
        values = {
            "general.architecture": "olmoe",
            "olmoe.embedding_length": 256,
            "olmoe.context_length": 512,
            "olmoe.attention.head_count": 4,
            "olmoe.attention.head_count_kv": 4,
            "olmoe.rope.freq_base": 10000.0,
            "olmoe.attention.layer_norm_rms_epsilon": 1e-5,
        }
        values |= {f"olmoe.{key.replace('__', '.')}": value for key, value in metadata.items()}
        tensors = {"token_embd.weight": Tensor((1024, 256))}
        return config_of(values, tensors, lambda name: np.ones(1, np.float32))

    assert load().general_only == "its norms of q and k over all heads have no kernels"
    for wrong, message in (
        ({"rope__scaling__type": "yarn"}, "without scaling only"),
        ({"expert_group_count": 4}, "groups of experts are not supported"),
        ({"expert_gating_func": 2}, "without a bias for choosing"),
    ):
        with pytest.raises(BadInput, match=message):
            load(**wrong)


@pytest.mark.parametrize("quant", sorted(QUANTS))
def test_every_quantization_of_a_narrow_model_is_read(quant: str) -> None:
    """Rows of 896 are no multiple of 256: llama-quantize falls back to smaller blocks."""
    file, shape = File("0.5b"), SHAPES["0.5b"]
    matrices = [(name, dims) for name, dims, draw in shape.tensors() if draw == WeightDraw.MATRIX]
    for name, dims in matrices:
        file.tensors[name] = Tensor(dims, int(QUANTS[quant].matrix_type(name, shape, dims[-1])))
    assert file.config().dim == 896


@pytest.mark.parametrize(
    ("operations", "says"),
    [
        ((AddToResidual("out"),), "does not follow what it reads"),
        ((Linear("out", X, (("w", 8),)), Norm("normed", "out", "n")), "is followed by no sum"),
    ],
)
def test_a_layer_that_no_lowering_computes_is_refused(
    operations: tuple[Operation, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        _ = Layer(operations).steps


def test_a_norm_of_x_is_none_of_the_next_x() -> None:
    one = Linear("out", "normed", (("w", 8),))
    before, after = Layer((Norm("normed", X, "n"), one, AddToResidual("out"), one)).steps
    assert (before.source, before.norm) == (X, Norm("normed", X, "n"))
    assert (after.source, after.norm) == ("normed", None)


def header_of(architecture: str, layers: int, keys: Mapping[str, Any]) -> Header:
    """A header without a file, for what a function reads of it alone."""
    sizes: dict[str, Any] = {"block_count": layers, "context_length": 64, "embedding_length": 64}
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    metadata: dict[str, Any] = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key}": value for key, value in {**sizes, **keys}.items()}
    tensors = {"token_embd.weight": Tensor((64, 64))}
    tensors |= {f"blk.{index}.attn_norm.weight": Tensor((64,)) for index in range(layers)}
    return Header(metadata, tensors, lambda name: np.ones(1, np.float32), 64)


def test_what_hybrid_files_leave_out() -> None:
    """Defaults of load_hparams in llama.cpp's src/models/qwen35moe.cpp and nemotron_h.cpp."""
    keys = dict(MODELS["qwen35moe"][1]) | {"feed_forward_length": 96}
    del keys["full_attention_interval"], keys["expert_shared_feed_forward_length"]
    layers = qwen35_config(header_of("qwen35moe", 8, keys)).layers
    assert [layer.attention is not None for layer in layers] == [False, False, False, True] * 2
    matrices = [m for op in layers[0].operations if isinstance(op, Linear) for m in op.matrices]
    assert ("ffn_up_shexp", 96) in matrices
    keys = dict(MODELS["nemotron_h_moe"][1])
    del keys["expert_weights_norm"]
    mixtures = [
        layer.experts_operation
        for layer in nemotron_h_config(header_of("nemotron_h_moe", 3, keys)).layers
    ]
    assert [mix.experts.normalized for mix in mixtures if mix] == [False]


def test_which_keys_gemma4_shares_and_how_near_ones_turn() -> None:
    """As src/models/gemma4.cpp: a layer without keys reads the last own one of its kind."""
    near = [True, True, False, True, False, True, False]
    keys: dict[str, object] = {
        "feed_forward_length": 96,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": near,
        "attention.shared_kv_layers": 3,
        "rope.dimension_count_swa": 8,
    }
    layers = gemma4_config(header_of("gemma4", 7, keys)).layers
    attentions = [layer.attention for layer in layers]
    assert [a and a.reads for a in attentions] == [None, None, None, None, 2, 3, 2]
    assert [a and a.head_dim for a in attentions] == [16 if is_near else 32 for is_near in near]
    rope, turns = attentions[0] and attentions[0].rope, [10000 ** (-i / 4) for i in range(4)]
    assert rope and rope.frequencies == pytest.approx(turns)
