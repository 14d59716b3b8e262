"""Sliding windows: which layers have one."""

import numpy as np

from orinllm.arch.header import Header
from orinllm.errors import BadInput


def windows_of(header: Header, pattern: int) -> tuple[int, ...]:
    """Return the window of each layer in tokens, 0 where it sees everything.

    The file's pattern is an array, true for layers with a window, or a number n: every n-th layer
    has none. `pattern` is that of files without the key.
    """
    layers = header.n_layers
    window = header.count("attention.sliding_window", 0, least=0)
    if window == 0:
        return (0,) * layers
    given = header.get("attention.sliding_window_pattern", pattern)
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        local = [given == 0 or index % given < given - 1 for index in range(layers)]
    else:
        local = [bool(item) for item in np.asarray(given).reshape(-1)]
    if len(local) < layers:
        raise BadInput(
            f"{header.architecture}.attention.sliding_window_pattern has {len(local)} entries; "
            f"{layers}, one a layer, were expected"
        )
    return tuple(window if is_local else 0 for is_local in local[:layers])
