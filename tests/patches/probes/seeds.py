"""Decode with a tiny model on the simulated Orin under every adversary, one run for each seed.

    .venv/bin/python -m tests.patches.probes.seeds --seeds 200 --state build/seeds

A Q6_K LLaMA gets a prompt in chunks and decodes 32 tokens through TinyJit and graphs on TEGRA+NV.
Tokens have to be those of tinygrad's CPU device, logits near those of a float64 LLaMA. Each seed
gets a model of nvgpu, nvmap and GPU of its own, on which the device is opened, the weights are
loaded and both JITs captured anew: late consumer, late stores, buffers placed at the windows,
poisoned memory, strict. What the process keeps is the schedule and the compiled kernels; the first
seed of a process makes them, and its tokens are replayed for the logits.

Results are appended to STATE/results-PATH-PROFILE.jsonl; seeds that it has are not run again, and
seed N alone is `--first N --seeds 1` without that state. A state is of one version of the tree.
Exit status 1 when a seed failed.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.patches.conftest import COMPILERS, CUDA_HEADER, REPOSITORY, tinygrad_root, wheel_file

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinbench.synth import shapes, write_synthetic
from orinllm.gpu.host_compiler import try_write_clang_script

ADVERSARIES: dict[str, Any] = {
    "strict": True,
    "delay": 2.0,
    "order": True,
    "poison": True,
    "place": "windows",
}
PROMPT = [(37 * i) % 300 + 9 for i in range(14)]
CHUNK, TOKENS, CONTEXT = 4, 32, 64
# Tolerance of logits, of their spread, by path: weights and cache are float16 on both
# devices, which takes about 1e-3; the fused kernels' activations have 8 bits, about 2e-2.
LOGITS_OFF = {"general": 5e-3, "fused": 5e-2}


def write_model(path: Path, width: int = 256, quant: str = "Q6_K") -> None:
    """Write the model: one layer, 4 heads, 2 of keys, 320 tokens; a block of Q6_K is 256 wide."""
    shapes.SHAPES["seeds"] = shapes.ModelShape(
        1, width, width, 4, 2, width // 4, 320, 128, tied=False, weight_std=1.6 / width**0.5
    )
    write_synthetic(path, "seeds", quant, seed=3)


def general(model: Path) -> Any:
    """Load a Transformer: tinygrad's general path, TinyJit over graphs."""
    from tinygrad.llm.model import Transformer

    transformer, _ = Transformer.from_gguf(model, max_context=CONTEXT)
    # The third chunk of the prompt is a replay of the prefill's graph.
    transformer.generate = functools.partial(transformer.generate, chunk_size=CHUNK)
    return transformer


def decode(model: Path, path: str, count: int, logits: Path | None) -> list[int]:
    """The tokens after PROMPT on this process's default device.

    Into `logits`, if it is a path, go those of each token, (count, vocab_size).
    """
    return (fused_tokens if path == "fused" else general_tokens)(model, count, logits)


def fused_tokens(model: Path, count: int, logits: Path | None) -> list[int]:
    """Tokens by the engine's fused kernels."""
    from orinbench.check.greedy import decode_greedily
    from orinbench.measure.backends.timed_models import RunnerExecutor, load_runner

    executor = RunnerExecutor(load_runner(str(model), CONTEXT))
    generation = decode_greedily(executor, PROMPT, count)
    if logits is not None:
        assert generation.fused, "the fused kernels do not take the model"
        np.save(logits, generation.logits)
    return generation.tokens


def general_tokens(model: Path, count: int, logits: Path | None) -> list[int]:
    """Tokens by tinygrad's own Transformer; its logits by a replay of them, one by one."""
    transformer = general(model)
    generated = transformer.generate(list(PROMPT))
    tokens = [next(generated) for _ in range(count)]
    if logits is not None:
        np.save(logits, general_logits(transformer, [PROMPT[-1], *tokens[:-1]]))
    return tokens


def general_logits(transformer: Any, tokens: list[int]) -> np.ndarray:
    """Logits after each of the tokens behind PROMPT, as a jit of the layers computes them."""
    from tinygrad import Tensor, TinyJit, UOp, dtypes

    from orinllm.other.tinygrad_llm import logits_after_token

    jit = TinyJit(functools.partial(logits_after_token, transformer))
    position = UOp.variable("start_pos", 0, CONTEXT - 1)
    uploaded = [Tensor([[token]], dtype=dtypes.int32).realize() for token in tokens]
    places = range(len(PROMPT) - 1, len(PROMPT) - 1 + len(tokens))
    return np.stack(
        [
            jit(token, position.bind(place)).numpy()
            for token, place in zip(uploaded, places, strict=True)
        ]
    )


def logits_off(model: Path, tokens: list[int], logits: Path) -> float:
    """RMS difference of the logits from the float64 model's, in units of their spread."""
    want = Reference(open_model(model)).logits(PROMPT + tokens[:-1], last=len(tokens))
    return float(np.sqrt(((np.load(logits) - want) ** 2).mean()) / want.std())


def close_device() -> None:
    """Close NV, and forget what tinygrad keeps that belongs to it."""
    import gc

    from tinygrad import Device, Tensor
    from tinygrad.engine import realize
    from tinygrad.llm.model import precompute_freqs_cis

    gc.collect()
    Device["NV"].finalize()
    realize.runtime_cache.clear()
    precompute_freqs_cis.cache_clear()
    Tensor._device_seeds.clear()
    Tensor._device_rng_counters.clear()
    Device._opened_devices.clear()
    Device._Device__get_canonicalized_item.cache_clear()
    gc.collect()


def one_seed(seed: int, model: Path, path: str, count: int, logits: Path | None) -> dict[str, Any]:
    """Decode on a model of the hardware of its own; the last one's has no descriptor any more."""
    from nvgpusim.orin.kernel import Kernel
    from nvgpusim.orin.report import Journal, collect_report
    from nvgpusim.orin.simulation import Simulation, make_gpu_for_kernel

    simulation = Simulation.current
    assert simulation is not None, "run it under nvgpusim"
    options = replace(simulation.options, seed=seed, **ADVERSARIES)
    kernel = Kernel(options, Journal())
    kernel.make_executor = make_gpu_for_kernel
    simulation.kernel.stop_threads()
    simulation.options, simulation.kernel = options, kernel
    simulation.seam.backend.kernel = kernel  # type: ignore[attr-defined]
    tokens = decode(model, path, count, logits)
    close_device()
    report = collect_report(kernel)
    wrong = {k: report[k] for k in ("faults", "notes", "leaks", "refusals") if report[k]}
    unknown = [rule for rule in report["rules"] if rule.endswith((".unknown", ".not-modelled"))]
    wrong |= {"unknown": unknown} if unknown else {}
    execution = {k: report["execution"][k] for k in ("launches", "entries", "instructions")}
    return {"tokens": tokens, "wrong": wrong} | execution


def serve(
    model: Path, path: str, count: int, logits: Path, seeds: list[int]
) -> Iterator[dict[str, Any]]:
    """Run the seeds, the first with logits; yields a result for each."""
    for index, seed in enumerate(seeds):
        start = time.monotonic()
        try:
            answer = one_seed(seed, model, path, count, None if index else logits)
        except Exception:
            answer = {"tokens": [], "wrong": {"exception": traceback.format_exc()[-2000:]}}
            close_device()
        yield {"seed": seed, "seconds": time.monotonic() - start} | answer


def environment(device: str, scratch: Path) -> dict[str, str]:
    """For tinygrad on a device: compilers of wheels, a clang, a compile cache of its own."""
    assert try_write_clang_script(scratch), "ziglang: missing, install the extra cpu"
    rooms = (
        tinygrad_root(),
        REPOSITORY,
        REPOSITORY / "simulator",
        REPOSITORY / "benchmarks",
        REPOSITORY / "engine",
    )
    return os.environ | {
        **{name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()},
        "CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]),
        "PATH": f"{scratch}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, rooms)),
        "HCQDEV_WAIT_TIMEOUT_MS": "300000",
        "CCACHE": "1",
        "CACHEDB": str(scratch / f"cache-{device.replace('+', '-')}.db"),
        "NVGPUSIM_CACHE": str(scratch / "programs"),
        "DEV": device,
    }


class Runner:
    """Runs of one path and release with one model, `count` tokens each; results lie in `state`."""

    def __init__(self, state: Path, path: str, count: int = TOKENS, profile: str = "r36") -> None:
        self.state, self.path, self.count, self.profile = state, path, count, profile
        self.model, self.results = state / "model.gguf", state / f"results-{path}-{profile}.jsonl"
        state.mkdir(parents=True, exist_ok=True)
        if not self.model.exists():
            write_model(self.model)

    def expected(self) -> tuple[list[int], float]:
        """The CPU device's tokens, and how far its logits are off (see logits_off)."""
        logits, kept = self.state / "logits-CPU.npy", self.state / "tokens-CPU.json"
        if not kept.exists():
            with self.work("CPU", "general", logits) as worker:
                assert worker.stdout is not None
                tokens = json.loads(worker.stdout.read() or "{}").get("tokens", [])
            if len(tokens) != self.count:
                raise SystemExit("the CPU device decoded nothing; its words are above")
            kept.write_text(json.dumps(tokens))
        tokens = json.loads(kept.read_text())
        return tokens, logits_off(self.model, tokens, logits)

    def work(self, device: str, path: str, logits: Path, *seeds: int) -> subprocess.Popen[str]:
        """Start this file as a worker; the simulator is between it and NV."""
        options = ["--quiet", "--profile", self.profile]
        simulator = [] if device == "CPU" else ["-m", "nvgpusim", *options, "--"]
        command = [sys.executable, *simulator, "-m", "tests.patches.probes.seeds", "--worker", path]
        command += [str(self.model), str(self.count), str(logits), *map(str, seeds)]
        surroundings = environment(device, self.state)
        return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)

    def done(self) -> dict[int, dict[str, Any]]:
        """Results of earlier runs by seed; a line that was cut short is none."""
        found = {}
        for line in self.results.read_text().splitlines() if self.results.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            found[int(entry["seed"])] = entry
        return found

    def run(self, seeds: list[int], index: int = 0) -> Iterator[dict[str, Any]]:
        """Results of the seeds as they come; the first has `off`, how far its logits are off."""
        logits, missing = self.state / f"logits-{self.path}-{self.profile}-{index}.npy", list(seeds)
        with self.work("TEGRA+NV", self.path, logits, *seeds) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                if not line.startswith("{"):  # tinygrad's last words
                    print(line, end="", file=sys.stderr)
                    continue
                entry = json.loads(line)
                if missing == seeds and entry["tokens"]:
                    entry["off"] = logits_off(self.model, entry["tokens"], logits)
                missing.remove(entry["seed"])
                yield entry
        for seed in missing:
            yield {"seed": seed, "tokens": [], "wrong": {"worker": worker.returncode}}


def main() -> int:
    """Run the seeds; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (1)")
    parser.add_argument("--path", choices=LOGITS_OFF, default="general", help="default: general")
    parser.add_argument("--profile", default="r36", help="release of L4T (r36)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--state", type=Path, help="keep model and results here, and go on there")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        path, model, count, logits, *seeds = options.worker
        common = Path(model), path, int(count), Path(logits)
        if os.environ["DEV"] == "CPU":
            answers: Any = [{"tokens": decode(*common)}]
        else:
            answers = serve(*common, [int(seed) for seed in seeds])
        for answer in answers:
            print(json.dumps(answer), flush=True)
        return 0
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs: want at least 1")
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(options.state or Path(scratch), options.path, profile=options.profile)
        return report(runner, options)


def report(runner: Runner, options: argparse.Namespace) -> int:
    """Run what is missing, print each seed and the sum; returns the exit status."""
    tokens, off = runner.expected()
    limit = LOGITS_OFF[options.path]
    print(f"CPU: {tokens}\nCPU: logits off by {off:.1e} of their spread", flush=True)
    done = runner.done()
    wanted = range(options.first, options.first + options.seeds)
    missing = [seed for seed in wanted if seed not in done]
    if len(missing) < options.seeds:
        print(f"{options.seeds - len(missing)} seeds have run before", flush=True)
    count = options.seeds - len(missing)

    def one_job(index: int) -> None:
        nonlocal count
        for entry in runner.run(missing[index :: options.jobs], index):
            with runner.results.open("a") as out:
                out.write(json.dumps(entry) + "\n")
            count += 1
            verdict = "; ".join(complaints(entry, tokens, limit)) or "same tokens"
            took = f"{entry.get('seconds', 0):.1f} s"
            if "off" in entry:
                took += f", logits off by {entry['off']:.1e} of their spread"
            print(f"{count}/{options.seeds} seed {entry['seed']}: {verdict}, {took}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one_job, range(min(options.jobs, len(missing)))))
    done = runner.done()
    results = [done[seed] for seed in wanted]
    bad = [c for entry in results for c in complaints(entry, tokens, limit)]
    launches = sum(entry.get("launches", 0) for entry in results)
    print(f"{options.seeds} seeds, {launches} launches, {len(bad)} failures")
    print(*bad, sep="\n", end="\n" if bad else "")
    return int(bool(bad))


def complaints(entry: dict[str, Any], tokens: list[int], limit: float) -> list[str]:
    """List the problems of a result, for people; its logits may be off by `limit`."""
    who = f"seed {entry['seed']}"
    found = []
    if entry["tokens"] != tokens:
        found.append(f"{who}: other tokens: {entry['tokens']}")
    if entry.get("off", 0) > limit:
        found.append(f"{who}: logits off by {entry['off']:.1e} of their spread")
    if wrong := entry.get("wrong"):
        found.append(f"{who}: {json.dumps(wrong)[:1500]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
