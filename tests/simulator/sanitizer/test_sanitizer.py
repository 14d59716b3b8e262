# ruff: noqa: E501 - findings stay on one line
"""The sanitizer against planted faults, clean kernels, and NVIDIA's compute-sanitizer."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.simulator.sanitizer import launching
from tests.simulator.sanitizer.cases import CASES, Case
from tests.simulator.sanitizer.launching import run

from nvgpusim.allocated_pieces import AllocatedPieces
from nvgpusim.l2 import CACHEABLE
from nvgpusim.ptx import Launch, parse, translate_kernel
from nvgpusim.ptx.sanitizer.sanitize import Sanitizer

HERE = Path(__file__).resolve().parent
FAULTY, CLEAN = [c for c in CASES if c.fault], [c for c in CASES if not c.fault]
VERDICTS = json.loads((HERE / "verdicts" / "verdicts.json").read_text())
SEEDS = (None, 1, 2)
ANY_ORDER = {"clean_ballot"}
"""Kernels whose result depends on the order of atomics."""
TOOLS = {
    "memcheck": {"bounds", "free", "sync"}, "racecheck": {"race"}, "synccheck": {"sync"},
    "initcheck": {"init", "bounds", "free"},
}  # fmt: skip
"""Names here for each tool's findings. memcheck reports the illegal instruction of a barrier
for 48 threads, initcheck a read past the end of one buffer into the slack of its page."""


def _name(case: Case) -> str:
    return case.kernel


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", FAULTY, ids=_name)
def test_planted_faults_are_found(case: Case, seed: int | None) -> None:
    """A race may also let a warp read what another has not written yet."""
    found = run(case, seed)
    assert case.fault in found.kinds, found
    assert found.kinds <= {case.fault} | ({"init"} if case.fault == "race" else set())


@pytest.mark.parametrize("case", CLEAN, ids=_name)
def test_clean_kernels_are_not_accused(case: Case) -> None:
    plain = run(case, None, ())
    for seed in SEEDS:
        found = run(case, seed)
        assert not found.kinds, found.texts
        if case.kernel not in ANY_ORDER:
            assert found.memory == plain.memory


def test_enough_of_each() -> None:
    assert len(FAULTY) >= 30
    assert len(CLEAN) >= 30
    assert {c.fault for c in FAULTY} == {"race", "init", "sync", "bounds", "free"}
    assert set(VERDICTS["verdicts"]) == {c.kernel for c in CASES}
    assert VERDICTS["about"]["machine"].startswith("NVIDIA")


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_that_compute_sanitizer_sees_is_missed(tool: str) -> None:
    seen = [c for c in CASES if VERDICTS["verdicts"][c.kernel][tool]["errors"] > 0]
    assert seen
    missed = [c.kernel for c in seen if not run(c).kinds & TOOLS[tool]]
    assert missed == []


def test_compute_sanitizer_calls_the_clean_ones_clean() -> None:
    for case in CLEAN:
        assert not any(v["errors"] for v in VERDICTS["verdicts"][case.kernel].values()), case


def test_a_finding_names_both_sides() -> None:
    case = next(c for c in CASES if c.kernel == "race_reverse")
    text = next(t for t in run(case).texts if ": race: read" in t)
    assert re.fullmatch(
        r"race_reverse: race: read \(PTX line \d+: ld\.shared\.u32 %r10, \[%r9\];, planted\.cu:12\) "
        r"of _ZZ12race_reverseE1s\+\d+ by block \(0, 0, 0\), thread \(\d+, 0, 0\) and write "
        r"\(PTX line \d+: st\.shared\.u32 \[%r5\], %r2;, planted\.cu:11\) by block \(0, 0, 0\), "
        r"thread \(\d+, 0, 0\): nothing orders them",
        text,
    )


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("bounds_far", r"bounds: read \(.*planted.cu:193\) of 4 bytes by block \(0, 0, 0\), thread \(0, "
         r"0, 0\): 0x10000100 is 0 bytes after the end of buffer 0 \(256 bytes at 0x10000000, made at test.py:1\)"),
        ("free_read", r"free: read \(.*\) of 4 bytes by .*: 0x10000000 is \+0 in buffer 0 \(512 bytes at "
         r"0x10000000, made at test.py:1\), freed at test.py:2"),
        ("init_half", r"init: read \(.*planted.cu:131\) of \+512 in buffer 0 \(1024 bytes .*, made at "
         r"test.py:1\) by block \(2, 0, 0\), thread \(0, 0, 0\): nobody has written it"),
        ("race_global_blocks", r"race: write \(.*\) of \+0 in buffer 0 \(4 bytes .* and write \(.*\) by "
         r"block \(\d, 0, 0\), thread \(0, 0, 0\): nothing orders them"),
        ("sync_exit", r"sync: barrier \(.*planted.cu:158\) passed by block .*, which 24 threads of the block "
         r"never reach, block \(0, 0, 0\), thread \(40, 0, 0\) the first of them: they have exited"),
    ],
)  # fmt: skip
def test_findings_say_where_and_whose(kernel: str, what: str) -> None:
    case = next(c for c in CASES if c.kernel == kernel)
    assert any(re.search(what, text) for text in run(case).texts), run(case).texts


def test_a_missing_barrier_shows_in_the_result() -> None:
    """Without any check: only the drawn order of warps."""
    case = next(c for c in CASES if c.kernel == "race_reverse")
    want = np.arange(127, -1, -1).tolist()

    def result(seed: int | None) -> list[int]:
        memory = np.frombuffer(run(case, seed, ()).memory, "<i4")
        return [int(v) for v in memory[2 * launching.STEP // 4 :][:128]]

    assert result(None) == want
    assert any(result(seed) != want for seed in range(4))


def test_records_go_with_their_buffer() -> None:
    watch = Sanitizer(frozenset({"race"}))
    case = next(case for case in CASES if case.kernel == "clean_saxpy")
    for _ in range(2):
        launching.prepare(
            launching.code(case.kernel), case, *launching.memory(), watch
        ).run_all_blocks()
    gc.collect()
    assert len(watch.memories) == 1


def test_a_watched_kernel_reads_what_it_has_written_into_the_l2() -> None:
    """clean_lock reads, writes and reads again what other blocks count."""
    case = next(c for c in CASES if c.kernel == "clean_lock")
    found = run(case, flags=CACHEABLE)
    assert not found.kinds
    assert found.memory == run(case, None, ()).memory


KERNELS = re.split(r"(?=^\.visible \.entry)", (HERE / "planted.ptx").read_text(), flags=re.M)
BARRIER = re.compile(r"^\s*(?:bar\.(?:sync|arrive|warp)|membar|cp\.async\.wait)[^;\n]*;", re.M)
NEEDED = {
    "clean_reverse": 1, "clean_bytes": 1, "clean_transpose": 1, "clean_stencil": 1, "clean_mma": 1,
    "clean_dynamic": 1, "clean_fresh": 1, "clean_uniform": 1, "clean_flag": 2, "clean_histogram": 2,
    "clean_same_value": 2, "clean_named": 2, "clean_half_warps": 2, "clean_warp_meet": 2,
    "clean_ballot": 1, "clean_sort": 29, "clean_scan": 7, "clean_reduce": 8, "clean_shuffle": 1,
    "clean_tile": 3, "clean_last": 2, "clean_blocks_flag": 1,
}  # fmt: skip
"""Number of a kernel's barriers, fences and waits that are needed: each of the first so many, but for
the fences on the reading side, which the sanitizer takes for granted."""


@pytest.mark.parametrize("kernel", NEEDED)
def test_every_barrier_is_missed_when_it_is_gone(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in CASES if c.kernel == kernel)
    body = next(k for k in KERNELS if k.startswith(f".visible .entry {kernel}("))
    spots = list(BARRIER.finditer(body))
    assert len(spots) >= NEEDED[kernel]
    for spot in spots[: NEEDED[kernel]]:
        module = parse(KERNELS[0] + body[: spot.start()] + body[spot.end() :])
        code = translate_kernel(module, module.kernels[kernel], True)
        monkeypatch.setattr(launching, "module", lambda module=module: module)
        monkeypatch.setattr(launching, "code", lambda *_, code=code: code)
        assert any(run(case, seed).kinds for seed in SEEDS), spot.group()


@pytest.mark.parametrize("waits", [True, False])
def test_an_mbarrier_orders_what_comes_before_it(waits: bool) -> None:
    """k_mbarrier of tensor.cu exchanges words of shared memory around one."""
    text = (HERE.parent / "ptx/recorded/kernels/tensor.ptx").read_text()
    if not waits:  # go on at once
        text = re.sub(r"mbarrier\.test_wait\.shared\.b64 p,[^;]*;", "setp.eq.u32 p, 0, 0;", text)
    module = parse(text)
    code = translate_kernel(module, module.kernels["k_mbarrier"], True)
    vm, _ = launching.memory()
    bank = bytes(0x160) + b"".join(
        (launching.BASE + n * 8192).to_bytes(8, "little") for n in range(4)
    )
    watch = Sanitizer(frozenset({"race", "sync"}), AllocatedPieces())
    Launch(
        code, vm, (4, 1, 1), (256, 1, 1), {0: bank}, shared_bytes=code.shared_bytes, watch=watch
    ).run_all_blocks()
    found = "".join(watch.launch.findings.values())
    assert ("race" in found) is not waits, found


EQUAL = """
.version 7.8
.target sm_87
.address_size 64
.visible .entry equal(.param .u64 p, .param .u64 q) {
  .reg .pred %p<2>; .reg .u32 %r<6>; .reg .u64 %d<5>;
  ld.param.u64 %d0, [p]; ld.param.u64 %d2, [q];
  mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2;
  cvt.u64.u32 %d1, %r2; add.u64 %d0, %d0, %d1;
  setp.ge.u32 %p0, %r0, WRITERS; @%p0 bra READ;
  xor.b32 %r3, %r1, 63; VALUE
  st.global.u32 [%d0], %r3;
READ: bar.sync 0;
  xor.b32 %r2, %r2, 4; ld.param.u64 %d0, [p];
  cvt.u64.u32 %d1, %r2; add.u64 %d0, %d0, %d1; ld.global.u32 %r4, [%d0];
  mad.lo.u32 %r5, %r0, 64, %r1; mul.wide.u32 %d1, %r5, 4; add.u64 %d2, %d2, %d1;
  st.global.u32 [%d2], %r4; ret; }
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("writers", "value", "fine"),
    [(4, "", True), (3, "", False), (4, "add.u32 %r3, %r3, %r0;", False)],
    ids=["all", "one-only-reads", "other-values"],
)
def test_blocks_that_write_one_value_read_it(
    writers: int, value: str, fine: bool, seed: int | None
) -> None:
    """As the blocks of one head of keys do in the engine's attention: each stores it, and reads."""
    text = EQUAL.replace("WRITERS", str(writers)).replace("VALUE", value)
    module = parse(text)
    code = translate_kernel(module, module.kernels["equal"], True)
    vm, _ = launching.memory()
    bank = bytes(0x160) + b"".join(
        (launching.BASE + at).to_bytes(8, "little") for at in (0, 1 << 16)
    )
    watch = Sanitizer(frozenset({"race"}), AllocatedPieces())
    Launch(code, vm, (4, 1, 1), (64, 1, 1), {0: bank}, warps=seed, watch=watch).run_all_blocks()
    assert (not watch.launch.findings) is fine, watch.launch.findings
