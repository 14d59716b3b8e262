"""`orinllm show`: what a file holds, and which path computes each tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from orinllm.command.options import ModelLoadOptions, with_model
from orinllm.command.terminal import print_line
from orinllm.errors import escape_unprintable


@click.command()
@with_model
def show(source: ModelLoadOptions) -> None:
    """Describe a model, and which path computes each tensor.

    The reason stands beside each path.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from orinllm.gpu.device import open_and_name_device
    from orinllm.gpu.kernels.buffers import KEY_TYPES
    from orinllm.gpu.path_plan import cache_bytes, make_path_plan
    from orinllm.model import ModelDescription

    description = ModelDescription.read(source.model, source.context, KEY_TYPES[source.kv])
    network = description.network
    plan = make_path_plan(
        network.gguf, network.config, open_and_name_device(source.device), network.kv
    )
    for line in _summary_lines(description, plan, cache_bytes(plan, network.context)):
        print_line(line)
    if source.mmproj is not None:
        from orinllm.mmproj import projector_lines

        for line in projector_lines(source.mmproj, network):
            print_line(line)
    table = Table("tensor", "type", "shape", "bytes", "path", box=None, pad_edge=False)
    for tensor in network.gguf.tensors.values():
        reason = "asked for" if source.general else plan.reason_not_fused(tensor.name)
        path = "general" if source.general else plan.path
        taken = "fused kernels" if reason is None else f"{path} path: {reason}"
        shape = " x ".join(map(str, tensor.shape))
        cells = tensor.name, tensor.type.name, shape, f"{tensor.n_bytes:,}", taken
        table.add_row(*(Text(escape_unprintable(cell)) for cell in cells))  # and no markup
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)


def _summary_lines(description: Any, plan: Any, cache: int) -> Iterator[str]:
    network = description.network
    config, gguf = network.config, network.gguf
    yield f"file          {gguf.path}, {gguf.n_tensor_bytes / 1e6:,.1f} MB of tensors"
    n_layers = len(config.layers) or "unknown"
    yield f"architecture  {config.architecture}, {n_layers} layers, width {config.dim}"
    yield f"vocabulary    {description.tokenizer.vocab_size} tokens, {config.vocab_size} logits"
    yield f"template      {'yes' if description.template else 'no: it continues text'}"
    yield f"context       {network.context} tokens (trained for {config.trained_context})"
    yield f"memory        {plan.weight_bytes / 1e6:,.1f} MB of weights, as {plan.weights_as}"
    yield f"              {cache / 1e6:,.1f} MB of keys and values"
    yield f"device        {plan.device}: {plan.path} path"
    for what, why in plan.obstacles.items():
        yield f"              {what}: {why}"
