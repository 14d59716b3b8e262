"""The GPU: a consumer thread that serves the channels, late and in an adversarial order if asked.

Channels of all TSGs are served round robin; one that waits for a semaphore or is held back by
`--delay` lets the others run. With a delay, grids run apart from the channel that launched them
(a release without WFI then races them, two independent launches may swap), blocks run in a drawn
order, and every draw comes from the seed.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import numpy as np

from ... import l2
from ...allocated_pieces import ALLOCATED_PIECES
from ...locks import GcPausingLock, WakeBell, pause_gc, resume_gc
from ...memory import MmuFault
from ...options import Options
from ...ptx import Launch
from ...ptx.sanitizer.sanitize import Sanitizer
from ..context_switch import SecondClient
from ..gpu_api import ChannelPort
from .faults import GpuFault, class_fault, ctxsw_timeout_fault
from .pbdma import Channel
from .programs import Program
from .qmd import SIZE, Qmd
from .ring_visibility import RingVisibility

POLL = 2e-4
"""Seconds between looks at semaphores that the CPU may write."""
KEPT_NOTES = 200


class ShaderCaches:
    """Instruction and constant caches of a GPU: kept until an invalidate, by address."""

    def __init__(self) -> None:
        self.code: dict[tuple[int, int], tuple[list[Program], bytes]] = {}
        self.constants: dict[tuple[int, int], bytes] = {}


class Gpu:
    """The execution side (nvgpusim.orin.gpu_api.Executor).

    `note` receives findings: behaviour that no hardware reports but that is a bug on it. Without
    one they go to stderr; `notes` keeps them.
    """

    def __init__(
        self,
        options: Options | None = None,
        *,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.options = options or Options()
        self.delay, self.tpcs = self.options.delay / 1e3, self.options.tpcs
        self.rng = np.random.default_rng(self.options.seed)
        l2.reset_board_l2(self.options.l2, self.options.seed)
        self.allocated = ALLOCATED_PIECES
        checks = self.options.watched_checks
        self.watch = Sanitizer(checks, self.allocated) if checks else None
        self.caches, self.order = ShaderCaches(), RingVisibility(self.options.order)
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.channels: dict[int, Channel] = {}
        self.current: Launch | None = None
        self.rival = SecondClient(self.options.second_client)
        self._note = note
        self._lock, self._busy, self._bell = GcPausingLock(), GcPausingLock(), WakeBell()
        self._closing = False
        self._thread: threading.Thread | None = None

    # what the kernel side calls

    def attach_channel(self, port: ChannelPort) -> None:
        """A channel is on the runlist."""
        with self._lock:
            self.channels[port.id] = Channel(self, port)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve_until_closed, name="nvgpusim-gpu", daemon=True
                )
                self._thread.start()

    def detach_channel(self, channel_id: int) -> None:
        """The channel is gone; returns when nothing of it runs any more."""
        with self._lock:
            channel = self.channels.pop(channel_id, None)
        if channel is None:
            return
        channel.stop = True
        if threading.current_thread() is not self._thread:
            with self._busy:
                channel.alive = False
                channel.steps = None
                channel.inflight.clear()

    def ring_doorbell(self, token: int) -> None:
        """A doorbell: note what was published and wake the consumer."""
        with self._lock:
            for channel in self.channels.values():
                if channel.port.token == token and channel.alive:
                    first = channel.known_put
                    channel.on_doorbell()
                    self.order.on_doorbell(channel, first, channel.known_put)
        self._bell.ring()

    def is_idle(self) -> bool:
        """True if nothing can make progress without the client."""
        with self._busy:
            return not any(self._is_runnable(c) for c in self._live_channels())

    def wait_until_idle(self, timeout: float) -> None:
        """Wait until idle; raises TimeoutError."""
        end = time.monotonic() + timeout
        while not self.is_idle():
            if time.monotonic() > end:
                states = [
                    f"channel {c.port.id}: {c.waiting or 'running'}" for c in self._live_channels()
                ]
                waiting = "; ".join(states)
                raise TimeoutError(f"the GPU is not idle after {timeout} s: {waiting}")
            time.sleep(POLL)

    def stop_threads(self) -> None:
        """Stop the consumer."""
        with self._lock:
            self._closing = True
            for channel in self.channels.values():
                channel.stop = True
        self._bell.ring()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._thread = None

    def statistics(self) -> dict[str, int]:
        """Counters of the run."""
        found = dict(self.counts) | {"findings": self.counts["findings"]}
        return found | ({"simulated ms": int(self.rival.now_ms)} if self.rival.grid_ms else {})

    def on_barrier(self) -> None:
        """The client executed a barrier strong enough for the GPU."""
        if self.order.on:
            with self._lock:
                self.order.on_barrier(list(self.channels.values()))

    # what channels ask

    def note_finding(self, text: str) -> None:
        """A finding."""
        self.counts["findings"] += 1
        if len(self.notes) < KEPT_NOTES:
            self.notes.append(text)
            if self._note is not None:
                self._note(text)
            else:
                print(f"nvgpusim: finding: {text}", file=sys.stderr)

    def add_to_counter(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] += by

    def random_delay_end(self) -> float:
        """Until when to hold something back (time.monotonic), 0.0 for not at all."""
        if not self.delay:
            return 0.0
        x, y = self.rng.random(2)
        wait = 0.0 if x < 0.25 else self.delay if x > 0.75 else self.delay * y
        return time.monotonic() + wait

    def charge_switches_or_raise(self, channel: Channel, waves: list[int]) -> None:
        """A chain of grids has run, the second client takes its turn; raises GpuFault."""
        if not self.rival.grid_ms:
            return
        ports = [c.port for c in self._live_channels()]
        budgets = [port.budget for port in ports if port.tsg_id == channel.port.tsg_id]
        if self.rival.charge_switch_exceeds_limit(channel.port.context, waves, budgets):
            spent, limit = channel.port.budget.spent_ms, channel.port.budget.limit_ms
            raise ctxsw_timeout_fault(
                f"{spent} ms of context switches in sum, more than {limit} ms, with compute "
                f"preemption mode {channel.port.context.compute}; now "
                f"{self.rival.now_ms / 1000:.0f} s"
            )

    def block_order_seed(self) -> int:
        """Seed of the order in which blocks start: CUDA promises none, so it is always drawn.

        Without delays it stays the same, so that the memory of a kernel's chunks is used again.
        """
        return int(self.rng.integers(1 << 31)) if self.delay else self.options.seed

    def warp_order_seed(self) -> int | None:
        """Seed of a drawn order of warps, None to run them in step."""
        return int(self.rng.integers(1 << 31)) if self.options.warps else None

    def random_first_tpc(self) -> int:
        """TPC of a chunk's first block."""
        return int(self.rng.integers(self.tpcs))

    def is_local_memory_in_use(self, channel: Channel) -> bool:
        """True if a grid of the channel's TSG may be using local memory."""
        return any(
            c.inflight for c in self._live_channels() if c.port.tsg_id == channel.port.tsg_id
        )

    def write_qmd_back(self, channel: Channel, qmd: Qmd) -> None:
        """SKED's cached copy goes back to memory."""
        try:
            view = channel.vm.view_bytes(qmd.va, SIZE, "write")
        except MmuFault:
            return
        if bytes(view) != qmd.data:
            self.note_finding(
                f"QMD {qmd.va:#x} was rewritten before SKED wrote its copy back: "
                f"the new one is lost"
            )
        view[:] = qmd.data

    # the consumer

    def _live_channels(self) -> list[Channel]:
        return [c for c in list(self.channels.values()) if c.alive and c.port.alive]

    def _is_runnable(self, channel: Channel) -> bool:
        if not channel.port.enabled or not channel.has_work():
            return False
        return bool(channel.inflight) or not channel.blocked

    def _serve_until_closed(self) -> None:
        while not self._closing:
            pause_gc()  # the client's finalizers run on its own threads
            try:
                with self._busy:
                    progress = self._try_to_advance_channels()
                waiting = any(c.has_work() for c in self._live_channels())
            finally:
                resume_gc()
            if not progress:
                self._bell.wait_for_ring(POLL if waiting else 0.05)

    def _try_to_advance_channels(self) -> bool:
        """Serve every channel once; returns whether anything moved."""
        progress = False
        for channel in self._live_channels():
            if not channel.port.enabled:
                continue
            try:
                progress |= self._try_to_advance_grid(channel)
                progress |= self._try_to_advance_ring(channel)
            except GpuFault as e:
                self._kill_tsg(channel, e)
            except Exception as e:  # a fault of ours must not look like a hang of theirs
                traceback.print_exc()
                self._kill_tsg(channel, class_fault(f"the simulator failed: {e!r}"))
        return progress

    def _try_to_advance_grid(self, channel: Channel) -> bool:
        """Advance one grid of the channel, any of them."""
        if not channel.inflight:
            return False
        n = int(self.rng.integers(len(channel.inflight)))
        grid = channel.inflight[n]
        try:
            return next(grid) == "more"
        except StopIteration:
            channel.inflight.remove(grid)
            return True

    def _try_to_advance_ring(self, channel: Channel) -> bool:
        """Advance the channel's own methods."""
        if channel.steps is None:
            if channel.visible_gpput == channel.get:
                return False
            channel.steps = channel.consume_entries()
        try:
            state = next(channel.steps)
        except StopIteration:
            channel.steps = None
            return True
        channel.blocked = state == "blocked"
        return state == "more"

    def _kill_tsg(self, channel: Channel, fault: GpuFault) -> None:
        """The driver recovers the engine: every channel of the TSG is dead."""
        if channel.stop:  # closed while it ran
            channel.alive = False
            channel.steps = None
            channel.inflight.clear()
            return
        for other in self._live_channels():
            if other.port.tsg_id == channel.port.tsg_id:
                other.alive = False
                other.steps = None
                other.inflight.clear()
        self.add_to_counter("faults")
        for name, value in channel.fault_details().items():
            fault.report.details.setdefault(name, value)  # a grid's launch may be an older entry
        channel.port.fail(fault.report)
