"""The accesses that compiled code tells of (`Told` of watch.h), to the checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .shadow import ChunkShadow, DoneStore

SPACES = {"g": "global", "s": "shared", "l": "local"}


def check_native_accesses(shadow: ChunkShadow, rows: Any) -> None:
    """Accesses and synchronizations, in order but for reads, which change nothing for others."""
    st = shadow.st
    kept = st.m, st.site, st.at
    for some in _iter_rows_by_instruction(rows):
        first = some[0]
        st.m, st.site = some["lane"], int(first["site"])
        st.at = st.launch.code.sites[st.site - 1] if st.site else None
        _check_rows_of_instruction(
            shadow, chr(first["what"]), SPACES.get(chr(first["space"]), ""), some
        )
    st.m, st.site, st.at = kept


def _iter_rows_by_instruction(rows: Any) -> Iterator[Any]:
    """Rows of one instruction, space and size each, by their first."""
    key = rows["site"].astype(np.uint64) << np.uint64(32) | rows["size"] << 16
    key |= rows["what"].astype(np.uint64) << np.uint64(8) | rows["space"]
    if (key == key[0]).all():
        yield rows
        return
    values, first = np.unique(key, return_index=True)
    for value in values[np.argsort(first)]:
        yield rows[key == value]


def _check_rows_of_instruction(shadow: ChunkShadow, what: str, space: str, rows: Any) -> None:
    """The work of some lanes with one instruction."""
    lanes, size = rows["lane"], int(rows[0]["size"])
    where = np.ascontiguousarray(rows["at"])
    if space in ("shared", "local"):
        where = where.view(np.int64)
    match what, space:
        case "r", "global":
            if not shadow.is_repeated_poll(where):
                shadow.check_global_access(where, size, "read")
                shadow.on_global_load(where, size)
        case "r", _:
            shadow.on_shared_or_local_load(space, where, size)
        case "w", "global":
            shadow.check_global_access(where, size, "write")
            shadow.on_global_store(where, size, rows["same"])
        case "w", _:
            shadow.on_shared_or_local_store(space, where, size, DoneStore(rows["same"]))
        case "a", "global":
            if not shadow.is_repeated_poll(where):
                shadow.check_global_access(where, size, "atomic")
                shadow.on_global_atomic(where, size)
        case "a", _:
            if not shadow.is_repeated_poll(where):
                shadow.on_shared_atomic(where, size)
        case "f", _:
            shadow.on_fence()
        case "m", _:
            shadow.on_warp_sync(lanes, where.astype(np.uint32))
        case "c", _:
            shadow.on_copy_begin(lanes, where, size)
        case "e", _:
            shadow.on_copy_end(where, size)
        case "b", _:
            shadow.on_copies_tied_to_mbarrier(lanes, where, size)
        case "p", _:
            shadow.on_copies_waited(lanes, shadow.st.threads)
        case "o", _:
            shadow.on_copies_waited(lanes, 1)
        case "x", _ if (instr := shadow.st.at) is not None:
            shadow.report_changed_copy_source(lanes, instr)
