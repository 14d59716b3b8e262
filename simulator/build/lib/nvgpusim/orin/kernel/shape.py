"""The shape of ga10b: its processors, as many as the board enables, and its runlists."""

from __future__ import annotations

from ...options import Options

MAX_GPCS, TPCS_PER_GPC, SMS_PER_TPC = 2, 4, 2
GR_RUNLIST = 0
RUNLISTS = {0: (0, 0), 1: (2, 0), 2: (2, 1)}
"""Active runlists: (engine id, instance); 0 GR, 2 asynchronous copy engines."""


class GpuShape:
    """The enabled TPCs of the 2 x 4."""

    def __init__(self, options: Options) -> None:
        low = min(options.tpcs, TPCS_PER_GPC)
        counts = [low, options.tpcs - low]
        self.tpc_masks = [(1 << n) - 1 for n in counts]
        self.gpc_mask = sum(1 << i for i, n in enumerate(counts) if n)
        self.sms = options.sms
