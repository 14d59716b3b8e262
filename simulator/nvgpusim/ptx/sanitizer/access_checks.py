"""Findings in words, ends of buffers, and global memory that nobody has written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...allocated_pieces import WORD, AllocatedPiece
from ..parser.syntax import Instr, Vec, register_numbers
from ..state import ChunkState, Lanes
from .clocks import LaneClocks, SanitizerProtocol
from .records import AccessRecords


def instruction_text(instr: Instr | None) -> str:
    """Describe an instruction's position."""
    if instr is None:
        return "unknown instruction"
    source = f", {instr.source[0]}:{instr.source[1]}" if instr.source else ""
    return f"PTX line {instr.line}: {instr.text}{source}"


def mask_of_used_bytes(instr: Instr, instrs: list[Instr], total: int) -> NDArray[np.bool_]:
    """Select the bytes of an instruction's access that the kernel uses.

    NVRTC makes one aligned load of four of two that have three, and never looks at the fourth.
    """
    if instr.op not in ("ld", "ldu") or not isinstance(instr.args[0], Vec):
        return np.ones(total, bool)
    items = instr.args[0].items
    elsewhere = {
        reg
        for other in instrs
        if other is not instr
        for arg in (*other.args, other.guard)
        for reg in register_numbers(arg)
    }
    used = np.array([not elsewhere.isdisjoint(register_numbers(item)) for item in items])
    return np.repeat(used, total // len(items))


class AccessChecks(LaneClocks):
    """Accesses beside an allocation or before a first write, and the wording of findings."""

    init = bounds = True

    def __init__(self, owner: SanitizerProtocol, st: ChunkState) -> None:
        super().__init__(owner, st)
        self.pieces: dict[int, AllocatedPiece] = {}

    def site_text(self, site: int, verb: str) -> str:
        """An instruction by its number."""
        sites = self.launch.code.sites
        if not 0 < site <= len(sites):
            return verb
        return f"{verb} ({instruction_text(sites[site - 1])})"

    def add_finding(self, kind: str, key: Any, text: str) -> None:
        """A finding, once for each pair of instructions."""
        name = self.launch.code.kernel.name
        self.launch.findings.setdefault(f"{kind} {key}", f"{name}: {kind}: {text}")

    def thread_text(self, gid: int) -> str:
        """Block and thread by global number."""
        return self.launch.thread_text(gid // self.st.threads, gid % self.st.threads)

    def lane_text(self, lane: int) -> str:
        """Block and thread of a lane."""
        return self.thread_text(int(self.gid[lane]))

    def on_heap_free(self) -> None:
        """A kernel has freed memory: pieces that accesses remember may be gone."""
        self.pieces.clear()
        AccessRecords.shapes += 1

    def check_global_access(self, where: Any, total: int, access: str) -> None:
        """A global access of the active lanes: ends of buffers, reads of what nobody wrote."""
        addr, lanes = where, self.st.active_lanes()
        low, high = int(addr.min()), int(addr.max()) + total
        piece = self.pieces.get(self.st.site)
        if piece is None or not piece.va <= low < piece.end:
            piece = self.o.piece_at(low)
            if piece is not None:
                self.pieces[self.st.site] = piece
        if piece is not None and high <= piece.end:
            self._check_or_mark_written(piece, lanes, addr, total, access)
            return
        mapping = self.o.mapping_at(low)
        whole = mapping is not None and high <= mapping.end
        if whole and not self.o.allocated.ever_had_piece_in(mapping.va, mapping.end):
            self._check_driver_sized_buffer(lanes, where, total, access, mapping)
            return
        left = np.arange(len(where))
        while len(left):
            va = int(where[left[0]])
            piece = self.o.piece_at(va)
            if piece is None or va + total > piece.end:
                self._report_outside_access(int(lanes[left[0]]), va, total, access)
                beyond = piece.end if piece is not None else self.o.allocated.next_piece_start(va)
                gone = (where[left] >= where[left[0]]) & (
                    where[left] < np.uint64(max(beyond, va + 1))
                )
                left = left[~gone]
                continue
            here = (where[left] >= piece.va) & (where[left] + np.uint64(total) <= piece.end)
            inside = left[here]
            self._check_or_mark_written(piece, lanes[inside], where[inside], total, access)
            left = left[~here]

    def _check_driver_sized_buffer(
        self, lanes: Lanes, where: Any, total: int, access: str, mapping: Any
    ) -> None:
        """A buffer of which only the driver knows the size."""
        asked = mapping.va - mapping.buf_offset + mapping.buf.asked
        over = where + np.uint64(total) > asked
        if self.bounds and over.any():
            n = int(np.flatnonzero(over)[0])
            va = max(int(where[n]), asked)
            what = f"{va:#x} is {va - asked} bytes after the end of {mapping.buf!r}"
            self._report_access("bounds", int(lanes[n]), total, access, what)

    def _report_outside_access(self, lane: int, va: int, total: int, access: str) -> None:
        mapping = self.o.mapping_at(va)
        if mapping is None or not self.bounds:
            return  # the MMU says it, or nobody asked
        kind, what = self.o.allocated.miss_kind_and_text(va, self.o.now)
        if not self.o.allocated.ever_had_piece_in(mapping.va, mapping.end) and kind != "free":
            one = np.array([va], np.uint64)
            self._check_driver_sized_buffer(np.array([lane]), one, total, access, mapping)
            return
        last = self.o.piece_at(va)
        if last is not None:
            if access == "read" and not self.used_byte_mask(total)[last.end - va :].any():
                return
            kind, what = "bounds", f"{last.end:#x} is right after the end of {last}"
        self._report_access(kind, lane, total, access, what)

    def used_byte_mask(self, total: int) -> NDArray[np.bool_]:
        """Select the bytes of the current access that the kernel uses."""
        code = self.launch.code
        if not 0 < self.st.site <= len(code.sites):
            return np.ones(total, bool)
        return mask_of_used_bytes(code.sites[self.st.site - 1], code.kernel.instrs, total)

    def _report_access(self, kind: str, lane: int, total: int, access: str, what: str) -> None:
        place = self.site_text(self.st.site, access)
        self.add_finding(
            kind,
            self.st.site,
            f"{place} of {total} bytes by {self.lane_text(lane)}: {what}",
        )

    def _check_or_mark_written(
        self, piece: AllocatedPiece, lanes: Lanes, addr: Any, total: int, access: str
    ) -> None:
        if piece.wrote is None or not self.init:
            return
        first = ((addr - np.uint64(piece.va)) // np.uint64(WORD)).astype(np.int64)
        index = first[:, None] + np.arange(max(1, total // WORD))
        if access == "write":
            piece.wrote[index] = True
            return
        known = piece.wrote[index]
        if not known.all() and access == "read" and total > WORD:
            known |= ~self.used_byte_mask(total).reshape(-1, WORD).any(1)
        if not known.all():
            n = int(np.flatnonzero(~known.all(1))[0])
            lane = int(lanes[n])
            self.add_finding(
                "init",
                self.st.site,
                f"{self.site_text(self.st.site, access)} of +{int(first[n]) * WORD} in {piece} by "
                f"{self.lane_text(lane)}: nobody has written it",
            )
        if access == "atomic":
            piece.wrote[index] = True
