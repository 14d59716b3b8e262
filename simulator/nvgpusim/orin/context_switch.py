"""Context switches to another client of the GPU, and what nvgpu counts of those that take long.

Hardware interrupts when a switch is not done after 100 ms, and again every 100 ms. nvgpu adds them
up for each channel, and kills the TSG when one of its channels exceeds its limit. nvgpu cannot see
the progress of a channel with usermode submits, so that sum never goes back to zero
[channel.c:720-748, tsg.c:1076-1137, ctxsw_timeout_ga10b_fusa.c:98 and 280; jetson_36.4.3, the same
at l4t-r35.6.0 channel.c:674]. The preemption mode decides how long a switch takes.

Time here is simulated: a grid takes as many milliseconds as `--second-client` says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PERIOD_MS = 100
"""CTXSW_TIMEOUT_PERIOD_MS [include/nvgpu/fifo.h:222]."""
LIMIT_MS = 3000
"""NVGPU_DEFAULT_POLL_TIMEOUT_MS, a channel's first limit [include/nvgpu/defaults.h:39]."""
WFI, CTA, CILP = 1, 2, 4
"""NVGPU_COMPUTE_PREEMPTION_MODE_*: wait for idle, between blocks, between instructions."""
SAVE_MS = 1.0
"""Time given to saving a context: registers and shared memory of 16 SMs are 6.6 MiB."""


@dataclass
class TsgPreemption:
    """The GR context of a TSG: its compute preemption mode, 0 until ALLOC_OBJ_CTX makes it WFI.

    [gr_init_gp10b_fusa.c:337]
    """

    compute: int = 0


@dataclass
class SwitchTimeBudget:
    """A channel's sum of context switch timeouts; both are u32 milliseconds in nvgpu."""

    limit_ms: int = LIMIT_MS
    spent_ms: int = 0

    def charge_exceeds_limit(self, interrupts: int) -> bool:
        """Count `interrupts`; returns whether the limit is exceeded."""
        self.spent_ms = self.spent_ms + PERIOD_MS * interrupts & 0xFFFFFFFF
        return self.spent_ms > self.limit_ms


class SecondClient:
    """Another process that always has work: it asks for the GPU during each chain of grids."""

    def __init__(self, grid_ms: float) -> None:
        self.grid_ms = grid_ms
        self.now_ms = 0.0

    def longest_switch_ms(self, mode: int, waves: list[int]) -> float:
        """Longest that a switch waits for a chain of grids, each with its number of waves.

        WFI waits for the chain, as the front end goes on with a dependent QMD; CTA for the blocks
        that run; CILP stops them.
        """
        if mode == CILP:
            return SAVE_MS
        if mode == CTA:
            return SAVE_MS + self.grid_ms / min(waves)
        return SAVE_MS + self.grid_ms * len(waves)

    def charge_switch_exceeds_limit(
        self, context: TsgPreemption, waves: list[int], budgets: Iterable[SwitchTimeBudget]
    ) -> bool:
        """A chain has run; returns whether nvgpu kills its TSG."""
        self.now_ms += self.grid_ms * len(waves)
        interrupts = int(self.longest_switch_ms(context.compute, waves) // PERIOD_MS)
        exceeded = False
        for budget in budgets:
            exceeded |= budget.charge_exceeds_limit(interrupts)
        return exceeded
