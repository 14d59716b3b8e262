"""Experts that the fused kernels chose, and their error against a reference with the same ones.

Where two experts are nearly equal for a token, rounding decides which of them is chosen, and the
logits of that choice are those of another network: their distance from the reference says nothing
about the kernels. So the reference is made to choose as the kernels did.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orinbench.check.reference import Reference, RoutedExperts
from orinbench.model import open_model
from orinllm.gpu.fused_executor import FusedExecutor
from orinllm.gpu.launch import Launch, LaunchGraph
from orinllm.gpu.steps.tokens import write_ints

Ids = NDArray[np.intp]
Routing = dict[int, Ids]  # by layer: (tokens, used)


def _layers(
    launches: Sequence[Launch], device: str, behind: Sequence[Launch] = ()
) -> list[tuple[LaunchGraph, Launch]]:
    """Return each router's launch, and a graph of all launches up to it and of `behind`."""
    at = [i for i, launch in enumerate(launches) if launch.name.startswith("route_")]
    return [(LaunchGraph(device, [*launches[: i + 1], *behind]), launches[i]) for i in at]


def _ids(route: Launch, tokens: int) -> Ids:
    """Read the experts that a router left for its first tokens."""
    (buffer,) = (a.buffer for a in route.arguments if a.name == "ids")
    (constants,) = route.constants
    raw = np.frombuffer(buffer.copyout(memoryview(bytearray(buffer.nbytes))), np.int32)
    used = int(constants["used"])
    return raw.reshape(-1, used)[:tokens].astype(np.intp)


def run(executor: FusedExecutor, tokens: Sequence[int], chunked: bool = True) -> Routing:
    """Run a prompt, its last token as a token; return the experts of each, by layer of experts.

    Each launch is repeated up to each router, which leaves keys and values as they were.
    """
    device, decoder, last = executor.memory.device, executor.find_or_make_decoder(), len(tokens) - 1
    found: dict[int, list[Ids]] = {}
    token = decoder.list.launches
    token_layers = _layers(token, device, token[-1:])  # the head: parts of launches wait anew
    prompt = executor._prompt.list
    chunk_layers = _layers(prompt.launches + prompt.rest, device)
    at = 0
    while at <= last:
        n = min(executor.chunk_size, last - at) if chunked else 1
        if n < 8:  # a token at a time, as the executor does
            executor.start_step(tokens[at], at)
            for i, (graph, route) in enumerate(token_layers):
                write_ints(decoder.list.state, [tokens[at], at])
                graph.start()
                found.setdefault(i, []).append(_ids(route, 1))
            at += 1
        else:
            executor.fill_cache(tokens, at, at + n)
            for i, (graph, route) in enumerate(chunk_layers):
                graph.start()
                found.setdefault(i, []).append(_ids(route, n))
            at += n
    executor.start_step(tokens[last], last)
    return {i: np.concatenate(rows) for i, rows in found.items()}


def forced(routing: Routing) -> dict[tuple[int, int], list[int]]:
    """Return a routing as the reference takes it."""
    return {
        (layer, position): row.tolist()
        for layer, rows in routing.items()
        for position, row in enumerate(rows)
    }


def flips(routing: Routing, routed: dict[int, RoutedExperts]) -> list[tuple[int, int, float]]:
    """Return layer, position and gap of the scores, where the two chose differently."""
    found = []
    for layer, rows in routing.items():
        for position, (mine, its) in enumerate(zip(rows, routed[layer].chosen, strict=True)):
            if set(mine) != set(its):
                scores = routed[layer].scores[position]
                found.append((layer, position, float(scores[its].min() - scores[mine].min())))
    return found


def off(executor: FusedExecutor, want: NDArray[np.float64]) -> float:
    """Error of the logits of the last token, of their spread."""
    error = executor.wait_for_logits().astype(np.float64) - want
    return float(np.sqrt((error**2).mean()) / want.std())


def plant_tie(source: Path, path: Path, tokens: Sequence[int], gap: float) -> tuple[int, int]:
    """Copy a model whose last router then nearly ties for the last of `tokens`.

    Of the last expert taken and the first left, the second's score becomes the first's times
    1 - gap, by adding to its row one that has no product with what this token's router sees.
    Returns both experts. The router's rows are floats.
    """
    model = open_model(source)
    reference = Reference(model)
    reference.logits(tokens)
    layer = max(reference.routed)
    routed = reference.routed[layer]
    scores, used = routed.scores[-1], routed.chosen.shape[-1]
    order = np.argsort(-scores, kind="stable")
    taken, left, first, last = (int(order[i]) for i in (used - 1, used, 0, -1))
    path.write_bytes(source.read_bytes())
    tensor = model.tensors[f"blk.{layer}.ffn_gate_inp.weight"]
    rows = np.memmap(path, np.float32, "r+", tensor.offset, tensor.shape)
    wide = np.asarray(rows, np.float64)
    across = wide[first] * scores[last] - wide[last] * scores[first]
    across *= np.linalg.norm(wide[left]) / np.linalg.norm(across)
    rows[left] = wide[taken] * (1 - gap * np.sign(scores[taken])) + across
    rows.flush()
    return taken, left
