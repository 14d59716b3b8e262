"""The fault where C cannot go on: with an access, or with lanes that are to act together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..memory import Access, MmuFault
from .native.tensor import wmma_matrix_shape
from .operands import InstructionInKernel, state_space
from .parser.syntax import Instr
from .spaces import raise_if_access_wrong
from .state import ChunkState, KernelFault, Lanes
from .translate import MASKED, WHOLE


def instruction_in_kernel(st: ChunkState, instr: Instr) -> InstructionInKernel:
    """An instruction with what is known of its kernel."""
    return InstructionInKernel(instr, st.launch.code.kernel, st.launch.code.module)


def lane_access_size(site: InstructionInKernel) -> int:
    """Bytes of an access of a lane."""
    if site.i.op == "cp":
        return site.integer_literal_or_none(2) or 8
    if site.i.op in ("mbarrier", "ldmatrix"):
        return 16 if site.i.op == "ldmatrix" else 8
    if site.i.op == "wmma":
        return wmma_matrix_shape(site)[2]
    return site.type.bits // 8 * next((int(m[1:]) for m in site.mods if m in ("v2", "v4", "v8")), 1)


def access_kind(instr: Instr) -> Access:
    """The access that an instruction makes."""
    if instr.op == "st" or (instr.op == "wmma" and "store" in instr.mods):
        return "write"
    return "atomic" if instr.op in ("atom", "red") else "read"


def access_fault(st: ChunkState, instr: Instr, lane: int, at: int, copied: bool) -> Exception:
    """The fault of a lane's access to an address; `copied`: of cp.async the source."""
    site, st.m = instruction_in_kernel(st, instr), np.array([lane])
    space, where = state_space(site), np.array([at], np.uint64)
    if instr.op in ("cp", "mbarrier"):
        space = "global" if copied else "shared"
    if instr.op == "ldmatrix" and space == "generic":
        where -= np.uint64(st.launch.shared_window)
    space = "shared" if instr.op == "ldmatrix" else space
    st.fault_mask = None
    try:
        raise_if_access_wrong(st, space, where, lane_access_size(site), access_kind(instr))
    except (KernelFault, MmuFault) as e:
        st.add_fault_place(e, instr)
        return e
    fault = KernelFault(
        0, f"no access of {lane_access_size(site)} bytes to {at:#x} ({space}) is possible"
    )
    st.add_fault_place(fault, instr)
    return fault


def raise_if_lanes_missing(st: ChunkState, instr: Instr) -> None:
    """Look at the lanes that are to do something together. Raises KernelFault."""
    kept, st.m = st.m, st.lanes_passing_guard(instr)
    try:
        st.at = instr
        if instr.op in WHOLE:
            require_whole_warps(st)
        elif instr.op in MASKED and ("sync" in instr.mods or instr.op in ("match", "redux")):
            masks = st.active_operand_values(instr.args[MASKED[instr.op]], 32)
            require_valid_membermasks(st, masks)
    except KernelFault as e:
        st.add_fault_place(e, instr)
        raise
    finally:
        st.m = kept


# lanes of a warp


def warp_ballot(st: ChunkState, flag: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Per active lane: bits of the active lanes of its warp whose flag is set."""
    warp = st.warp[st.active_lanes()]
    bits = np.where(flag, np.uint32(1) << st.lane[st.active_lanes()], np.uint32(0))
    return np.bincount(warp, bits).astype(np.uint32)[warp]  # no bit is there twice


def require_valid_membermasks(st: ChunkState, masks: NDArray[np.uint32]) -> None:
    """Trap a membermask that misses the executing lane or names one that is not here; note lanes
    that name each other with other masks."""
    lanes = st.active_lanes()
    missing_own = (masks & np.uint32(1) << st.lane[lanes]) == 0
    if missing_own.any():
        lane = int(np.flatnonzero(missing_own)[0])
        raise KernelFault(0, f"membermask {int(masks[lane]):#x} misses the executing lane", lane)
    alive = st.launch.warp_alive_masks(st)
    missing = masks & ~warp_ballot(st, np.ones(len(lanes), bool)) & alive
    if missing.any():
        lane = int(np.flatnonzero(missing)[0])
        raise KernelFault(
            0,
            f"membermask {int(masks[lane]):#x} names lanes {int(missing[lane]):#x} that do not "
            f"execute this instruction together with it",
            lane,
        )
    same = np.zeros(len(lanes), np.uint32)
    for mask in np.unique(masks):
        here = masks == mask
        same[here] = warp_ballot(st, here)[here]
    other = masks & ~same & alive
    if other.any():
        lane = int(np.flatnonzero(other)[0])
        what = (
            f"sync: membermask {int(masks[lane]):#x} names lanes {int(other[lane]):#x} that "
            f"give another membermask (undefined)"
        )
        st.launch.add_finding(st, what, f", {st.thread_text(lane)}")


def require_whole_warps(st: ChunkState) -> None:
    """Trap a warp-wide instruction that not all 32 threads of each warp execute."""
    lanes: Lanes = st.active_lanes()
    ok = len(lanes) % 32 == 0
    if ok:
        rows = lanes.reshape(-1, 32)
        ok = bool((rows == rows[:, :1] + np.arange(32)).all() and (st.lane[rows[:, 0]] == 0).all())
    if not ok:
        raise KernelFault(0, "a warp-wide instruction is not executed by all 32 threads of a warp")
