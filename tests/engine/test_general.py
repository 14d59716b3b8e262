"""The CPU and the general path against the float64 reference: every architecture and type."""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from tests.engine.models import smollm2

from orinbench.check.reference import Reference, log_softmax
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinbench.synth.shapes import QUANTS, SHAPES
from orinllm.cpu.executor import CpuRunner
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.gpu.host_compiler import compiler_environment
from orinllm.loader import Network, make_runner, plan_network
from orinllm.network.arch import config_of
from orinllm.network.config import Config

TINY = sorted(name for name in SHAPES if name.startswith("tiny") and "mtp" not in name)
CONTEXT, N_TOKENS = 512, 80
Opened = tuple[Path, GGUF, Config]
Open = Callable[..., Opened]


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A clang for tinygrad's CPU device."""
    with pytest.MonkeyPatch.context() as patch:
        variables = compiler_environment(tmp_path_factory.mktemp("clang"), os.environ)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Write a synthetic model once; give its path, file and Config."""
    folder = tmp_path_factory.mktemp("models")

    def open_(shape: str, quant: str = "F16", context: int = CONTEXT) -> Opened:
        path = folder / f"{shape}-{quant}.gguf"
        if not path.exists():
            write_synthetic(path, shape, quant, 3)
        gguf = GGUF.open(path)
        return path, gguf, config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, context)

    return open_


def prompt() -> list[int]:
    tokens: list[int] = np.random.default_rng(5).integers(0, 1019, N_TOKENS).tolist()
    return tokens


def wanted(path: Path, tokens: list[int], last: int) -> NDArray[np.float64]:
    return log_softmax(Reference(open_model(path), context=CONTEXT).logits(tokens, last))


def logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    return log_softmax(logits.astype(np.float64))


def error_on_a_cpu(path: Path, gguf: GGUF, config: Config, cut: int = 71) -> float:
    """The largest error of a log-probability: a prompt of `cut` tokens, then token by token."""
    from orinllm.cpu.executor import CpuExecutor

    executor, tokens = CpuExecutor(gguf, config, CONTEXT), prompt()
    got = [executor.prefill(tokens[:cut])]
    got += [executor.prefill([tokens[i]], i) for i in range(cut, N_TOKENS)]
    want = wanted(path, tokens, N_TOKENS - cut + 1)
    return float(np.abs(logprobs(np.stack(got)) - want).max())


@pytest.mark.parametrize("shape", TINY)
def test_every_architecture_on_a_cpu(opened: Open, shape: str) -> None:
    # F16 weights are exact here; keys and values are rounded to 16 bits, at most 3e-3 seen.
    assert error_on_a_cpu(*opened(shape)) < 1e-2


@pytest.mark.parametrize("quant", sorted(QUANTS))
def test_every_type_on_a_cpu(opened: Open, quant: str) -> None:
    assert error_on_a_cpu(*opened("tiny-qwen3", quant)) < 2e-2


@pytest.mark.parametrize("quant", ["F16", "Q3_K", "Q2_K", "Q8_0", "Q4_1"])
def test_a_token_alone_and_among_others(opened: Open, quant: str) -> None:
    """One of each layout: bytes times scales, and floats made of them, to the last bit."""
    from orinllm.cpu.executor import CpuExecutor

    executor = CpuExecutor(*opened("tiny-qwen3", quant)[1:], CONTEXT)
    together = executor.logits_after_each(prompt()[:4], 0)
    alone = np.stack([executor.prefill([token], i) for i, token in enumerate(prompt()[:4])])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("cut", [1, 2, 5, 31, 32, 33, 64, 65])
def test_prompts_of_odd_sizes(opened: Open, cut: int) -> None:
    """Chunks of 32, their remainders, and windows of 24 at their borders."""
    assert error_on_a_cpu(*opened("tiny-gptoss"), cut) < 1e-2


def test_a_soft_cap(opened: Open) -> None:
    from orinllm.cpu.executor import CpuExecutor

    _, gguf, config = opened("tiny-gemma3")
    plain = CpuExecutor(gguf, config, CONTEXT).prefill(prompt())
    capped = CpuExecutor(gguf, replace(config, logit_softcap=2.0), CONTEXT)
    np.testing.assert_allclose(capped.prefill(prompt()), 2 * np.tanh(plain / 2), rtol=1e-5)


def test_a_sequence_can_go_back(opened: Open) -> None:
    from orinllm.cpu.executor import CpuExecutor

    _, gguf, config = opened("tiny-gemma3")
    executor, tokens = CpuExecutor(gguf, config, CONTEXT), prompt()
    first = executor.prefill(tokens)
    executor.prefill([7] * 50, 20)
    np.testing.assert_array_equal(executor.prefill(tokens[20:], 20), first)
    np.testing.assert_array_equal(executor.prefill(tokens), first)


@pytest.mark.parametrize("cores", [1, 3, 8])
def test_the_number_of_cores_changes_nothing(
    opened: Open, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    from orinllm.cpu.executor import CpuExecutor

    _, gguf, config = opened("tiny-qwen3moe")
    alone = CpuExecutor(gguf, config, CONTEXT).prefill(prompt())
    monkeypatch.setenv("CPU_COUNT", str(cores))
    shared = CpuExecutor(gguf, config, CONTEXT)
    for _ in range(3):
        np.testing.assert_array_equal(shared.prefill(prompt()), alone)


@pytest.mark.parametrize("favourite", [0, 5])
def test_an_expert_that_gets_all_tokens_and_one_that_gets_none(
    tmp_path: Path, favourite: int
) -> None:
    """One column of the router's bias decides: gpt-oss adds it before it chooses."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, "tiny-gptoss", "F16", 3)
    gguf = GGUF.open(path)
    with path.open("r+b") as file:
        for layer in range(4):
            tensor = gguf.tensors[f"blk.{layer}.ffn_gate_inp.bias"]
            bias = np.zeros(8, "<f4")
            bias[favourite], bias[7] = 100, -100
            file.seek(tensor.offset)
            file.write(bias.tobytes())
    gguf = GGUF.open(path)
    config = config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, CONTEXT)
    assert error_on_a_cpu(path, gguf, config) < 1e-2


def test_tinygrads_own_transformer_agrees_too(opened: Open) -> None:
    from orinllm.other.tinygrad_llm import UpstreamExecutor

    path, gguf, config = opened("tiny")
    executor, tokens = UpstreamExecutor(gguf, config, "CPU", CONTEXT), prompt()
    got = [executor.prefill(tokens[:4]), executor.prefill(tokens[4:5], 4)]
    assert np.abs(logprobs(np.stack(got)) - wanted(path, tokens[:5], 2)).max() < 1e-2


def test_tinygrads_own_transformer_refuses_what_it_would_ignore(opened: Open) -> None:
    from orinllm.other.tinygrad_llm import UpstreamExecutor

    _, gguf, config = opened("tiny")
    gguf.tensors["blk.0.attn_sinks.weight"] = gguf.tensors["output_norm.weight"]
    with pytest.raises(BadInput, match=r"attn_sinks\.weight is not part of the architecture llama"):
        UpstreamExecutor(gguf, config, "CPU", CONTEXT)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("tiny-gemma3", "does not know gemma3"),
        ("tiny-mixtral", "does not normalize the weights of a llama's experts"),
        ("tiny-yarn", "has no scaling of rotary positions"),
    ],
)
def test_tinygrads_own_transformer_refuses_what_it_would_compute_wrong(
    opened: Open, shape: str, why: str
) -> None:
    from orinllm.other.tinygrad_llm import UpstreamExecutor

    _, gguf, config = opened(shape)
    with pytest.raises(BadInput, match=f"tinygrad.llm's network .--path general. {why}"):
        UpstreamExecutor(gguf, config, "CPU", CONTEXT)


@pytest.mark.parametrize("shape", ["tiny-llama3", "tiny-qwen2", "tiny-qwen3moe"])
def test_tinygrads_own_transformer_knows_what_it_does_not_refuse(opened: Open, shape: str) -> None:
    from orinllm.other.tinygrad_llm import UpstreamExecutor

    path, gguf, config = opened(shape)
    executor, tokens = UpstreamExecutor(gguf, config, "CPU", CONTEXT), prompt()[:12]
    error = np.abs(logprobs(executor.prefill(tokens)) - wanted(path, tokens, 1)[0]).max()
    assert error < 2e-2


def test_what_does_not_fit_is_one_line(opened: Open) -> None:
    from orinllm.cpu.executor import CpuExecutor

    _, gguf, config = opened("tiny")
    executor = CpuExecutor(gguf, config, 64)
    for tokens, start in (([1] * 65, 0), ([1], 64), ([], 0)):
        with pytest.raises(BadInput, match=f"{len(tokens)} tokens from position {start} on do not"):
            executor.prefill(tokens, start)
    with pytest.raises(BadInput, match="tokens of context would") as caught:
        CpuExecutor(gguf, config, 1 << 40)
    fitting = int(str(caught.value).split("; ")[1].split()[0])
    per_token = 2 * 2 * 2 * 2 * 64
    assert 0 < fitting < (1 << 40) // per_token


def test_a_real_model_gives_the_references_tokens() -> None:
    from orinllm.cpu.executor import CpuExecutor

    path = smollm2()
    gguf = GGUF.open(path)
    config = config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, CONTEXT)
    tokens: list[str] = gguf.metadata["tokenizer.ggml.tokens"]
    words = ["<|im_start|>", "user", "Ċ", "What", "Ġis", "Ġthe", "Ġcapital", "Ġof", "ĠFrance", "?"]
    words += ["<|im_end|>", "Ċ", "<|im_start|>", "ass", "istant", "Ċ"]
    ids = [tokens.index(word) for word in words]
    executor = CpuExecutor(gguf, config, CONTEXT)
    logits, answer = executor.prefill(ids), list[int]()
    for position in range(len(ids), len(ids) + 8):
        answer.append(int(logits.argmax()))
        logits = executor.prefill(answer[-1:], position)
    wanted = Reference(open_model(path)).logits([*ids, *answer[:-1]], last=8)
    assert answer == wanted.argmax(axis=-1).tolist()
    text = "".join(tokens[token] for token in answer).replace("Ġ", " ")
    assert "The capital of France is Paris" in text
    assert math.isfinite(float(logits.max()))
    assert gguf.tensors["token_embd.weight"].type == GGMLQuantizationType.Q8_0


@pytest.mark.usefixtures("plain_null")
@pytest.mark.parametrize(
    ("shape", "why"),
    [("tiny-granite", "does not know granite"), ("tiny-yarn", "has no scaling of rotary positi")],
)
def test_what_runs_on_the_cpu_alone_is_told_so(shape: str, why: str, opened: Open) -> None:
    """On a device without fused kernels; and what the line advises is right."""
    network = Network.read(opened(shape)[0], 64)
    with pytest.raises(BadInput, match=rf"NULL is neither CUDA nor NV\), and .* {why}") as found:
        make_runner(network, plan_network(network, "NULL"))
    advice = re.search("; --device (CPU) runs it$", str(found.value))
    assert advice is not None
    runner = make_runner(network, plan_network(network, advice[1]))
    assert isinstance(runner, CpuRunner) and runner.name == "cpu"
    assert np.isfinite(runner.path.prefill([1, 2, 3])).all()
