"""Print how far this engine's logits and llama.cpp's are from the float64 reference.

    python -m tests.engine.gpu.llama_cpp_error [--quant TYPE] [SHAPE ...]

Run with llama-cpp-python, which is no dependency of the tests, installed beside orinllm. Every
engine reads the same file and the same prompt on a CPU, with keys and values in halves: llama.cpp,
the fused kernels on the emulated GPU (the prompt in a chunk, its last token as a token) and the
CPU path. The error is the rms over the logits of a position, of their spread; of the positions
the median, so that a tie of experts (`routing`) at one of them does not stand for all.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.benchmarks.check import llama_cpp_golden
from tests.engine.conftest import load_emulated
from tests.engine.gpu import cuda_emulation
from tinygrad import Context

from orinbench.check.reference import Reference
from orinbench.measure.backends.timed_models import RunnerExecutor
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.runner import Runner
from orinllm.gpu.host_compiler import compiler_environment
from orinllm.loader import Network, make_runner, plan_network

CONTEXT = 512
POSITIONS = (7, 24, 60, 95)
Floats = NDArray[np.float64]


def logits_of(runner: Runner) -> Floats:
    """Return the logits of an engine's executor after the positions of the prompt."""
    tokens, found = llama_cpp_golden.prompt(), []
    executor = RunnerExecutor(runner)
    for position in POSITIONS:
        executor.fill_cache(tokens, 0, position)
        executor.submit_step(tokens[position], position)
        found.append(executor.wait_for_logits().astype(np.float64))
    return np.stack(found)


def on_a_cpu(path: Path) -> Floats:
    """Return the CPU path's logits."""
    network = Network.read(path, CONTEXT)
    return logits_of(make_runner(network, plan_network(network, "CPU")))


def fused(path: Path) -> Floats:
    """Return the fused kernels' logits, on the emulated GPU."""
    cuda_emulation.install()
    with Context(DEV="EMU"):
        return logits_of(FusedRunner(load_emulated(path, CONTEXT), 1))


def llama_cpp(path: Path) -> Floats:
    """Return llama.cpp's logits."""
    return llama_cpp_golden.logits(path, CONTEXT, halves=True)[list(POSITIONS)]


def error(got: Floats, want: Floats) -> float:
    """Return the median error of the positions."""
    rms = np.sqrt(((got - want) ** 2).mean(axis=-1)) / want.std(axis=-1)
    return float(np.median(rms))


def main() -> None:
    """Print a row for each shape and type."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("shapes", nargs="*", default=sorted(llama_cpp_golden.CASES))
    parser.add_argument("--quant", default="Q4_K_M")
    options = parser.parse_args()
    engines: tuple[Callable[[Path], Floats], ...] = (llama_cpp, fused, on_a_cpu)
    print("| model | type | llama.cpp | fused kernels | CPU path |\n|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= compiler_environment(Path(folder), os.environ)
        for shape in options.shapes:
            path = Path(folder) / f"{shape}.gguf"
            write_synthetic(path, shape, options.quant, seed=0)
            reference = Reference(open_model(path), context=CONTEXT)
            want = reference.logits(llama_cpp_golden.prompt(), last=96)[list(POSITIONS)]
            errors = " | ".join(f"{error(engine(path), want):.1e}" for engine in engines)
            print(f"| {shape} | {options.quant} | {errors} |", flush=True)


if __name__ == "__main__":
    main()
