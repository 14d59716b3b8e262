"""Programs that were written against the sanitizer: none gets past it, none is accused wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulator.sanitizer import launching
from tests.simulator.sanitizer.cases import Case

from nvgpusim.ptx import parse, translate_kernel

ATTACKS = [
    Case("w_async_group", "race", "i:512 u:256", "64"),
    Case("w_async_source", "race", "i:256 u:256", "64"),
    Case("w_async_never", "bounds", "i:256 u:256", "64"),
    Case("w_async_wild", "bounds", "i:256 u:256", "64"),
    Case("c_async_zeros", "", "i:160 u:256 s:40", "64"),
    Case("c_release", "", "u:256 z:4 u:256", "64", 2),
    Case("w_release_alone", "race", "u:256 z:4 u:256", "64", 2),
    Case("c_release_warp", "", "u:128 z:4 u:128", "32", 2),
    Case("w_release_late", "race", "u:128 z:4 u:128", "32", 2),
    Case("c_release_halves", "", "u:128 z:4 u:128", "32", 2),
    Case("c_shared_flag", "", "i:128 u:128", "64"),
    Case("w_shared_flag", "race", "i:128 u:128", "64"),
    Case("w_scope_fence", "race", "u:256 z:4 u:256", "64", 2),
    Case("w_scope_release", "race", "u:256 z:4 u:256", "64", 2),
    Case("w_scope_atomic", "race", "z:4", "64", 2),
    Case("w_two_flags", "race", "u:4 z:8 u:4", "32", 2),
    Case("c_chain", "", "u:4 z:8 u:4", "32", 3),
    Case("c_rmw_chain", "", "u:4 z:4 u:4", "32", 3),
    Case("c_acqrel", "", "z:4 z:4", "32", 4),
    Case("c_block_fence", "", "u:4 u:4", "64"),
    Case("c_lookback", "", "i:16 z:16 u:16 u:1024", "64", 4),
    Case("c_cg_sync", "", "u:512 z:4 u:512", "64", 2),
    Case("w_vector", "race", "u:128", "32"),
    Case("w_matrix", "race", "i:128 u:128", "32"),
    Case("w_double_buffer", "race", "i:256 u:256", "64"),
    Case("w_mbarrier_fresh", "init", "u:256", "64"),
    Case("w_local_part", "init", "i:64 u:256 s:5", "64"),
    Case("c_pipeline", "", "i:2048 u:256", "64"),
    Case("c_ring", "", "i:512 u:128", "64"),
    Case("w_read_between", "race", "u:384", "96"),
    Case("c_read_between", "", "u:384", "96"),
    Case("w_lane_between", "race", "u:128", "32"),
    Case("w_block_between", "race", "i:4 z:12 u:12", "32", 4),
    Case("c_block_between", "", "i:4 z:12 u:12", "32", 4),
    Case("w_far_blocks", "race", "u:8", "64", 512),
    Case("w_scope_mixed", "race", "z:4", "32", 2),
]
MODULE = parse((Path(__file__).parent / "attacks.ptx").read_text())


# What NVRTC 12.6 makes of a float2 and a float at the end of a row of seven: a load of four.
WIDE = """
.version 8.5
.target sm_87
.address_size 64
.visible .entry KERNEL(.param .u64 out_0, .param .u64 in_1)
{
  .reg .b64 %rd<3>;
  .reg .f32 %f<5>;
  ld.param.u64 %rd1, [out_0];
  ld.param.u64 %rd2, [in_1];
  ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd2+16];
  st.global.f32 [%rd1], %f1;
  st.global.f32 [%rd1+4], %f2;
  st.global.f32 [%rd1+8], %fLAST;
  ret;
}
"""


@pytest.mark.parametrize(("last", "found"), [(3, set()), (4, {"bounds"})])
def test_a_vectors_last_element_counts_if_it_is_used(
    last: int, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = parse(WIDE.replace("KERNEL", "k").replace("LAST", str(last)))
    code = translate_kernel(module, module.kernels["k"], True)
    monkeypatch.setattr(launching, "module", lambda: module)
    monkeypatch.setattr(launching, "code", lambda *_: code)
    assert launching.run(Case("k", "", "u:12 i:28", "1"), None).kinds == found


def test_every_kernel_is_launched() -> None:
    assert {case.kernel for case in ATTACKS} == set(MODULE.kernels)


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.kernel)
def test_wrong_is_found_and_right_is_not_accused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [translate_kernel(MODULE, MODULE.kernels[case.kernel], True, n) for n in (False, True)]
    monkeypatch.setattr(launching, "code", lambda kernel, fine, turns: codes[turns])
    for seed in (None, 1, 2, 3):
        found = launching.run(case, seed)
        if case.fault:
            assert case.fault in found.kinds, (seed, found.texts)
        else:
            assert not found.kinds, (seed, found.texts)
