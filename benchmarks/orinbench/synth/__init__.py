"""Write synthetic models: real shapes and metadata, random valid weights, the same for a seed."""

import itertools
import logging
import math
import os
import shutil
import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.gguf_writer import WriterState
from numpy.random import PCG64, SeedSequence

from orinbench.errors import BenchError
from orinbench.model import open_model
from orinbench.options import AT_LEAST_1, option, seed_option
from orinbench.progress import Progress
from orinbench.synth.random_blocks import normal_floats, random_tensor_chunks
from orinbench.synth.shapes import (
    QUANTS,
    SHAPES,
    ModelShape,
    QuantRecipe,
    WeightDraw,
    quant_named,
    shape_named,
)

# Names the generator in cached files: raise it when the bytes for a seed change.
GENERATION = 2
# Room for the header and the file system beside the tensors.
_MARGIN_BYTES = 16 << 20
# Bytes that tensors begin at a multiple of, where a file does not say (gguf.md).
_ALIGNMENT = 32
_SPECIAL_TOKENS = tuple(
    """
    <|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>
""".split()
)

ProgressCallback = Callable[[int, int], None]  # bytes written, bytes of all tensors


def write_synthetic(
    path: Path,
    shape_name: str,
    quant_name: str,
    seed: int,
    progress: ProgressCallback | None = None,
    context: int | None = None,
) -> None:
    """Write the synthetic model of a shape, quantization and seed to `path`, all of it or nothing.

    `context` is the tokens it says it was trained for, where not the shape's. Tensors are made and
    written in chunks, so memory stays small whatever the shape. Raises BenchError for an unknown
    shape or quantization, for a folder that is not there, and when the disk is too small or fails.
    """
    shape, quant = shape_named(shape_name), quant_named(quant_name)
    shape = replace(shape, context_length=context or shape.context_length)
    total = sum(n_bytes for *_, n_bytes, _ in _tensor_layouts(shape, quant))
    try:
        free = shutil.disk_usage(path.parent).free
        if free < total + _MARGIN_BYTES:
            raise BenchError(
                f"{path}: needs {(total + _MARGIN_BYTES) / 1e9:.2f} GB but the disk has "
                f"{free / 1e9:.2f} GB free; free some or choose a smaller --shape"
            )
        with _replacing_file(path) as part:
            writer = GGUFWriter(part, shape.architecture)
            # llama.cpp asks models with "phi3" in their names for tokens that these have not.
            name = f"synthetic {shape_name.replace('phi3', 'phi')} {quant_name} seed {seed}"
            _add_metadata(writer, shape, quant, name)
            _add_tensor_infos(writer, shape, quant)
            _write_header_and_tensors(writer, shape, quant, seed, progress, total)
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from error


def write_model_of_zeros(path: Path, shape_name: str, quant_name: str) -> None:
    """Write a synthetic model's header, and tensors of zeros that take no room on most disks."""
    shape, quant = shape_named(shape_name), quant_named(quant_name)
    writer = GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape, quant, f"outline {shape_name} {quant_name}")
    _add_tensor_infos(writer, shape, quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    end = path.stat().st_size
    total = sum(
        -(-n_bytes // _ALIGNMENT) * _ALIGNMENT for *_, n_bytes, _ in _tensor_layouts(shape, quant)
    )
    os.truncate(path, -(-end // _ALIGNMENT) * _ALIGNMENT + total)


def _add_tensor_infos(writer: GGUFWriter, shape: ModelShape, quant: QuantRecipe) -> None:
    for tensor, dims, tensor_type, n_bytes, _ in _tensor_layouts(shape, quant):
        row_bytes = (*dims[:-1], n_bytes // math.prod(dims[:-1]))
        writer.add_tensor_info(
            tensor, row_bytes, np.dtype(np.uint8), n_bytes, raw_dtype=tensor_type
        )


def find_or_write_synthetic(
    shape: str, quant: str, seed: int, progress: ProgressCallback | None = None
) -> Path:
    """Return the path of a synthetic model in the user's cache; write it if it is not there.

    The cache is $XDG_CACHE_HOME/tinygrad-orin/models, with ~/.cache as default.
    """
    shape_named(shape), quant_named(quant)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / f"tinygrad-orin/models/synthetic-{shape}-{quant}-{seed}-g{GENERATION}.gguf"
    try:
        open_model(path)
    except BenchError:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"{path.parent}: cannot be made: {error.strerror}") from error
        write_synthetic(path, shape, quant, seed, progress)
    return path


def _tensor_layouts(
    shape: ModelShape, quant: QuantRecipe
) -> Iterator[tuple[str, tuple[int, ...], GGMLQuantizationType, int, WeightDraw]]:
    """Yield name, shape (rows first), type, bytes and draw of each tensor, in the file's order."""
    for name, dims, draw in shape.tensors():
        tensor_type = GGMLQuantizationType.F32
        if draw == WeightDraw.MATRIX:
            tensor_type = quant.matrix_type(name, shape, dims[-1])
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        yield name, dims, tensor_type, math.prod(dims) // block * block_bytes, draw


def _write_header_and_tensors(
    writer: GGUFWriter,
    shape: ModelShape,
    quant: QuantRecipe,
    seed: int,
    progress: ProgressCallback | None,
    total: int,
) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # GGUFWriter writes whole tensors only, and an F16 head of the 8B shape has 1.05 GB.
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    done = 0
    for name, dims, tensor_type, n_bytes, draw in _tensor_layouts(shape, quant):
        chunks: Iterable[np.ndarray]
        if draw == WeightDraw.MATRIX:
            chunks = random_tensor_chunks(
                tensor_type, math.prod(dims), shape.weight_std, seed, name
            )
        else:
            values = normal_floats(PCG64(SeedSequence([seed, *name.encode()])), math.prod(dims))
            chunks = [_DRAWS[draw](values, shape).astype(np.float32)]
        for chunk in chunks:
            file.write(chunk.data)
            done += chunk.nbytes
            if progress is not None:
                progress(done, total)
        writer.write_padding(file, n_bytes)
    writer.state = WriterState.WEIGHTS
    writer.close()


# From nearly normal numbers. Long factors are what longrope's are: up to some tens.
_DRAWS: dict[WeightDraw, Callable[[np.ndarray, ModelShape], np.ndarray]] = {
    WeightDraw.NORM: lambda values, shape: 1 + np.float32(0.1) * values,
    WeightDraw.BIAS: lambda values, shape: np.float32(0.2) * values,
    WeightDraw.SINK: lambda values, shape: values,
    WeightDraw.ROUTER: lambda values, shape: values / np.float32(np.sqrt(shape.n_embd)),
    WeightDraw.FACTORS: lambda values, shape: 1 + np.abs(values) * np.float32(4),
    WeightDraw.TAPS: lambda values, shape: values / np.float32(2),
    WeightDraw.DECAY: lambda values, shape: -np.abs(values) - np.float32(0.01),
    WeightDraw.QUERY: lambda values, shape: (
        (1 + np.float32(0.1) * values) / np.sqrt(shape.head_dim)
    ),
    WeightDraw.ROOT: lambda values, shape: np.sqrt(shape.n_embd) * (1 + np.float32(0.1) * values),
}


_VALUES: dict[type, Callable[[GGUFWriter, str, Any], None]] = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def _add_metadata(writer: GGUFWriter, shape: ModelShape, quant: QuantRecipe, name: str) -> None:
    writer.add_name(name)
    writer.add_description("random weights: made to be measured, not to be talked to")
    writer.add_file_type(quant.file_type)
    writer.add_block_count(shape.n_blocks)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    if shape.n_experts:
        writer.add_expert_feed_forward_length(shape.n_ff)
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_experts_used)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.head_count_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.n_rot or shape.head_dim)
    for key, value in shape.metadata.items():
        _VALUES[type(value)](writer, f"{shape.architecture}.{key}", value)
    writer.add_vocab_size(shape.vocab_size)
    tokens, merges = _tokens_and_merges(shape.vocab_size)
    n_normal = len(tokens) - len(_SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.NORMAL] * n_normal + [TokenType.CONTROL] * len(_SPECIAL_TOKENS)
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|end_of_text|>"))
    writer.add_eot_token_id(tokens.index("<|eot_id|>"))


def _tokens_and_merges(size: int) -> tuple[list[str], list[str]]:
    """Return `size` tokens of a byte-level BPE, and its merges.

    The 256 bytes in GPT-2's spelling, then pairs, triples and quadruples of small letters, of which
    the pairs are what text is merged into, then Llama 3's special tokens.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    words = (
        "".join(letters)
        for length in (2, 3, 4)
        for letters in itertools.product(string.ascii_lowercase, repeat=length)
    )
    tokens = [spelling[byte] for byte in range(256)]
    tokens += itertools.islice(words, size - len(tokens) - len(_SPECIAL_TOKENS))
    merges = [f"{word[0]} {word[1]}" for word in tokens if len(word) == 2]
    return [*tokens, *_SPECIAL_TOKENS], merges


@contextmanager
def _replacing_file(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it on success, remove it on anything else."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def make_progress_callback(what: str) -> ProgressCallback:
    """Return what says how much of a model is written, where that takes long."""
    talk = Progress()

    def progress(done: int, total: int) -> None:
        talk.show_detail(f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        if done >= total:
            talk.close()

    return progress


@click.command("synth")
@click.option("--shape", required=True, metavar="|".join(SHAPES), help="Shape of the model.")
@option("--quant", f"Type of the matrices: {', '.join(QUANTS)}.", default="Q6_K", metavar="TYPE")
@seed_option("the weights")
@option("--context", "Tokens of a sequence. [default: the shape's]", type=AT_LEAST_1)
@option("--force", "Replace OUT.gguf if it exists.", is_flag=True)
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.gguf")
def synth_command(
    shape: str, quant: str, seed: int, context: int | None, force: bool, out: Path
) -> None:
    """Write a synthetic model of random weights.

    The shape is a real model's. The same seed gives the same file.
    """
    if out.is_dir():
        raise BenchError(f"{out}: is a directory; the file to write was expected")
    if out.exists() and not out.is_file():
        raise BenchError(f"{out}: is no regular file; the file to write was expected")
    if out.exists() and not force:
        raise BenchError(f"{out}: exists already; pass --force to replace it")
    write_synthetic(
        out, shape, quant, seed, make_progress_callback(f"synthetic {shape} {quant}"), context
    )
    model = open_model(out)
    click.echo(
        f"{out}: {model.name}: {model.type_label}, {model.n_params / 1e6:,.1f} M weights, "
        f"{out.stat().st_size / 1e6:,.1f} MB, a token reads {model.token_read_bytes / 1e6:,.1f} MB",
        err=True,
    )


logging.getLogger("gguf").setLevel(logging.WARNING)
