# ruff: noqa: E501 - PTX stays one instruction a line
"""Ends of memories and rare records, of which C tells and of which it does not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.simulator.ptx.flat import FlatMemory
from tests.simulator.ptx.machine import kernel

from nvgpusim.allocated_pieces import AllocatedPieces
from nvgpusim.memory import MmuFault
from nvgpusim.options import CHECKS
from nvgpusim.ptx import KernelFault, Launch, parse, translate_kernel
from nvgpusim.ptx.native import build
from nvgpusim.ptx.sanitizer.sanitize import Sanitizer

FULL = 4096


class Setup(NamedTuple):
    """Threads of a block; the input: bytes, how many the host wrote, whether it is read-only.

    `known`: a client made it known; else the driver alone knows its size.
    """

    threads: int = 64
    size: int = FULL
    wrote: int = FULL
    read_only: bool = False
    checks: tuple[str, ...] = CHECKS
    known: bool = True
    warps: int | None = None


def path(text: str, watched: bool, how: Setup) -> Any:
    """Words of the output, fault, kinds of what was found, its texts; two blocks run."""
    module = parse(text)
    code = translate_kernel(module, module.kernels["k"], watched, False)
    memory, allocated = FlatMemory(), AllocatedPieces()
    out = memory.add(np.zeros(FULL, np.uint8))
    given = memory.add(np.zeros(FULL, np.uint8), 0 if how.known else FULL)
    mapping = memory.mapping_at(given)
    assert mapping is not None
    mapping.read_only = how.read_only
    allocated.add_piece(out, FULL, "out", "test.py:1")
    if how.known:
        allocated.add_piece(given, how.size, "given", "test.py:2")
        allocated.note_non_kernel_write(given, how.wrote)
    else:
        mapping.buf.asked = FULL + how.size
    bank = bytes(0x160) + out.to_bytes(8, "little") + given.to_bytes(8, "little") + bytes(8)
    launch = Launch(
        code, memory, (2, 1, 1), (how.threads, 1, 1), {0: bank},
        shared_bytes=2048 if watched else code.shared_bytes,
        watch=Sanitizer(frozenset(how.checks), allocated) if watched else None, warps=how.warps,
    )  # fmt: skip
    fault = ""
    try:
        launch.run_all_blocks()
    except (KernelFault, MmuFault) as e:
        fault = str(e)
    words = memory.read(out, 8 * how.threads).view(np.uint32).tolist()
    kinds = sorted(told.split(": ")[1] for told in launch.findings.values())
    return words, fault, kinds, sorted(launch.findings.values())


def judged(body: str, **options: Any) -> Any:
    """Without the sanitizer and with it, which finds the same where C tells of every access."""
    text, how = kernel(body), Setup(**options)
    plain, watched = path(text, False, how), path(text, True, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-DSURE=0"))
        assert path(text, True, how) == watched
    return plain, watched


# Block 1 reads what each thread of block 0 has written before the signal.
SIGNAL = """setp.eq.u32 %p1, %r30, 0; setp.ne.u32 %p2, %r31, 0; @%p2 bra B; st.global.u32 [%i], 7; MORE
bar.sync 0; @%p1 red.release.gpu.global.add.s32 [%in], 1; bra END;
B: @!%p1 bra C; L: ld.acquire.gpu.global.s32 %r1, [%in]; setp.lt.s32 %p3, %r1, 1; @%p3 bra L; C:
bar.sync 0; sub.u64 %rd1, %i, 256; ld.global.u32 %r1, [%rd1]; st.global.u32 [%i], %r1; END:"""
MANY = " ".join(["ld.global.u32 %r5, [%in+64];"] * 520)
"""More memory instructions than a record has numbers for."""


@pytest.mark.parametrize("more", ["", MANY], ids=["few", "many"])
def test_a_signal_orders_what_was_before_it(more: str) -> None:
    body = SIGNAL.replace("MORE", more)
    plain, watched = judged(body)
    assert plain[:3] == watched[:3] == (128 * [7], "", [])
    unordered = body.replace(".release", ".relaxed").replace(".acquire", ".relaxed")
    assert judged(unordered)[1][2] == ["race"]


@pytest.mark.parametrize(("more", "kinds"), [("", []), ("st.global.u32 [%i], 1;", ["sync"])])
def test_lanes_of_a_mask_that_exit(more: str, kinds: list[str]) -> None:
    """PTX ISA, redux.sync: it waits for the lanes of its mask that have not exited."""
    text = kernel(f"""and.b32 %r2, %r30, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra END;
redux.sync.add.u32 %r3, %r30, -1; st.global.u32 [%i], %r3; exit; END: {more}""")
    words, fault, found, _ = path(text, True, Setup(threads=32))
    assert words[1::2] == 32 * [sum(range(1, 32, 2))]
    assert (fault, found) == ("", kinds)


@pytest.mark.parametrize(
    ("own", "kinds"),
    [
        ("red.global.add.u32 [%in], 1;", ["race"]),
        ("atom.global.add.u32 %r2, [%in], 1;", ["race"]),
        ("atom.global.add.u32 %r2, [%in], 1; st.global.u32 [%i], %r2;", []),
    ],
)
def test_plain_read_behind_the_last_atomic(own: str, kinds: list[str]) -> None:
    """Others may come later; a thread that saw what its atomic returned may know that none does."""
    body = f"{own} setp.ne.u32 %p1, %r28, 127; @%p1 bra END; ld.global.u32 %r1, [%in]; st.global.u32 [%i], %r1; END:"
    assert judged(body)[1][2] == kinds


WRITES = {
    "a store under a predicate that is not to hold": (
        "setp.lt.u32 %p1, %r30, 7; st.global.u32 [%i], 6; @!%p1 st.global.u32 [%i], 5;",
        [6] * 7 + [5] * 57,
    ),
    "shared memory, either predicate": (
        ".shared .align 4 .b8 s[256]; mov.u32 %r1, s; mad.lo.u32 %r1, %r30, 4, %r1; setp.lt.u32 %p1, %r30, 7; @!%p1 st.shared.u32 [%r1], 5; @%p1 st.shared.u32 [%r1], 6; ld.shared.u32 %r2, [%r1]; st.global.u32 [%i], %r2;",
        [6] * 7 + [5] * 57,
    ),
    "a register that some lanes write anew": (
        "add.u32 %r1, %r30, 7; st.global.u32 [%i], 1; setp.lt.u32 %p1, %r30, 7; @%p1 mov.u32 %r1, 9; st.global.u32 [%i], %r1;",
        [9] * 7 + list(range(14, 71)),
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_guarded_writes(name: str) -> None:
    body, words = WRITES[name]
    for seen in judged(body):
        assert seen[:3] == (2 * words, "", [])


PAIR = (
    "mul.wide.u32 %rd1, %r30, 8; add.u64 %rd1, %rd1, %in; setp.lt.u32 %p1, %r28, 8; @!%p1 bra END;"
)
LOAD = f"{PAIR} ld.global.v2.u32 {{%r1, %r2}}, [%rd1]; add.u32 %r1, %r1, %r2; st.global.u32 [%i], %r1; END:"
SHARED = ".shared .align 8 .b8 s[12]; mov.u32 %r1, s; setp.eq.u32 %p1, %r30, 0; @%p1 st.shared.u32 [%r1+8], 3;"
BEYOND = "shared address 0x408 + 8 is beyond the block's"


@pytest.mark.parametrize(
    ("body", "options", "fault", "kinds"),
    [
        ("ld.global.u32 %r1, [%in]; st.global.u32 [%in], 1;", {"read_only": True}, ("read-only", "read-only"), []),
        (LOAD, {"size": 60, "wrote": 60}, ("", ""), ["bounds"]),
        (f"{PAIR} st.global.v2.u32 [%rd1], {{%r28, %r28}}; END:", {"size": 60}, ("", ""), ["bounds"]),
        (f"{SHARED} @%p1 ld.shared.v2.u32 {{%r1, %r2}}, [%r1+8];", {}, (BEYOND, BEYOND), []),
        (f"{SHARED} @%p1 ld.shared.v2.u32 {{%r1, %r2}}, [%r1+8];", {"checks": ("bounds",)}, (BEYOND, BEYOND), []),
        (f"{SHARED} @%p1 st.shared.v2.u32 [%r1+8], {{%r1, %r1}};", {}, (BEYOND, BEYOND), []),
        (LOAD, {"size": 60, "known": False}, ("", ""), ["bounds"]),
        (LOAD, {"size": 64, "known": False}, ("", ""), []),
        (LOAD, {"wrote": 60}, ("", ""), ["init"]),
        (".shared .align 8 .b8 s[512]; mov.u32 %r1, s; mad.lo.u32 %r1, %r30, 8, %r1; st.shared.u32 [%r1], 3; ld.shared.v2.u32 {%r1, %r2}, [%r1]; st.global.u32 [%i], %r2;", {}, ("", ""), ["init"]),
    ],
    ids=["read-only", "load past a buffer", "store past a buffer", "load past shared memory", "without init", "store past shared memory", "load past the driver's buffer", "all of the driver's buffer", "second word of a buffer", "second word of shared memory"],
)  # fmt: skip
def test_ends(body: str, options: Any, fault: tuple[str, str], kinds: list[str]) -> None:
    """The last element of a vector is what is wrong, in the last lane."""
    plain, watched = judged(body, **options)
    assert watched[2] == kinds
    if not options.get("known", True) and kinds:
        assert " is 0 bytes after the end of buffer" in watched[3][0]
    for seen, words in zip((plain, watched), fault, strict=True):
        assert words in seen[1] and bool(words) == bool(seen[1])


def turns(*turns: str) -> str:
    """One thread of the grid each, `number: instruction`, or an instruction of all."""
    out = []
    for turn in turns:
        number, _, line = turn.rpartition(": ")
        out.append(f"setp.eq.u32 %p1, %r28, {number}; @%p1 {line}" if number else line)
    return " ".join(out)


READ, WRITE = "ld.global.u32 %r1, [%in];", "st.global.u32 [%in], {};"


@pytest.mark.parametrize(
    ("body", "threads", "told"),
    [
        (turns(f"47: {READ}", "bar.sync 0;", f"48: {READ}", "bar.sync 0;", f"49: {WRITE.format(1)}"), 48, "thread (47, 0, 0): nothing"),
        (turns(f"0: {WRITE.format(5)}", f"40: {WRITE.format(5)}", "bar.sync 0;", f"2: {WRITE.format(6)}", f"41: {READ}"), 64, "thread (2, 0, 0): nothing"),
        (turns(f"40: {WRITE.format(5)}", f"0: {WRITE.format(5)}", f"1: {WRITE.format(5)}", "bar.warp.sync -1;", f"2: {WRITE.format(6)}"), 64, "thread (40, 0, 0): nothing"),
    ],
    ids=["a read by the block before", "a value that was overwritten", "the first of three equal writes"],
)  # fmt: skip
def test_races(body: str, threads: int, told: str) -> None:
    """One race, which rare records tell of."""
    plain, watched = judged(body, threads=threads)
    assert plain[1] == watched[1] == "" and watched[2] == ["race"]
    assert told in watched[3][0]


def test_an_mbarrier_for_fewer_than_arrive_together() -> None:
    body = """.shared .align 8 .b8 b[8]; mov.u32 %r2, b; setp.eq.u32 %p0, %r30, 0;
@%p0 mbarrier.init.shared.b64 [%r2], COUNT; bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r2];"""
    for count, found in ((64, False), (32, True)):
        *_, texts = path(kernel(body.replace("COUNT", str(count))), True, Setup())
        told = [t for t in texts if f"has {count} arrivals, but 64 threads arrive together" in t]
        assert bool(told) == found


COPIED = """.shared .align 16 .b8 s[256]; .shared .align 8 .b8 b[8]; mov.u32 %r2, b; setp.eq.u32 %p0, %r30, 0;
@%p0 mbarrier.init.shared.b64 [%r2], 64; bar.sync 0;
shl.b32 %r1, %r30, 2; mov.u32 %r3, s; add.u32 %r4, %r3, %r1; cp.async.ca.shared.global [%r4], [%in], 4; ARRIVE
L: WAIT; @!%p1 bra L; xor.b32 %r1, %r1, 252; add.u32 %r3, %r3, %r1; ld.shared.u32 %r5, [%r3]; st.global.u32 [%i], %r5;"""
WAITS = "mbarrier.test_wait.parity.shared.b64 %p1, [%r2], 0"


@pytest.mark.parametrize(
    "arrive",
    [
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];",
        "cp.async.mbarrier.arrive.shared.b64 [%r2]; mbarrier.arrive.shared.b64 _, [%r2];",
    ],
    ids=["the copies arrive", "the thread arrives, too"],
)
def test_an_mbarrier_waits_for_copies(arrive: str) -> None:
    """cuda::memcpy_async with a barrier and cuda::pipeline are made of it."""
    body = COPIED.replace("ARRIVE", arrive)
    waits = judged(body.replace("WAIT", WAITS))[1]
    assert (waits[1], waits[2]) == ("", [])
    goes_on = path(kernel(body.replace("WAIT", "setp.eq.u32 %p1, 0, 0")), True, Setup())
    assert "race" in goes_on[2]


@pytest.mark.parametrize(
    ("arrive", "wait", "kinds"),
    [
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];", "", ["race"]),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];", f"L: {WAITS}; @!%p1 bra L;", []),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];", "cp.async.wait_all;", []),
        ("cp.async.wait_all;", "", []),
    ],
    ids=["no wait", "a wait for the barrier", "a wait for the copies", "no barrier"],
)
def test_a_threads_own_copy_of_which_a_barrier_tells(
    arrive: str, wait: str, kinds: list[str]
) -> None:
    """Its arrival does not make it land."""
    start = COPIED[: COPIED.index("L: WAIT")].replace("ARRIVE", arrive)
    body = f"{start} {wait} ld.shared.u32 %r5, [%r4]; st.global.u32 [%i], %r5;"
    assert judged(body)[1][2] == kinds


@pytest.mark.parametrize("op", ["redux.sync.add.s32 %r2, %r30,", "vote.sync.ballot.b32 %r2, !%p1,"])
def test_lanes_that_exit_without_what_others_wait_for(op: str) -> None:
    """Who returns early is not waited for; who goes past the instruction was meant to be there."""
    odd = f"and.b32 %r1, %r30, 1; mov.u32 %r2, 7; setp.eq.u32 %p1, %r1, 0; @%p1 bra PAST; {op} -1;"
    found = judged(f"{odd} PAST: st.global.u32 [%i], %r2;")[1]
    assert found[2] == ["sync"]
    assert "thread (1, 0, 0): block (0, 0, 0), thread (0, 0, 0) is in the mask and" in found[3][0]


def test_lanes_that_nobody_waits_for_in_vain() -> None:
    """They return early, or come late; a barrier that they miss is told once."""
    op, odd = "vote.sync.ballot.b32 %r2, %p1, -1;", "and.b32 %r1, %r30, 1; setp.eq.u32 %p1, %r1, 0;"
    early = f"{odd} @%p1 bra END; {op} st.global.u32 [%i], %r2; END:"
    late = f"""{odd} mov.u32 %r3, 0; setp.lt.u32 %p3, %r30, 2; @%p3 bra END; @%p1 bra WORK;
JOIN: {op} @%p1 bra END; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 2; @%p2 bra JOIN;
st.global.u32 [%i], %r2; bra END; WORK: st.global.u32 [%i], 5; bra JOIN; END:"""
    barrier = f"{odd} @%p1 bra PAST; bar.sync 0; PAST: st.global.u32 [%i], 5;"
    for seed in (None, 0, 1, 2, 3):
        found = [path(kernel(x), True, Setup(warps=seed))[3] for x in (early, late, barrier)]
        assert found[:2] == [[], []]
        assert ["never reach" in text for text in found[2]] == [True]


def test_code_of_a_header_is_named_by_its_caller() -> None:
    text = kernel(""".loc 2 9 3, function_name $L, inlined_at 3 4 5
.loc 3 4 5, function_name $L, inlined_at 1 7 2
.loc 2 9 3, function_name $L, inlined_at 3 4 5
st.global.u32 [%i], %r30;
.loc 4 8 1, function_name $L, inlined_at 1 7 2
st.global.u32 [%i], %r30;""")
    cuda = "/usr/local/cuda-13.0/bin/../targets/x86_64-linux/include"
    files = f'.file 2 "{cuda}/crt/a.hpp"\n.file 3 "/x/nvidia/cu13/include/b.h"\n.file 4 "mine.h"\n'
    parsed = parse(text.replace(".visible", f"{files}.visible"))
    named = [i.source for i in parsed.kernels["k"].instrs if i.op == "st"]
    assert named == [("source.cu", 7), ("mine.h", 8)]


@pytest.mark.parametrize(("last", "kinds"), [(2, []), (3, ["init"])])
@pytest.mark.parametrize("space", ["shared", "local"])
def test_half_of_a_vector_that_nobody_reads(space: str, last: int, kinds: list[str]) -> None:
    """Compilers load four elements where two are asked for: the rest may be anything."""
    size = 1024 if space == "shared" else 16
    declared = f".{space} .align 16 .b8 s[{size}]; mov.u32 %r6, s;"
    if space == "shared":
        declared += "mad.lo.u32 %r6, %r30, 16, %r6;"
    body = f"""{declared} st.{space}.v2.u32 [%r6], {{%r30, %r30}};
ld.{space}.v4.u32 {{%r1, %r2, %r3, %r4}}, [%r6]; add.u32 %r1, %r1, %r{last}; st.global.u32 [%i], %r1;"""
    assert judged(body)[1][2] == kinds


@pytest.mark.parametrize(("last", "kinds"), [(2, []), (3, ["init"])])
def test_half_of_a_vector_of_a_buffer(last: int, kinds: list[str]) -> None:
    body = f"ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%in+1008]; add.u32 %r1, %r1, %r{last}; st.global.u32 [%i], %r1;"
    assert judged(body, wrote=1016)[1][2] == kinds


LOOKS = {
    "others exchange it": ("atom.global.cas.b32 %r2, [%in], 0, %r30;", []),
    "others add to it": ("atom.global.add.u32 %r2, [%in], %r30;", ["race"]),
    "others store it": ("st.global.u32 [%in], 7;", ["race"]),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("first", [True, False])
def test_a_plain_look_at_a_word(look: str, first: bool) -> None:
    """A word that others exchange is whole, and an old value costs another turn."""
    text, kinds = LOOKS[look]
    sides = f"setp.{'lt' if first else 'ge'}.u32 %p1, %r28, 64; @%p1 bra A; {text} bra E;"
    body = f"{sides} A: ld.global.u32 %r1, [%in]; E: st.global.u32 [%i], %r1;"
    assert judged(body)[1][2] == kinds


ARRIVES = "bar.arrive 1, 64;"
ARRIVE = f"setp.ge.u32 %p1, %r30, 32; @%p1 bra W; {ARRIVES}"
WAIT_FIRST = "setp.lt.u32 %p1, %r30, 32; @%p1 bra A; bar.sync 1, 64; bra E; A:"


@pytest.mark.parametrize(
    ("threads", "body", "fault"),
    [
        (96, "bar.sync 1, 64;", "never completes"),
        (128, "bar.sync 1, 64;", ""),
        (64, f"{ARRIVE} bra E; W: bar.sync 1, 64; E:", ""),
        (64, f"{ARRIVE} {ARRIVES} bra E; W: bar.sync 1, 64; E:", "never completes"),
        (64, f"{ARRIVE} {ARRIVES} {ARRIVES} bra E; W: bar.sync 1, 64; E:", ""),
        (64, f"{WAIT_FIRST} {ARRIVES} {ARRIVES} E:", ""),
        (64, f"{WAIT_FIRST} {ARRIVES} {ARRIVES} {ARRIVES} E:", ""),
    ],
)
def test_a_barrier_passes_as_many_as_it_counts(threads: int, body: str, fault: str) -> None:
    ends = judged(f"{body} st.global.u32 [%i], 5;", threads=threads)
    assert all((fault in end[1]) and bool(fault) == bool(end[1]) for end in ends), ends


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        ("atom.global.add.u64 %rd1, [%in], 3;", "atom.global.add.u32 %r1, [%in+4], 5;", ["race"]),
        ("atom.global.add.u32 %r1, [%in], 5;", "ld.relaxed.gpu.global.u64 %rd1, [%in];", ["race"]),
        ("atom.global.add.u64 %rd1, [%in], 3;", "atom.global.add.u32 %r1, [%in+8], 5;", []),
        ("atom.global.add.u64 %rd1, [%in], 3;", "ld.relaxed.gpu.global.u64 %rd1, [%in];", []),
        ("atom.global.cas.b32 %r1, [%in], 3, 4;", "ld.relaxed.gpu.global.u8 %r1, [%in];", []),
    ],
)
def test_atomics_of_half_a_word(one: str, other: str, kinds: list[str]) -> None:
    """Accesses overlap in part: PTX has them race; libcu++ exchanges the word of a byte."""
    body = (
        f"setp.lt.u32 %p1, %r28, 64; @%p1 bra A; {one} bra E; A: {other} E: st.global.u32 [%i], 5;"
    )
    assert judged(body)[1][2] == kinds


def test_waits_at_an_mbarrier_release_nothing() -> None:
    """However often a warp looks whether a phase has ended, it knows what the arrivals tell."""
    body = """.shared .align 8 .b8 s[512]; mov.u32 %r2, s; setp.eq.u32 %p0, %r30, 0;
@%p0 mbarrier.init.shared.b64 [%r2], 32; bar.sync 0; xor.b32 %r3, %r30, 63; and.b32 %r3, %r3, 31;
mad.lo.u32 %r3, %r3, 4, %r2; setp.ge.u32 %p1, %r30, 32; @%p1 bra WAIT; mov.u32 %r4, 0;
SLOW: add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 2500; @%p2 bra SLOW;
st.shared.u32 [%r3+64], %r30; mbarrier.arrive.shared.b64 %rd1, [%r2]; bra END;
WAIT: mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
ld.shared.u32 %r5, [%r3+64]; st.global.u32 [%i], %r5; END:"""
    assert path(kernel(body), True, Setup())[3] == []


def test_records_of_a_launch_with_more_instructions() -> None:
    """They stay in the buffer; the next kernel has not so many instructions as they name."""
    memory, allocated = FlatMemory(), AllocatedPieces()
    buffers = [memory.add(np.zeros(FULL, np.uint8)) for _ in range(2)]
    for at in buffers:
        allocated.add_piece(at, FULL, "buffer", "test.py:1")
        allocated.note_non_kernel_write(at, FULL)
    bank = bytes(0x160) + b"".join(at.to_bytes(8, "little") for at in buffers) + bytes(8)
    watch, kinds = Sanitizer(frozenset(CHECKS), allocated), []
    many = "ld.global.u32 %r1, [%in+64];" * 70
    half = "setp.ne.u32 %p1, %r28, 0; @%p1 bra R; st.global.u32 [%in], 7; bra E; R: ld.global.u64 %rd1, [%in]; E:"
    for body in (f"{many} setp.eq.u32 %p1, %r28, 0; @%p1 st.global.u64 [%in], 5;", half):
        module = parse(kernel(body))
        code = translate_kernel(module, module.kernels["k"], True, False)
        launch = Launch(code, memory, (2, 1, 1), (64, 1, 1), {0: bank}, watch=watch)
        launch.run_all_blocks()
        kinds.append({told.split(": ")[1] for told in launch.findings.values()})
    assert kinds == [set(), {"race"}]


def test_atomics_behind_the_last_number_of_a_record() -> None:
    """The 511th is of the block's scope; those behind it have its number in records alone."""
    many = "ld.global.u32 %r1, [%in+64];" * 508  # behind two of parameters
    block = "@%p7 red.relaxed.cta.global.add.u32 [%in+128], 1;"
    assert judged(f"{many} {block} {2 * 'red.relaxed.gpu.global.add.u32 [%in], 1;'}")[1][2] == []
