"""Tiny models through the fused kernels on the modelled Orin, prompt and tokens, under --strict.

Logits are judged against the float64 reference; the model's GPU runs the PTX that NVRTC makes for
sm_87, through tinygrad's NV queues.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.engine.network import hybrid_models
from tests.patches.conftest import COMPILERS, CUDA_HEADER, wheel_file

from orinbench.check.reference import Reference
from orinbench.model import open_model
from orinbench.synth import write_synthetic
from orinbench.synth.shapes import SHAPES, ModelShape
from orinllm.gpu.host_compiler import compiler_environment


def environment(folder: Path) -> dict[str, str]:
    """The environment of a program on the modelled board: compilers, a cache of its own."""
    drop = ("DEV", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    return {k: v for k, v in os.environ.items() if k not in drop} | {
        **{name: str(wheel_file(pattern)) for name, pattern in COMPILERS.items()},
        "CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]),
        "CACHEDB": str(folder / "cache.db"),
        "HCQDEV_WAIT_TIMEOUT_MS": "300000",
    }


def run(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in that environment."""
    line = [sys.executable, *command]
    given = environment(folder) | variables
    return subprocess.run(line, capture_output=True, text=True, timeout=400, env=given, check=False)


STRICT = ("-m", "nvgpusim", "--strict", "--quiet", "--")
BOUNDS = ("--sanitize", "bounds", "--quiet")  # kernels are compiled once for all that watch it


LOGITS = """
import sys
from pathlib import Path

import numpy as np
from tests.engine.conftest import load_emulated
from orinllm.gpu.kernels.buffers import KEY_TYPES

model, keys, *prompt = sys.argv[1:]
prompt = [*map(int, prompt)]
executor = load_emulated(Path(model), 64, kv=KEY_TYPES[keys], device="NV")
executor.fill_cache(prompt, 0, len(prompt) - 1)  # a chunk
executor.start_step(prompt[-1], len(prompt) - 1)
np.save(Path(model).with_name("logits.npy"), executor.wait_for_logits())
print("token", executor.wait_for_token())
"""


@pytest.mark.parametrize(
    ("shape", "quant", "keys"),
    [
        ("tiny-qwen3moe", "Q4_K", "q8_0"),
        ("qwen35", "Q8_0", "f16"),  # a gated delta net, and attention with gates
    ],
)
def test_tiny_model_on_the_modelled_orin(tmp_path: Path, shape: str, quant: str, keys: str) -> None:
    path = tmp_path / "tiny.gguf"
    if shape in hybrid_models.MODELS:
        hybrid_models.write(path, shape, quant)
    else:
        write_synthetic(path, shape, quant, seed=0)
    prompt = [7 * i % 61 + 3 for i in range(40)]
    program = (sys.executable, "-c", LOGITS, str(path), keys, *map(str, prompt))
    done = run(tmp_path, *STRICT, *program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = np.load(tmp_path / "logits.npy").astype(np.float64)
    assert done.stdout == f"token {found.argmax()}\n"
    (want,) = Reference(open_model(path), context=64).logits(prompt, 1)
    # What 8-bit activations leave in two layers, of the norm.
    assert np.linalg.norm(found - want) < 0.04 * np.linalg.norm(want)


DRAWS = """
import numpy as np
from tests.engine.gpu.kernels import chi_square
from orinllm.choose.sampling import Sampling, sample_token

chi_square.SLOTS = 2
for size, how in (
    (1003, Sampling(seed=5)),
    (3001, Sampling(top_k=0, min_p=0.0, top_p=0.9, seed=4)),
):
    logits = np.asarray(np.random.default_rng(7).normal(0, 2.0, size), np.float32)
    drawn = chi_square.draw("NV", logits, how, range(1, 5))
    want = [sample_token(logits, how, [], position) for position in range(1, 5)]
    assert drawn.tolist() == want, (drawn, want)
print("as on the host")
"""


def test_tokens_drawn_on_the_modelled_orin(tmp_path: Path) -> None:
    """The PTX of sm_87 draws the host's tokens: from a list, and from all of a row."""
    done = run(tmp_path, *STRICT, sys.executable, "-c", DRAWS, DEV="NV")
    assert done.stdout == "as on the host\n", done.stdout + done.stderr[-2000:]
    assert done.returncode == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two narrow layers, beside which compiled kernels are kept.

    The tokens that it says differ from each other: one that is read late would be another.
    """
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    narrow = ModelShape(2, 64, 128, 2, 1, 64, 320, 256, tied=False, weight_std=0.15)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "narrow", narrow)
        write_synthetic(path, "narrow", "Q8_0", seed=1)
    return path


ANSWERS = """
import json, sys
from tests.engine.batching.test_fused_batches import PAGES, run
from tests.engine.batching.running import ear, job
from orinllm.batching.fused_runner import FusedRunner
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.model import Model
from orinllm.choose.sampling import Sampling

one = Model.load(sys.argv[1], device=sys.argv[2], context=PAGES * PAGE)
greedy = Sampling(temperature=0)
prompt = [(37 * i) % 1000 + 3 for i in range(8)]

def said(prompt, n):
    return [p.token for p in one.generate(prompt, greedy, max_tokens=n) if p.token >= 0]

answers = [said(prompt, 2)]
left = iter(one.generate(prompt, greedy, max_tokens=3))
early = [next(left).token for _ in range(2)]
assert early == answers[0], early
answers.append(said([*prompt, early[0], 77], 2))  # while the third token of `left` is computed
fused, runner = one.runner.name == "fused", one.runner
for _ in left:  # it grew on, in the one thread that touches the runner
    pass
one.close()
if fused:
    runner = FusedRunner(runner.executor, 2)  # no launches of more sequences are made
    runner.compile_kernels()
jobs = [job(prompt[:2], 2), job(prompt[3:5], 2)]
run(runner, jobs)
answers += [ear(one).heard for one in jobs]
print(runner.name, json.dumps(answers))
"""


def test_answers_whose_next_token_is_under_way(tiny: Path) -> None:
    """Tokens are read from the mail while a late GPU, seen out of order, computes the next ones.

    So are those of two sequences that a scheduler computes together. What kernels do to each other
    inside a launch is the other tests' concern: it would double this one's time.
    """
    program = ("-c", ANSWERS, tiny)
    late = ("--delay", "3", "--order", "--write-back", "--seed", "13")
    modelled = ("-m", "nvgpusim", "--strict", *BOUNDS, *late, "--", sys.executable)
    compiler = compiler_environment(tiny.parent, os.environ)
    fused = run(tiny.parent, *modelled, *program, "NV", **compiler)
    cpu = run(tiny.parent, *program, "CPU", **compiler)
    assert fused.returncode == 0, fused.stdout + fused.stderr[-2000:]
    assert cpu.stdout.startswith("cpu "), cpu.stderr[-2000:]
    assert fused.stdout == cpu.stdout.replace("cpu", "fused")


FAULT = """
import sys, time
from tests.engine.batching.test_fused_batches import PAGES
from orinllm.model import Model
from orinllm.choose.sampling import Sampling
from orinllm.gpu.kernels.buffers import PAGE
from orinllm.gpu.steps.tokens import write_ints

one = Model.load(sys.argv[1], device="NV", context=PAGES * PAGE)
answer = iter(one.generate([5, 6, 7], Sampling(temperature=0)))
next(answer)
write_ints(one.runner.executor.find_or_make_decoder().list.table, [20_011])  # where nothing is
start, error = time.perf_counter(), ""
try:
    for piece in answer:
        pass
except RuntimeError as caught:
    error = str(caught)
print(error.count("FIFO_ERROR_MMU_ERR_FLT"), time.perf_counter() - start < 150)
"""


def test_a_fault_while_a_token_is_awaited(tiny: Path) -> None:
    """The answer ends in the device's own error, long before a wait of 300 s would have ended."""
    done = run(tiny.parent, "-m", "nvgpusim", "--", sys.executable, "-c", FAULT, tiny)
    # tinygrad says once more, at the end, what the device died of.
    assert done.stdout.startswith("1 True\nNV synchronization failed"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


SEES = """
import sys
from pathlib import Path

import numpy as np
from tests.engine.vision import tiny
from tests.engine.vision.test_vision import GREEDY, RECORDED, ids_of, tokens_of

from orinllm.loader import Network, SharingOptions, make_runner, make_page_store, plan_network
from orinllm.model import Model, ModelDescription
from orinllm.mmproj import PictureEncoder, network_for_pictures

folder, kind = Path(sys.argv[1]), "qwen3vl"
tiny.write_text(folder / "tiny.gguf", kind)
tiny.write_mmproj(folder / "mmproj.gguf", kind)
network = network_for_pictures(Network.read(folder / "tiny.gguf"), folder / "mmproj.gguf")
plan = plan_network(network, "NV")
assert plan.is_fused, plan.obstacles
runner = make_runner(network, plan, share=SharingOptions(slots=1))
store = make_page_store(runner, network)
model = Model(ModelDescription.from_network(network), plan, runner, store)
encoder = PictureEncoder.read(folder / "mmproj.gguf", network, "NV")
assert tokens_of(model.generate(ids_of(encoder, kind), GREEDY, max_tokens=1))
logits, wanted = model.runner.last_logits()[0], RECORDED[f"{kind}.logits"]
# The tokens alone are the same when all parts of a position are its first.
assert np.abs(logits - wanted).max() < 0.002 * np.abs(wanted).max()
found = tokens_of(model.generate(ids_of(encoder, kind), GREEDY, max_tokens=2))
assert found == list(RECORDED[f"{kind}.tokens"][:2]), found
print("the picture is seen")
"""


def test_a_picture_on_the_modelled_orin(tmp_path: Path) -> None:
    """Positions of three parts and rows beside embeddings, every check of --strict on."""
    script = tmp_path / "sees.py"
    script.write_text(SEES)
    repository = str(Path(__file__).parents[3])
    done = run(tmp_path, *STRICT, script, tmp_path, PYTHONPATH=repository)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the picture is seen" in done.stdout
