"""Models of the engine's tests: tiny synthetic files, on the emulated GPU or a real path."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from orinbench.synth import write_synthetic
from orinllm.file.gguf import GGUF
from orinllm.gpu import device as devices
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.host_compiler import compiler_environment, provide_compiler
from orinllm.gpu.kernels.buffers import F16, PAGE, KvCacheType
from orinllm.gpu.memory import make_memory
from orinllm.gpu.path_plan import make_path_plan
from orinllm.gpu.weights import Weights
from orinllm.network.arch import config_of

Load = Callable[..., FusedExecutor]
Synthetic = Callable[[str, str], Path]


@pytest.fixture(autouse=True, scope="module")
def graphs_are_freed_here() -> Iterator[None]:
    """Free a module's graphs: in tinygrad's CPU thread one would wait for that thread itself."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def a_compiler_is_found() -> None:
    """Let tinygrad's CPU device compile: the engine's CPU path asks for one the first time only."""
    provide_compiler()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiler that the engine finds, in the environment of a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in compiler_environment(tmp_path_factory.mktemp("cc"), os.environ).items():
            patch.setenv(key, value)
        yield


@pytest.fixture
def plain_null(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device NULL that runs no kernels, for one test.

    Whoever compiles for a GPU in this process lets it stand for one.
    """
    others = {kind: chain for kind, chain in devices._TOOLCHAINS.items() if kind != "NULL"}
    monkeypatch.setattr(devices, "_TOOLCHAINS", others)
    for answers in (devices.multiprocessor_count, devices.reason_unsupported):
        answers.cache_clear()
    yield
    for answers in (devices.multiprocessor_count, devices.reason_unsupported):
        answers.cache_clear()


@pytest.fixture
def emulation() -> Iterator[None]:
    """The emulated GPU as the default device."""
    from tests.engine.gpu import cuda_emulation
    from tinygrad import Context

    cuda_emulation.install()
    with Context(DEV="EMU"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers for every test."""
    return np.random.default_rng(20261122)


@pytest.fixture
def emulated(emulation: None) -> Load:
    """Load a file on the emulated GPU."""
    return load_emulated


def load_emulated(
    path: Path,
    context: int = 128,
    pages: int | None = None,
    kv: KvCacheType = F16,
    slots: tuple[int, int] = (4, 2),
    device: str = "EMU",
) -> FusedExecutor:
    """Load a file on a device, the emulated GPU, which is installed and the default one.

    slots: of recurrent states, and of copies of them.
    """
    gguf = GGUF.open(path)
    config = config_of(gguf.metadata, gguf.tensors, gguf.f32_or_f16_tensor, context)
    plan = make_path_plan(gguf, config, device, kv)
    assert plan.is_fused, plan.obstacles
    weights = Weights(gguf, config, device)
    with weights.upload_meanwhile():
        pass
    memory = make_memory(config, weights, device, context, pages or context // PAGE, kv, slots)
    return FusedExecutor(memory)


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Synthetic:
    """Write a synthetic model of a shape and a type, once."""
    folder = tmp_path_factory.mktemp("models")

    def write(shape: str, quant: str) -> Path:
        path = folder / f"{shape}-{quant}.gguf"
        if not path.exists():
            write_synthetic(path, shape, quant, seed=5)
        return path

    return write
