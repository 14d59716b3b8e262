# ruff: noqa: E501 - tables of cases stay one case a line
"""Launches: real sm_87 code at its address, QMD checks, banks, spaces, chains, releases."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.simulator.gpu.rig import (
    FRESH,
    LOCAL_WINDOW,
    PER_TPC,
    SECTIONS,
    SHARED_WINDOW,
    SLM,
    Rig,
    inc,
    launch,
    u32,
    u64,
)

from nvgpusim.orin.gpu.faults import SKED_BITS
from nvgpusim.ptx.launch import Launch
from nvgpusim.ptx.state import ChunkState


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(channels=2)
    made.setup()
    yield made
    made.close()


def test_vector_add(rig: Rig) -> None:
    n = 5000
    a, b, out = (rig.alloc(4 * n) for _ in range(3))
    rng = np.random.default_rng(1)
    rig.at(a, n, np.float32)[:] = rng.normal(size=n)
    rig.at(b, n, np.float32)[:] = rng.normal(size=n)
    qmd = rig.qmd("k_add", u64(out, a, b) + u32(n), (20, 1, 1), (256, 1, 1))
    rig.release(qmd, 5)
    rig.submit([*FRESH, *launch(qmd)])
    rig.done()
    want = rig.at(a, n, np.float32) + rig.at(b, n, np.float32)
    assert (rig.at(out, n, np.float32) == want).all()
    assert rig.at(rig.signal, 2)[0] == 5
    assert rig.at(rig.signal, 2, np.uint64)[1] > 0
    stats = rig.gpu.statistics()
    assert stats["launches"] == 1
    assert stats["instructions"] > 20 * 256 * 5


def test_blocks_start_in_a_drawn_order_as_many_as_the_sms_hold(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No option asks for it: CUDA promises no order, so no kernel may lean on one."""
    started: list[list[int]] = []
    chunk = Launch.make_chunk_state

    def noted(self: Launch, ids: NDArray[np.int64], threads: int) -> ChunkState:
        started.append(ids.tolist())
        return chunk(self, ids, threads)

    monkeypatch.setattr(Launch, "make_chunk_state", noted)
    blocks = 100
    a, b, out = (rig.alloc(4 * 256 * blocks) for _ in range(3))
    rig.at(a, 256 * blocks, np.float32)[:] = 7
    qmd = rig.qmd("k_add", u64(out, a, b) + u32(256 * blocks), (blocks, 1, 1), (256, 1, 1))
    rig.submit([*FRESH, *launch(qmd)])
    rig.done()
    assert (rig.at(out, 256 * blocks, np.float32) == 7).all()
    order = [block for wave in started for block in wave]
    assert sorted(order) == list(range(blocks)) != order
    # 48 warps an SM, 8 a block [CUDA guide, compute capability 8.7], on all of the board's SMs;
    # a chunk takes no more than 16384 threads at a time.
    assert max(map(len, started)) == min(6 * 2 * rig.gpu.tpcs, 64)


def test_bank_size_in_bytes_is_sixteen_times_too_large(rig: Rig) -> None:
    """tinygrad writes bytes where the field counts 16 bytes: right up to 4096 bytes."""
    out = rig.alloc(256)
    qmd = rig.qmd("k_set", u64(out) + u32(7, 32), b1087_1075=0x160 + 16)
    rig.submit(launch(qmd))
    rig.done()
    assert (rig.at(out, 32) == 7).all()


def test_dimensions_come_from_bank_0(rig: Rig) -> None:
    out = rig.alloc(256)
    rig.at(out, 4)[:] = 99
    qmd = rig.qmd("k_dims", u64(out), block=(32, 2, 1), grid=(3, 1, 1))
    rig.submit(launch(qmd))
    rig.done()
    assert rig.at(out, 4).tolist() == [0, 0, 0, 0]
    rig.at(qmd - 4096, 6)[:] = [32, 2, 1, 3, 4, 1]
    rig.submit(launch(qmd))
    rig.done()
    assert rig.at(out, 4).tolist() == [32, 2, 3, 4]


def test_chain_runs_in_order(rig: Rig) -> None:
    out = rig.alloc(256)
    entry = rig.load("k_bump")
    qmds = [rig.qmd("k_bump", u64(out), entry=entry) for _ in range(5)]
    for first, second in pairwise(qmds):
        rig.depend(first, second)
    rig.release(qmds[-1], 3)
    rig.release(qmds[-1], 4, slot=1, address=rig.signal + 32)
    rig.submit(launch(qmds[0]))
    rig.done()
    assert (rig.at(out, 32) == 31).all()
    assert rig.at(rig.signal, 1)[0] == 3
    assert rig.at(rig.signal + 32, 1)[0] == 4
    assert rig.gpu.statistics()["launches"] == 5


def test_local_memory_lives_in_the_backing_buffer(rig: Rig) -> None:
    out, pick = rig.alloc(64 * 4 * 20), rig.alloc(1024)
    rounds = 50
    rig.at(pick, 64)[:] = np.random.default_rng(2).integers(0, 1 << 32, 64, dtype=np.uint32)
    qmd = rig.qmd("k_local", u64(out, pick) + u32(rounds), (20, 1, 1), (64, 1, 1))
    rig.submit(launch(qmd))
    rig.done()
    assert rig.at(rig.local, PER_TPC // 4).any(), "threads have written to the buffer"
    for i in (0, 63, 64, 1279):
        v = [i * 32 + k for k in range(32)]
        for r in range(rounds):
            a, b = (int(x) & 31 for x in rig.at(pick, 64)[r : r + 2])
            v[a], v[b] = v[b] + 1, v[a]
            if a == b:
                v[a] = v[a]
        total = 0
        for k in range(32):
            total = (total * 31 + v[k]) & 0xFFFFFFFF
        assert rig.at(out, 1280)[i] == total


def test_generic_addresses_are_redirected(rig: Rig) -> None:
    """F5: a generic access inside the shared window reads shared memory, not the buffer."""
    out, data = rig.alloc(256), rig.alloc(256)
    rig.at(data, 32)[:] = 5
    rig.submit(launch(rig.qmd("k_generic", u64(out, data))))
    rig.done()
    assert rig.at(out, 32).tolist() == [136 - n for n in range(32)]
    rig.submit(launch(rig.qmd("k_generic", u64(out, SHARED_WINDOW + 0x400))))
    rig.done()
    assert rig.at(out, 32).tolist() == [231] * 32


@pytest.mark.parametrize("window", [SHARED_WINDOW, LOCAL_WINDOW])
def test_global_access_in_a_window_is_trapped(rig: Rig, window: int) -> None:
    """F5: invalid address space."""
    at = rig.alloc(4096, window + (2 << 20))
    rig.submit(launch(rig.qmd("k_global", u64(at))))
    report = rig.fault()
    assert report.code == 13
    assert report.sm[0].warp_esr == 0x10
    assert "invalid address space" in report.title
    assert report.details["kernel"] == "k_global"
    assert "thread (0, 0, 0)" in report.details["thread"]
    assert "ld.global.u32" in report.details["thread"]


def test_misaligned_vector(rig: Rig) -> None:
    """F9: ld.v4.f32 needs 16 bytes."""
    data, out = rig.alloc(4096), rig.alloc(4096)
    rig.at(data, 128, np.float32)[:] = np.arange(128)
    rig.submit(launch(rig.qmd("k_vector", u64(out, data))))
    rig.done()
    assert rig.at(out, 4, np.float32).tolist() == [3, 2, 1, 0]
    entry = rig.load("k_vector")
    rig.submit(launch(rig.qmd("k_vector", u64(out, data + 8), entry=entry)))
    report = rig.fault()
    assert (report.sm[0].warp_esr, report.sm[0].warp_esr_pc) == (0xF, entry)
    assert report.details["address"] == f"{data + 8:#x}"


def test_unmapped_access_names_thread_and_history(rig: Rig) -> None:
    """F10, F13: the page table decides."""
    at = rig.alloc(4096)
    rig.unmap(at)
    qmd = rig.qmd("k_bump", u64(at))
    rig.submit(launch(qmd))
    report = rig.fault()
    assert report.code == 31
    assert "thread" in report.details
    assert "unmapped by unmap of the test" in report.details["history"]


def test_write_to_a_read_only_mapping(rig: Rig) -> None:
    at = rig.alloc(4096, read_only=True)
    rig.submit(launch(rig.qmd("k_set", u64(at) + u32(1, 32))))
    report = rig.fault()
    assert report.code == 31
    assert report.details["kind"] == "read-only"


def test_shared_memory_ends_where_the_qmd_says(rig: Rig) -> None:
    out = rig.alloc(256)
    rig.submit(launch(rig.qmd("k_shared", u64(out) + u32(0), block=(64, 1, 1))))
    rig.done()
    assert rig.at(out, 64).tolist() == list(range(63, -1, -1))
    rig.submit(launch(rig.qmd("k_shared", u64(out) + u32(1000), block=(64, 1, 1))))
    report = rig.fault()
    assert report.sm[0].warp_esr == 0xE


def _load_image(rig: Rig) -> tuple[int, dict[int, tuple[int, int]], int]:
    """A loader: sections of k_table in one buffer, R_CUDA_64 applied; entry, banks, table_d."""
    at = rig.alloc(0x4000)
    places = {".text.k_table": 0, ".nv.constant3": 0x1000, ".nv.constant4": 0x1100,
              ".nv.global.init": 0x1200}  # fmt: skip
    for name, offset in places.items():
        data = np.frombuffer(SECTIONS[name].data, np.uint8)
        rig.at(at + offset, len(data), np.uint8)[:] = data
    from tests.simulator.gpu.rig import program

    for r in program("k_table").relocations:
        if r.section == ".nv.constant4" and r.symbol == "table_d":
            rig.at(at + 0x1100 + r.offset, 1, np.uint64)[0] = at + 0x1200
    banks = {n: (at + o, SECTIONS[f".nv.constant{n}"].size) for n, o in ((3, 0x1000), (4, 0x1100))}
    return at, banks, at + 0x1200


def test_module_variables_are_found_by_relocation(rig: Rig) -> None:
    out = rig.alloc(256)
    entry, banks, table = _load_image(rig)
    rig.submit(launch(rig.qmd("k_table", u64(out), entry=entry, banks=banks)))
    rig.done()
    assert rig.at(out, 4).tolist() == [11001, 22002, 33003, 44005]
    assert rig.at(table, 4)[3] == 9, "a store to the variable reaches the client's memory"


def test_missing_relocation(rig: Rig) -> None:
    out = rig.alloc(256)
    entry, banks, _ = _load_image(rig)
    rig.submit(launch(rig.qmd("k_table", u64(out), entry=entry, banks={3: banks[3]})))
    assert "no relocation placed it" in rig.fault().title


def test_unrecognised_program(rig: Rig) -> None:
    entry = rig.alloc(8192)
    rig.at(entry, 64)[:] = 0x1234
    rig.submit(launch(rig.qmd("k_set", u64(0) + u32(0, 0), entry=entry)))
    report = rig.fault()
    assert "unrecognised program" in report.title
    remedy = report.details["remedy"]
    for what in ("NVRTC_PATH", "NVJITLINK_PATH", "CCACHE=0", "nvgpusim programs CUBIN PTX"):
        assert what in remedy


def test_page_after_the_code_must_be_mapped(rig: Rig) -> None:
    text = SECTIONS[".text.k_set"].data
    entry = rig.alloc(4096)
    rig.load("k_set", entry + 4096 - len(text))
    rig.submit(launch(rig.qmd("k_set", u64(0) + u32(0, 0), entry=entry + 4096 - len(text))))
    report = rig.fault()
    assert report.code == 31
    assert report.details["access"] == "fetch"


BITS = [
    (7, {"b1087_1075": 4097}),
    (9, {"b759_736": 8}),
    (10, {"b1623_1600": 8}),
    (12, {"b1623_1600": SLM + 16}),
    (13, {"b656_648": 0}),
    (18, {"b607_592": 1024, "b623_608": 2}),
    (20, {"b1567_1536": 0x200008}),
    (21, {"b561_544": 100}),
    (23, {"b639_624": 0}),
    (25, {"b561_544": 101 << 10}),
    (26, {"b656_648": 128, "b607_592": 1024}),
]


@pytest.mark.parametrize(("bit", "fields"), BITS, ids=[SKED_BITS[b] for b, _ in BITS])
def test_sked(rig: Rig, bit: int, fields: dict[str, int]) -> None:
    qmd = rig.qmd("k_set", u64(rig.signal) + u32(1, 32))
    for field, value in fields.items():
        rig.poke(qmd, field, value)
    rig.release(qmd, 1)
    rig.submit(launch(qmd))
    report = rig.fault()
    assert report.code == 13
    assert f"esr {1 << bit:#010x}" in report.title
    assert report.details["QMD"] == f"{qmd:#x}"
    assert rig.at(rig.signal, 1)[0] == 0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"b583_580": 2}, "takes 3.0"), ({"b0_0": 1}, "does not know"), ({"b1663_1656": 0x86}, "SASS"),
        ({"b512_512": 1, "b515_513": 2}, "DEPENDENT_QMD0_ACTION"),
        ({"b823_823": 1, "b826_826": 1}, "reduction"), ({"b823_823": 1, "b799_768": 8}, "aligned"),
        ({"b1055_1024": 0x1001}, "CONSTANT_BUFFER_ADDR"), ({"b656_648": 1}, "REGISTER_COUNT_V"),
    ],
)  # fmt: skip
def test_other_fields(rig: Rig, fields: dict[str, int], text: str) -> None:
    qmd = rig.qmd("k_set", u64(rig.signal) + u32(1, 32))
    for field, value in fields.items():
        rig.poke(qmd, field, value)
    rig.submit(launch(qmd))
    report = rig.fault()
    assert report.code == 13
    assert text in report.title


def _without_windows(rig: Rig, words: list[int]) -> None:
    qmd = rig.qmd("k_set", u64(rig.signal) + u32(1, 32))
    rig.submit([*inc(1, 0, 0xC7C0), *words, *inc(1, 0x2E4, 0, PER_TPC, 0xFF), *launch(qmd)], 1)


@pytest.mark.parametrize(
    "words",
    [
        [],
        inc(1, 0x7B0, LOCAL_WINDOW >> 32, 0),
        [*inc(1, 0x7B0, 0xFE, 0x1000), *inc(1, 0x2A0, 0xFE, 0)],
    ],
    ids=["unset", "one unset", "overlapping"],
)
def test_windows(rig: Rig, words: list[int]) -> None:
    """F6: unset or overlapping windows are SKED's bit 24."""
    _without_windows(rig, words)
    assert "esr 0x01000000" in rig.fault().title


def test_release_structures(rig: Rig) -> None:
    """One word, two words with a 64-bit payload, four words."""
    out = rig.alloc(256)
    rig.at(rig.signal, 64, np.uint8)[:] = 0xEE
    one = rig.qmd("k_set", u64(out) + u32(1, 32))
    rig.release(one, 0x1234, address=rig.signal + 4)
    rig.poke(one, "b831_830", 1)
    rig.release(one, 0x99, slot=1, address=rig.signal + 8)
    rig.poke(one, "b1023_992", 0x77)
    rig.poke(one, "b957_957", 1)
    rig.poke(one, "b959_958", 2)
    rig.submit(launch(one))
    rig.done()
    got = rig.at(rig.signal, 64, np.uint8).tobytes()
    assert got[:4] == b"\xee" * 4
    assert struct.unpack_from("<IQ", got, 4) == (0x1234, 0x77 << 32 | 0x99)
    assert got[16:] == b"\xee" * 48


@pytest.mark.parametrize(("grid", "own", "late"), [(0, 0, 1), (3, 0, 1), (1, 0, 0), (0, 1, 0)])
def test_a_release_without_a_system_membar_is_noted(
    rig: Rig, grid: int, own: int, late: int
) -> None:
    """By clc7c0qmd.h: CWD_MEMBAR_TYPE 0 is none, 3 of the GPU alone; a release may have its own."""
    qmd = rig.qmd("k_set", u64(rig.alloc(256)) + u32(1, 32), b369_368=grid, b819_819=own)
    rig.release(qmd, 1)
    rig.submit(launch(qmd))
    rig.finish()
    assert [n.partition(" of ")[0] for n in rig.gpu.notes] == ["RELEASE0"] * late


def test_empty_grid_only_releases(rig: Rig) -> None:
    qmd = rig.qmd("k_set", u64(0) + u32(1, 32), grid=(0, 1, 1))
    rig.release(qmd, 8)
    rig.submit(launch(qmd))
    rig.done()
    assert rig.at(rig.signal, 1)[0] == 8
