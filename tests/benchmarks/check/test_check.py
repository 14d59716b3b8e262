import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFReader
from tests.benchmarks import fake_llama_server
from tests.benchmarks.orinbench_command import Capture, Patch, orinbench

from orinbench import progress
from orinbench.check import (
    EIGHT_BIT_ACTIVATIONS,
    EIGHT_BITS_BY_256,
    HALF_WEIGHTS,
    EngineToCheck,
    judge_engine,
    judge_logits,
    random_prompts,
    require_passed,
)
from orinbench.check import command as check_command_module
from orinbench.check.command import check_command
from orinbench.check.greedy import DecodeFunction, GreedyGeneration, tinygrad_decode_function
from orinbench.check.judgement import wrong_choice_texts
from orinbench.check.reference import Reference
from orinbench.check.reference_rope import Array
from orinbench.check.rounded_reference import EngineRounding
from orinbench.errors import BenchError, CheckFailed
from orinbench.measure.backends.llama_server import find_llama_program, llama_cpp_decode_function
from orinbench.measure.backends.tinygrad_backend import worker_environment
from orinbench.measure.backends.worker_process import WorkerProcess
from orinbench.model import ModelInfo, open_model
from orinbench.synth import write_synthetic

N_TOKENS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    path = tmp_path_factory.mktemp("check") / "tiny.gguf"
    write_synthetic(path, "tiny", "Q4_K_M", 0)
    return open_model(path)


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """An executable that behaves like llama-server."""
    script = tmp_path / "bin" / "llama-server"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {fake_llama_server.__file__} "$@"\n')
    script.chmod(0o755)
    return script


def worker(device: str, folder: Path) -> Callable[[], WorkerProcess]:
    return partial(WorkerProcess, worker_environment(device, folder), 900)


def numpy_engine(model: ModelInfo, noise: float = 0.0) -> DecodeFunction:
    """The reference itself, over a file that may be damaged, with noise on its logits."""
    reference, draw = Reference(model), np.random.default_rng(0)

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        generations = []
        for prompt in prompts:
            tokens: list[int] = []
            rows = []
            for _ in range(n_tokens):
                row = reference.logits([*prompt, *tokens])[0]
                rows.append(row + noise * draw.standard_normal(row.shape))
                tokens.append(int(rows[-1].argmax()))
            generations.append(GreedyGeneration(tokens, np.stack(rows)))
        return generations

    return engine


def copy_of(model: ModelInfo, path: Path) -> tuple[ModelInfo, dict[str, Any]]:
    """Copy the file; return its model and its tensors' bytes, writable."""
    shutil.copy(model.path, path)
    reader = GGUFReader(path, "r+")
    return open_model(path), {tensor.name: tensor.data for tensor in reader.tensors}


def unpermuted(rows: Any, n_heads: int) -> Any:
    """Undo llama.cpp's permutation of attn_q and attn_k, as a loader that forgets it would."""
    heads = rows.reshape(n_heads, -1, 2, rows.shape[-1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def with_wrong_rope(model: ModelInfo, path: Path) -> ModelInfo:
    copy, data = copy_of(model, path)
    for layer in range(copy.n_layers):
        for name, heads in (("q", copy.n_heads), ("k", copy.n_kv_heads)):
            rows = data[f"blk.{layer}.attn_{name}.weight"]
            rows[:] = unpermuted(np.array(rows), heads)
        rows.flush()
    return copy


def with_a_corrupted_block(model: ModelInfo, path: Path) -> ModelInfo:
    copy, data = copy_of(model, path)
    block = data["blk.0.attn_v.weight"][17, :144]
    block[4:] ^= 0xA5
    block.flush()
    return copy


def judged(
    model: ModelInfo, engine: DecodeFunction, arithmetic: EngineRounding = HALF_WEIGHTS
) -> Any:
    verdict = judge_engine(model, EngineToCheck("engine", engine, arithmetic), N_TOKENS)
    assert verdict.passed == (not verdict.failures)
    return verdict


def test_noise_within_the_tolerance_passes_and_above_it_fails(tiny: ModelInfo) -> None:
    limit = judged(tiny, numpy_engine(tiny)).tolerance * np.std(Reference(tiny).logits([1, 2]))
    assert judged(tiny, numpy_engine(tiny, 0.8 * limit)).passed
    verdict = judged(tiny, numpy_engine(tiny, 1.5 * limit))
    assert not verdict.passed
    with pytest.raises(CheckFailed) as caught:
        require_passed(tiny, verdict)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert message.startswith(f"check of {tiny.path} failed: engine: logits off by ")
    assert "is above the tolerance" in message and "\n" not in message


@pytest.mark.parametrize("break_it", [with_wrong_rope, with_a_corrupted_block])
def test_planted_bugs_fail(tiny: ModelInfo, tmp_path: Path, break_it: Any) -> None:
    broken = break_it(tiny, tmp_path / "broken.gguf")
    with pytest.raises(CheckFailed, match="relative error"):
        require_passed(tiny, judged(tiny, numpy_engine(broken)))


def test_wrong_metadata_fails(tiny: ModelInfo) -> None:
    metadata = {**tiny.metadata, "llama.rope.freq_base": 10000.0}
    assert not judged(tiny, numpy_engine(replace(tiny, metadata=metadata))).passed


def one_position(token: int, got: Array, wanted: Array, off: float = 0.01) -> Any:
    """Judge one position, where rounding makes every logit `off` wrong."""
    rounded = wanted + off * np.array([1.0, -1.0, 1.0, -1.0])
    return judge_logits(
        "e", [GreedyGeneration([token], got[None])], [wanted[None]], [rounded[None]], "halves"
    )


WANTED = np.array([0.0, 1.0, 2.0, 2.005])
NUDGE = np.array([0.0, 0.0, 0.004, -0.004])  # swaps the last two


def test_another_token_is_forgiven_within_the_error_only() -> None:
    near = one_position(2, WANTED + NUDGE, WANTED)
    assert near.passed and near.forgiven == 1 and near.top1_agreement == 0
    assert "0% of 1 greedy tokens agree (1 within the error)" in near.summary_line()
    exact = one_position(2, WANTED, WANTED, off=1e-4)  # right logits, wrong choice
    assert not exact.passed
    assert "token 0 is 2 instead of 3" in exact.summary_line() and "FAILED" in exact.summary_line()
    # 0.2 behind, where both logits may be off by 0.01: the largest error excuses nothing.
    behind = WANTED - [0, 0, 0.2, 0]
    far = one_position(2, behind + np.array([0, 0, 0.3, 0]), behind)
    assert not far.passed and "2.0e-01 above it: more than rounding" in far.summary_line()


def test_too_many_forgivable_choices_are_not_forgiven() -> None:
    # Each second choice is three deviations behind: one is luck, four of ten are not.
    rows = np.tile(np.array([0.0, 0.0, 1.0, 1.06]), (10, 1))
    noise = np.full(10, 0.02 / 2**0.5)
    tokens = np.array([2, *[3] * 9])
    assert wrong_choice_texts(rows, tokens, noise) == []
    tokens[:4] = 2
    (said,) = wrong_choice_texts(rows, tokens, noise)
    assert said.startswith("4 of 10 tokens are no first choices, by rounding alone a chance of ")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_fail(bad: float) -> None:
    wanted = np.array([0.0, 1.0, 2.0, 3.0])
    got = wanted.copy()
    got[0] = bad
    verdict = one_position(3, got, wanted)
    assert verdict.failures == ("1 of 4 logits are not finite",)
    assert np.isfinite([verdict.relative_error, verdict.max_abs_error]).all()


def test_missing_alternatives_are_judged_by_those_that_are_there() -> None:
    log_probabilities = WANTED - np.log(np.exp(WANTED).sum())
    got = log_probabilities.copy()
    got[0] = np.nan
    generation, rounded = GreedyGeneration([3], got[None], normalized=True), WANTED + NUDGE
    verdict = judge_logits("e", [generation], [WANTED[None]], [rounded[None]], "halves")
    assert verdict.passed and verdict.kl_divergence is None
    assert verdict.quantity == "log-probabilities"
    assert "KL" not in verdict.summary_line()


@pytest.mark.parametrize(
    ("quant", "fused", "arithmetic"),
    [
        ("Q6_K", True, EIGHT_BIT_ACTIVATIONS),
        ("Q6_K", False, HALF_WEIGHTS),
        ("F16", True, HALF_WEIGHTS),
    ],
)
def test_fused_kernels_over_quantized_weights_round_activations(
    quant: str, fused: bool, arithmetic: EngineRounding, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic(path, "tiny", quant, 0, None)
    model = open_model(path)
    plain = numpy_engine(model)

    def engine(prompts: Sequence[Sequence[int]], n_tokens: int) -> list[GreedyGeneration]:
        return [replace(found, fused=fused) for found in plain(prompts, n_tokens)]

    verdict = judged(model, engine)
    assert (verdict.fused, verdict.arithmetic) == (fused, arithmetic.name)
    assert (verdict.tolerance > 0.01) == (arithmetic is EIGHT_BIT_ACTIVATIONS)
    assert verdict.summary_line().startswith("engine (fused kernels): " if fused else "engine: ")
    assert f": {arithmetic.name})" in verdict.summary_line()


def test_tinygrad_passes_and_fails_against_another_rotation(
    tiny: ModelInfo, tmp_path: Path
) -> None:
    said: list[str] = []
    live = tinygrad_decode_function(tiny.path, worker("CPU", tmp_path), said.append)
    generations = live(random_prompts(tiny, N_TOKENS, 0), N_TOKENS)
    of = "prompt 1 of 2"
    assert said[:3] == [
        "loading the model",
        f"{of}: reading 40 tokens",
        f"{of}: token 1 of {N_TOKENS}",
    ]
    assert said[-1] == f"prompt 2 of 2: layers of token {N_TOKENS} of {N_TOKENS}"
    assert len(said) == 1 + 2 * (1 + 3 * N_TOKENS)

    def recorded(_prompts: Sequence[Sequence[int]], _n_tokens: int) -> list[GreedyGeneration]:
        return generations

    verdict = judged(tiny, recorded)
    require_passed(tiny, verdict)
    # Not exact, or the reference would be checking itself; and far from the tolerance.
    assert 1e-5 < verdict.relative_error < 0.8 * verdict.tolerance
    broken = with_wrong_rope(tiny, tmp_path / "broken.gguf")
    with pytest.raises(CheckFailed, match="relative error"):
        require_passed(broken, judged(broken, recorded))


def test_reference_and_engine_rotate_for_the_same_context(tmp_path: Path) -> None:
    # A context that the factors for long texts are not for, of a file that has them.
    write_synthetic(path := tmp_path / "phi3.gguf", "tiny-phi3", "F16", 0)
    model = open_model(path)
    engine = tinygrad_decode_function(path, worker("CPU", tmp_path))
    require_passed(model, judged(model, engine))


@pytest.mark.parametrize(
    ("mode", "timeout", "message"),
    [
        ("dies", 60, "llama-server: ended with status 1: error: cannot load the model"),
        ("refuses", 60, r'llama-server: /completion answered 400: {"error": "no"}'),
        ("sleeps", 2, "llama-server: not ready in time"),
    ],
)
def test_a_llama_server_that_fails_is_one_line(
    tiny: ModelInfo, server: Path, monkeypatch: Patch, mode: str, timeout: float, message: str
) -> None:
    monkeypatch.setenv("FAKE_LLAMA_SERVER", mode)
    with pytest.raises(BenchError, match=message):
        llama_cpp_decode_function(server, tiny, timeout)([[1, 2]], 1)


def test_llama_server_is_found_beside_llama_bench_and_on_path(
    server: Path, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_llama_program("llama-server", server.with_name("llama-bench")) == server
    assert find_llama_program("llama-server") is None
    monkeypatch.setenv("PATH", str(server.parent))
    assert find_llama_program("llama-server", tmp_path / "llama-bench") == server


@pytest.mark.skipif(not shutil.which("llama-server"), reason="no llama-server on PATH")
def test_llama_cpp_passes(tiny: ModelInfo) -> None:
    binary = find_llama_program("llama-server")
    assert binary is not None
    verdict = judged(tiny, llama_cpp_decode_function(binary, tiny, 120), EIGHT_BITS_BY_256)
    require_passed(tiny, verdict)
    assert verdict.relative_error > 1e-4


def command_line(server: Path, *arguments: str) -> list[str]:
    """Arguments of `check` for a llama-server, which is found beside a llama-bench."""
    path = server.with_name("llama-bench")
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return ["--backend", "llama.cpp", "--llama-bench", str(path), *arguments]


def run_command(server: Path, *arguments: str) -> Any:
    line = command_line(server, *arguments)
    return CliRunner().invoke(check_command, line, standalone_mode=False)


def test_the_command_prints_a_line_for_each_engine(tiny: ModelInfo, server: Path) -> None:
    result = run_command(server, "-m", str(tiny.path), "-n", "2")
    assert result.return_value == 0 and result.exception is None
    assert result.stdout.startswith(f"{tiny.path}: llama.cpp: log-probabilities off by ")
    result = run_command(server, "-m", str(tiny.path), "-n", "2", "-o", "json")
    (report,) = json.loads(result.stdout)
    assert report["engine"] == "llama.cpp" and report["passed"]
    assert report["model"] == str(tiny.path)


def test_the_command_says_how_far_it_is(tiny: ModelInfo, server: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "_BETWEEN_LINES", 0.0)
    said = run_command(server, "-m", str(tiny.path), "-n", "2").stderr.splitlines()
    for line in (
        f"checking {tiny.path}",
        "llama-server loads the model",
        *(f"prompt {prompt} of 2: token {token} of 2" for prompt in (1, 2) for token in (1, 2)),
        *(f"float64 reference of prompt {prompt} of 2: layer 2 of 2" for prompt in (1, 2)),
    ):
        assert f"orinbench: llama.cpp: {line}" in said, line


def test_results_reach_standard_output_beside_a_terminal(tiny: ModelInfo, server: Path) -> None:
    """The moving progress goes to standard error."""
    line = command_line(server, "-m", str(tiny.path), "-n", "2")
    command = [sys.executable, "-m", "orinbench", "check", *line]
    screen, terminal = os.openpty()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal ends with EIO
        while more := os.read(screen, 4096):
            shown += more
    os.close(screen)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, shown
    assert out.decode().startswith(f"{tiny.path}: llama.cpp: log-probabilities off by ")
    assert b"llama.cpp: " in shown


def test_an_interrupted_command_prints_what_it_has(
    tiny: ModelInfo, server: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    checked: list[Any] = []

    def once(*arguments: Any) -> Any:
        if checked:
            raise KeyboardInterrupt
        checked.append(arguments)
        return judge_engine(*arguments)

    monkeypatch.setattr(check_command_module, "judge_engine", once)
    other = shutil.copy(tiny.path, tmp_path / "other.gguf")
    twice = ("-m", str(tiny.path), "-m", str(other), "-n", "1", "-o", "json")
    result = run_command(server, *twice)
    assert result.return_value == 130 and len(json.loads(result.stdout)) == 1
    assert "interrupted; 1 of 2 checks are done" in result.stderr


def test_the_command_goes_on_after_an_engine_that_dies(
    tiny: ModelInfo, server: Path, monkeypatch: Patch
) -> None:
    other = tiny.path.with_name("other.gguf")
    shutil.copy(tiny.path, other)
    script = server.read_text()
    server.write_text(script.replace("exec", f'case "$*" in *{tiny.path}*) exit 7;; esac; exec'))
    result = run_command(server, "-m", str(tiny.path), "-m", str(other), "-n", "1")
    assert result.return_value == 1
    assert "llama-server: ended with status 7: it wrote nothing" in result.stderr
    assert result.stdout.startswith(f"{other}: llama.cpp: log-probabilities off by ")
    server.unlink()
    monkeypatch.setenv("PATH", str(server.parent))
    result = run_command(server, "-m", str(tiny.path), "-n", "1")
    assert result.return_value == 1
    assert "no llama-server beside llama-bench or on PATH" in result.stderr


def test_the_command_exits_3_for_wrong_numbers(
    tiny: ModelInfo, server: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    broken = with_wrong_rope(tiny, tmp_path / "broken.gguf")
    script = server.read_text().replace('"$@"', f'"$@" -m {broken.path}')
    server.write_text(script)
    result = run_command(server, "-m", str(tiny.path), "-n", "2")
    assert isinstance(result.exception, CheckFailed) and result.exception.exit_code == 3
    assert str(result.exception) == "1 of 1 checks failed"
    assert "FAILED: relative error" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("-n", "600"), "a context of 512 has no room for 600 tokens"),
        (("-ctk", "q8_0", "-ctv", "q8_0"), "tinygrad:CPU keeps keys and values as f16"),
    ],
)
def test_what_cannot_be_checked_is_exit_code_2(
    tiny: ModelInfo, options: tuple[str, ...], says: str, capsys: Capture
) -> None:
    assert orinbench("check", "-m", str(tiny.path), "--backend", "tinygrad:CPU", *options) == 2
    assert says in capsys.readouterr().err
