"""CPU mappings by address: the same answers as a table of pages, at a cost that does not grow."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.kernel import rawclient as rc
from tests.simulator.kernel.rawclient import Board

from nvgpusim.memory import DmaBuf
from nvgpusim.orin.kernel import Kernel
from nvgpusim.orin.kernel.client_memory import CpuMapping, CpuMappings

PAGES = st.tuples(st.integers(0, 40), st.integers(1, 12))


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), PAGES), max_size=40))
def test_a_table_of_pages(acts: list[tuple[bool, tuple[int, int]]]) -> None:
    maps, table = CpuMappings(), dict[int, int]()
    for number, (enter, (start, size)) in enumerate(acts):
        end = start + size
        before = {table[page] for page in range(start, end) if page in table}
        gone, left = maps.clear_range(start, end)
        assert {cast("int", m.what) for m in gone} == before
        assert all(m.end <= start or end <= m.start for m in left)
        assert sum(m.end - m.start for m in gone) - sum(m.end - m.start for m in left) == sum(
            page in table for page in range(start, end)
        )
        for page in range(start, end):
            table.pop(page, None)
        if enter:
            maps.add_mapping(CpuMapping(start, end, cast("DmaBuf", number)))
            table |= dict.fromkeys(range(start, end), number)
        assert {
            page: cast("int", m.what) for page in range(60) if (m := maps.mapping_at(page))
        } == table
        maps.check_and_count_mappings()


def steps(act: Callable[[], object]) -> int:
    """Bytecode instructions that the model executes for `act`."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if "nvgpusim" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(old)
    return count


def test_a_buffer_costs_the_same_beside_hundreds(kernel: Kernel) -> None:
    board = Board()

    def one() -> None:
        board.drop(board.buffer(4096))

    pages = ctypes.addressof(host := (ctypes.c_ubyte * (402 * 4096))()) // 4096 * 4096 + 4096
    one()
    few = steps(one)
    buffers = [board.buffer(4096) for _ in range(400)]
    for page in range(0, 400 * 4096, 4096):
        kernel.nvmap.back_with_client_pages(kernel.nvmap.create_handle(4096).buf, pages + page)
    assert steps(one) < 1.2 * few
    pins = [handle.buf for handle in kernel.nvmap.handles.values()]
    host[:] = [5] * len(host)
    kernel.on_unmapped(pages + 4096, 8192)
    assert [n for n, buf in enumerate(pins) if buf.pinned is None] == [1, 2]
    host[:] = [6] * len(host)
    assert [pins[n].memory_view[0] for n in range(4)] == [6, 5, 5, 6]
    hole = buffers[200]
    rc.do_munmap(hole.cpu, 4096)
    assert kernel.cpu_maps.mapping_at(hole.cpu) is None
    assert kernel.cpu_maps.mapping_at(buffers[201].cpu) is not None
