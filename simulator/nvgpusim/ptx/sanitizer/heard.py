"""The accesses that compiled code tells of (`Told` of watch.h), to the checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .shadow import Shadow, Written

SPACES = {"g": "global", "s": "shared", "l": "local"}


def heard(shadow: Shadow, rows: Any) -> None:
    """Accesses and synchronizations, in order but for reads, which change nothing for others."""
    st = shadow.st
    kept = st.m, st.site, st.at
    for some in _alike(rows):
        first = some[0]
        st.m, st.site = some["lane"], int(first["site"])
        st.at = st.launch.code.sites[st.site - 1] if st.site else None
        _one(shadow, chr(first["what"]), SPACES.get(chr(first["space"]), ""), some)
    st.m, st.site, st.at = kept


def _alike(rows: Any) -> Iterator[Any]:
    """Rows of one instruction, space and size each, by their first."""
    key = rows["site"].astype(np.uint64) << np.uint64(32) | rows["size"] << 16
    key |= rows["what"].astype(np.uint64) << np.uint64(8) | rows["space"]
    if (key == key[0]).all():
        yield rows
        return
    values, first = np.unique(key, return_index=True)
    for value in values[np.argsort(first)]:
        yield rows[key == value]


def _one(shadow: Shadow, what: str, space: str, rows: Any) -> None:
    """The work of some lanes with one instruction."""
    lanes, size = rows["lane"], int(rows[0]["size"])
    where = np.ascontiguousarray(rows["at"])
    if space in ("shared", "local"):
        where = where.view(np.int64)
    match what, space:
        case "r", "global":
            if not shadow.is_repeat(where):
                shadow.reach(where, size, "read")
                shadow.global_load(where, size)
        case "r", _:
            shadow.load(space, where, size)
        case "w", "global":
            shadow.reach(where, size, "write")
            shadow.global_store(where, size, rows["same"])
        case "w", _:
            shadow.store(space, where, size, Written(rows["same"]))
        case "a", "global":
            if not shadow.is_repeat(where):
                shadow.reach(where, size, "atomic")
                shadow.global_atomic(where, size)
        case "a", _:
            if not shadow.is_repeat(where):
                shadow.atomic(where, size)
        case "f", _:
            shadow.fence()
        case "m", _:
            shadow.warp_sync(lanes, where.astype(np.uint32))
        case "c", _:
            shadow.copy_begins(lanes, where, size)
        case "e", _:
            shadow.copy_ends(where, size)
        case "b", _:
            shadow.copies_bound(lanes, where, size)
        case "p", _:
            shadow.waited(lanes, shadow.st.threads)
        case "o", _:
            shadow.waited(lanes, 1)
        case "x", _ if (instr := shadow.st.at) is not None:
            shadow.source_changed(lanes, instr)
