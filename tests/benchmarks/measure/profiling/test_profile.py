"""`orinbench profile`: the log's reader, the classes, the tables and the command."""
# ruff: noqa: E501 - lines of a real log

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.benchmarks.orinbench_command import Capture, Patch, refused

from orinbench.errors import BenchError
from orinbench.measure.profiling import command as profile
from orinbench.measure.profiling.command import (
    Profile,
    profile_command,
    profile_markdown,
    sum_by_class,
)
from orinbench.measure.profiling.debug_log import kernel_class, parse_log
from orinllm.gpu.host_compiler import try_write_clang_script

# Printed by tinygrad 0.13.0 on an H200 and on a CPU, colours and all.
LOG = """\
llm: output_norm.weight GGML type 0 2048: fused kernels
=== orinbench prompt of 512
\x1b[32m*** CUDA       1\x1b[0m gemm_gate_up_q6_k_16384x2048                   arg  5 mem   1.19 GB tm    218.91us/     0.22ms ( 156941 GFLOPS  126|126    GB/s) []
=== orinbench warm-up
*** CUDA       2 gemv_head_q6_k_128256x2048                     arg  7 mem   1.19 GB tm     64.77us/     0.29ms (   8111 GFLOPS 3327|3327   GB/s) []
=== orinbench token
*** CUDA       3 embed_q6_k_2048                                arg  3 mem   1.19 GB tm      8.96us/     0.30ms (      0 GFLOPS    0|0      GB/s) []
*** CUDA       4 gemv_qkv_q4_k_q6_k_3072x2048                   arg  6 mem   1.19 GB tm     10.00us/     0.31ms (   1258 GFLOPS  500|500    GB/s) []
*** CUDA       5 gemv_qkv_q4_k_q6_k_3072x2048                   arg  6 mem   1.19 GB tm     30.00us/     0.34ms (   1258 GFLOPS  100|100    GB/s) []
*** CUDA       6 attention_32x8x64                              arg  7 mem   1.19 GB tm      5.26us/     0.34ms (      0 GFLOPS    0|0      GB/s) []
*** CPU        7 r_64_32_4                                      arg  3 mem   0.00 GB tm      1.50ms/     1.84ms (      1 TFLOPS    2|2      TB/s) ['linear']
"""


@pytest.mark.parametrize(
    ("name", "metadata", "kind"),
    [
        ("gemv_gate_up_q6_k_16384x2048", "", "GEMV gate_up Q6_K"),
        ("gemv_qkv_q4_k_q6_k_3072x2048", "", "GEMV qkv Q4_K_Q6_K"),
        ("gemm_down_f16_2048x8192", "", "GEMM down F16"),
        ("joined_qkv_attention_out_q6_k_3072x2048", "", "joined qkv_attention_out Q6_K"),
        ("joined_attention_out_32x8x64", "", "joined attention_out"),
        ("attention_rows_32x8x64", "", "attention"),
        ("rope_rows_32x8x64", "", "attention"),
        ("norm_rows_2048", "", "norm"),
        ("embed_q6_k_2048", "", "embedding"),
        ("r_8_16", "['softmax']", "attention"),
        ("r_8_16", "['linear']", "matmul"),
        ("r_8_16", "[]", "reduction"),
        ("E_8_16", "[]", "elementwise"),
        ("copy  4, CPU <- CUDA", "", "copy"),
        ("something", "", "other"),
    ],
)
def test_classes(name: str, metadata: str, kind: str) -> None:
    assert kernel_class(name, metadata) == kind


def test_tables_sum_and_compare_with_the_wall_clock() -> None:
    token = sum_by_class(
        kernel for kernel in parse_log(LOG.splitlines()) if kernel.section == "token"
    )
    assert {c.kind: c for c in token}["GEMV qkv Q4_K_Q6_K"].count == 2
    wall = {"prompt of 512": 2e-3, "token": 1e-3}
    text = profile_markdown(Profile("m.gguf", "CUDA", "fused", wall, {"token": token}, 400e9))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    # 8 MB in 40 us are 200 GB/s, half of the copy bandwidth
    assert "| GEMV qkv Q4_K_Q6_K | 2 | 40.0 | 20.00 | 8.0 | 200 | 50.0 % | 2.6 % |" in lines
    assert "| sum, one by one | 5 | 1554.2 | | | | | |" in lines
    assert lines.index("Wall clock, as a graph: 1000.0 us.") > lines.index("Wall clock: 2000.0 us.")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("profile -m {other}", "other.gguf: not a GGUF file"),
        ("profile -m {least} -p 8 -d 9999", "-p 8, -d 9999: need a context of 10041 tokens; "),
        ("llama-bench -m {least} -p 9999", "pp9999 needs a context of 9999 tokens; "),
        ("check -m {least} -n 9999", "a context of 128 has no room for 9999 tokens"),
    ],
)
def test_what_cannot_be_is_said_before_a_device_is_tried(
    words: str, says: str, tmp_path: Path, least_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(
        "orinbench.measure.models_and_backends.open_failure_reason", lambda device: 1 / 0
    )
    other = tmp_path / "other.gguf"
    other.write_text("no model")
    assert says in refused(capsys, *words.format(other=other, least=least_path).split())


def test_a_device_that_does_not_open_is_one_line(least_path: Path) -> None:
    with pytest.raises(BenchError, match="profiling on NONE failed: ") as caught:
        profile.measure_profile(least_path, "NONE", 8, 0)
    assert "\n" not in str(caught.value)


def test_a_model_on_the_cpu(least_path: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    assert try_write_clang_script(tmp_path), "ziglang: missing, install the extra cpu"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    words = ["-m", str(least_path), "--backend", "tinygrad:CPU", "-p", "9"]
    done = CliRunner().invoke(profile_command, [*words, "-o", "json"])
    assert done.exception is None
    result = json.loads(done.output)
    # The engine's own path: one program a token, in which tinygrad times no kernel.
    assert result["path"] == "cpu" and result["sections"] == {}
    assert set(result["wall"]) == {"prompt of 9", "token"} and min(result["wall"].values()) > 0
    assert result["bandwidth"] > 1e8


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("llama.cpp", "one of tinygrad's is profiled"),
        ("tinygrad:CPU,tinygrad:CUDA", "one of tinygrad's is profiled"),
        ("tinygrad:TPU", "unknown; there are "),
        ("tinygrad:CUDA:NOSUCH", "does not open: "),
    ],
)
def test_a_backend_that_cannot_be_is_named(backend: str, says: str, least_path: Path) -> None:
    words = ["-m", str(least_path), "-p", "8", "--backend", backend]
    error = CliRunner().invoke(profile_command, words).exception
    assert isinstance(error, BenchError)
    assert str(error).startswith(f"--backend {backend}: {says}")
