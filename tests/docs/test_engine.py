"""docs/engine.md: its lists are the code's, its example is the file. UPDATE_DOCS=1 writes them.

The files that it and docs/engine-design.md name exist.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import REPOSITORY, blocks, text

from orinbench.synth import write_synthetic
from orinllm.file.ggml import kernel_ggml_types
from orinllm.file.gguf import GGUF
from orinllm.network.arch import ARCHITECTURES
from orinllm.network.arch.header import Header
from orinllm.network.arch.tinygrad_llm import tinygrad_config
from orinllm.network.layer import Activation, Gate

PAGE = "docs/engine.md"
DESIGN = "docs/engine-design.md"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def architectures() -> str:
    fused = [name for name, family in ARCHITECTURES.items() if family.config is not tinygrad_config]
    others = [name for name, family in ARCHITECTURES.items() if family.config is tinygrad_config]
    return f"{_names(fused)}; tinygrad.llm: {_names(others)}."


def types() -> str:
    return f"{_names([t.name for t in sorted(kernel_ggml_types().values(), key=lambda t: t.id)])}."


def example() -> str:
    return (REPOSITORY / "docs" / "examples" / "ask.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        (r"(?<=<!-- architectures -->\n\n).*?(?=\n\n)", architectures),
        (r"(?<=<!-- types -->\n\n).*?(?=\n\n)", types),
        (r"(?<=\n```python\n).*?(?=```)", example),
    ],
    ids=["architectures", "types", "example"],
)
def test_what_the_page_says_is_the_code(pattern: str, made: object) -> None:
    assert callable(made)
    page = text(PAGE)
    found = re.search(pattern, page, re.DOTALL)
    assert found, f"{PAGE}: nothing to compare"
    if os.environ.get("UPDATE_DOCS"):
        new = page[: found.start()] + made() + page[found.end() :]
        (REPOSITORY / PAGE).write_text(new, encoding="utf-8")
    else:
        assert found[0] == made()


@pytest.mark.parametrize("page", [PAGE, DESIGN])
def test_files_that_the_page_names_exist(page: str) -> None:
    engine = REPOSITORY / "engine" / "orinllm"
    named = set(re.findall(r"\b(?:\w+/)*\w+\.(?:py|cuh|cu|c|h)\b", text(page)))
    assert named
    for name in named - {"FAMILY.py", "arch/FAMILY.py", "cuda/NAME.cu"}:
        outside = (REPOSITORY / name, REPOSITORY / "tests" / "engine" / name)
        rooms = (engine, REPOSITORY / "benchmarks")
        there = any(any(room.rglob(name)) for room in rooms) or any(p.exists() for p in outside)
        assert there, f"{page}: {name}"


def test_the_architecture_that_the_page_adds_makes_a_config(tmp_path: Path) -> None:
    (example,) = (block for block in blocks(DESIGN) if block.language == "python")
    scope: dict[str, Any] = {}
    exec("\n".join(example.lines), scope)
    path = tmp_path / "m.gguf"
    write_synthetic(path, "tiny-qwen3", "F16", 0)
    gguf = GGUF.open(path)
    metadata = {**gguf.metadata, "qwen3.embedding_scale": 6.0}
    config = scope["faux_config"](Header(metadata, gguf.tensors, gguf.f32_or_f16_tensor, 64))
    assert config.embedding_scale == 6
    assert all(attention.qk_norm for attention in config.attention_by_layer.values())
    gates = [op for layer in config.layers for op in layer.operations if isinstance(op, Gate)]
    assert {gate.activation for gate in gates} == {Activation.GELU}
