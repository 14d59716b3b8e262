"""0006: matvec through casts and dequantization."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.patches.conftest import wheel_file
from tests.patches.probes import matvec

# What `matvec.opts_table` gives, read once by a person:
# {type: {layer: [stock, patched]}}
TABLE: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("matvec_opts.json").read_text()
)
TARGETS = ("NULL:CUDA:sm_87", "NULL:PTX:sm_87")
QUANTIZED = [name for name, quant in matvec.TYPES.items() if quant.elements > 1]


def test_table_has_every_type_and_layer() -> None:
    from tinygrad.llm.gguf import _GGML_NATIVE, _GGML_QUANT

    numbers = {matvec.TYPES[name].number for name in TABLE}
    assert numbers == set(_GGML_NATIVE) | set(_GGML_QUANT)
    assert all(set(layers) == set(matvec.SHAPES) for layers in TABLE.values())
    blocks = {q.number: (q.elements, q.size) for q in matvec.TYPES.values() if q.elements > 1}
    assert blocks == _GGML_QUANT


@pytest.mark.parametrize(
    ("name", "target"),
    # The rule asks a renderer only what it has: of PTX one type of each form will do.
    [(name, TARGETS[0]) for name in TABLE]
    + [(name, TARGETS[1]) for name in ("Q6_K", "Q4_0", "F16", "I8")],
)
def test_opts(name: str, target: str) -> None:
    rows = matvec.opts_table(matvec.null_renderer(target), [name])
    got = {layer: [before, after] for _, layer, before, after in rows}
    assert got == TABLE[name]


@pytest.mark.parametrize("name", ["Q6_K", "Q4_0"])
def test_without_the_rule_opts_are_those_of_stock(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `llama-bench --env MV=0,1` times a quantized model without the patch and with it."""
    from tinygrad.helpers import getenv

    monkeypatch.setenv("MV", "0")
    getenv.cache_clear()
    try:
        rows = matvec.opts_table(matvec.null_renderer(TARGETS[0]), [name])
        got = {layer: (before, after) for _, layer, before, after in rows}
    finally:
        monkeypatch.undo()
        getenv.cache_clear()
    assert got == {layer: (before, before) for layer, (before, _) in TABLE[name].items()}


def llama_1b() -> Any:
    """One block and the head of Llama-3.2-1B in Q6_K on the default device, which holds no data."""
    from tinygrad import Tensor, dtypes, nn
    from tinygrad.llm.model import Transformer, TransformerConfig

    quant = matvec.TYPES["Q6_K"]
    config = TransformerConfig(
        num_blocks=1, dim=2048, hidden_dim=8192, n_heads=32, n_kv_heads=8, norm_eps=1e-5,
        vocab_size=128256, head_dim=64, rope_theta=500000.0, rope_dim=64, v_head_dim=64,
        max_context=64,
    )  # fmt: skip
    model = Transformer(config)
    weights: dict[str, Tensor] = {}
    for name, tensor in nn.state.get_state_dict(model).items():
        if tensor.ndim == 1:
            weights[name] = Tensor.ones(*tensor.shape, dtype=dtypes.float16).contiguous().realize()
            continue
        rows, columns = tensor.shape
        data = Tensor.empty(rows * columns // quant.elements * quant.size, dtype=dtypes.uint8)
        w = matvec.matrix(data, quant, rows, columns)
        n = {"attn_q": 32, "attn_k": 8}.get(name.split(".")[-2])
        if n is not None:  # the order of rows that from_gguf undoes, lazily too
            w = w.reshape(n, 64, -1).rearrange("n (h two) d -> n (two h) d", two=2)
            w = w.reshape(rows, columns)
        weights[name] = w
    weights["output.weight"] = weights["token_embd.weight"]  # tied
    nn.state.load_state_dict(model, weights, verbose=False, consume=True, realize=False)
    return model


def reduces(target: str) -> Iterator[tuple[tuple[list[int], list[int]], str]]:
    """The reduces of one block and the head of a Q6_K model: ((rows, columns), opts)."""
    from tinygrad import Context, Tensor, UOp, dtypes
    from tinygrad.uop.ops import AxisType

    renderer = matvec.null_renderer(target)
    with Context(DEV="NULL"):
        position = UOp.variable("start_pos", 0, 63).bind(5)
        token = Tensor.empty(1, 1, dtype=dtypes.int32)
        out = llama_1b().forward(token, position, Tensor.empty(1))
        for call in matvec.calls(out):
            seen: list[Any] = []

            def note(k: Any, seen: list[Any] = seen) -> Any:
                seen.append(k)
                return matvec.patched_rule(k)

            (opts,) = matvec.picks(call.src[0], renderer, note)
            shape = tuple(
                [r.vmax + 1 for r in seen[0].ranges_of(kind)]
                for kind in (AxisType.GLOBAL, AxisType.REDUCE)
            )
            if shape[1] and all(r.src[0].op.name == "CONST" for r in seen[0].rngs):
                yield (shape[0], shape[1]), matvec.spell(opts)


@pytest.mark.parametrize("target", TARGETS)
def test_every_projection_of_a_model(target: str) -> None:
    """Fused with norm, rope, silu and the store into the cache as they are."""
    rule = "GROUP(4,32) UNROLL(4,0) UNROLL(3,0) LOCAL"
    got = [
        (int(np.prod(rows)), int(np.prod(columns)))
        for (rows, columns), opts in reduces(target)
        if opts.startswith(rule)
    ]
    # k and v have 8 heads of 64; the kernel of v also stores the k that it rotates.
    want = [(2048, 2048), (512, 2048), (1024, 2048), (2048, 2048), (8192, 2048), (8192, 2048)]
    assert got == [*want, (2048, 8192), (128256, 2048)]


def ptxas(source: str, tmp_path: Path) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as ptxas counts them for sm_87."""
    (tmp_path / "kernel.ptx").write_text(source)
    command = [str(wheel_file("cuda_nvcc/bin/ptxas")), "-v", "-arch=sm_87", "-o", "/dev/null"]
    done = subprocess.run(
        [*command, tmp_path / "kernel.ptx"], capture_output=True, text=True, check=True
    )
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert registers is not None and spills, done.stderr
    return int(registers[1]), sum(map(int, spills))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_registers_without_spills(name: str, target: str, tmp_path: Path) -> None:
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler, PTXCompiler

    ast = matvec.layer(name, *matvec.SHAPES["gate/up"])
    renderer = matvec.null_renderer(target)
    (opts,) = matvec.picks(ast, renderer, matvec.patched_rule)
    assert opts is not None
    source = matvec.compiled(ast, renderer, opts).src[3].arg
    compiler = PTXCompiler("sm_87") if ":PTX:" in target else NVRTCCompiler("sm_87", ptx=True)
    registers, spilled = ptxas(compiler.compile(source).decode().rstrip("\0"), tmp_path)
    # An SM has 65536 registers and 1536 threads (CUDA C Programming Guide, capability 8.7): with 72
    # it still holds 7 blocks of 128 threads. Stock takes up to 255, and spills Q4_K, Q5_K and Q6_K.
    assert spilled == 0
    assert registers <= 72


def dequantize(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The matrix in float64, by the gguf library; Q1_0, which it lacks, by its definition."""
    if name != "Q1_0":
        kind = gguf.GGMLQuantizationType(matvec.TYPES[name].number)
        return np.asarray(gguf.quants.dequantize(blocks, kind), np.float64)
    split = blocks.reshape(-1, 18)
    scale = split[:, :2].copy().view("<f2").astype(np.float64)
    signs = np.unpackbits(split[:, 2:], axis=1, bitorder="little") * 2.0 - 1.0
    return np.asarray((scale * signs).reshape(blocks.shape[0], -1))


@pytest.mark.parametrize("name", QUANTIZED)
def test_result_under_the_rule(name: str) -> None:
    """On tinygrad's Python device, which has threads, groups and shared memory, lane by lane."""
    from tinygrad import Context, Device, Tensor
    from tinygrad.engine.realize import run_linear

    rows, columns, quant = 8, 512, matvec.TYPES[name]
    blocks = matvec.random_blocks(quant, rows, columns, seed=7)
    vector = np.random.default_rng(7).standard_normal((1, 1, columns), np.float32)
    want = dequantize(name, blocks) @ vector.reshape(-1).astype(np.float64)
    with Context(DEV="PYTHON"):
        data = Tensor(blocks.reshape(-1)).realize()
        x = Tensor(vector).realize()
        weights = matvec.matrix(data, quant, rows, columns, half=False)
        out = x.linear(weights.transpose())
        linear, variables = Tensor.linear_with_vars(out)
        ast = [call for call in linear.src if call.src[0].op.name == "SINK"][-1].src[0]
        (opts,) = matvec.picks(ast, Device["PYTHON"].renderer, matvec.patched_rule)
        assert "GROUP(" in matvec.spell(opts)
        run_linear(linear, variables)
        got = out.numpy().reshape(-1).astype(np.float64)
    # float32 sums of 512 products
    assert np.abs(got - want).max() <= 5e-6 * np.abs(want).max()
