"""0008: no vector access through a view whose offset is not aligned."""

import math
from pathlib import Path

import pytest
from tests.patches.fake_cuda import ALIGNMENT, FakeCuda, fake_cuda
from tests.patches.probes.ptx_alignment import Access, accesses, main


def accesses_of(cuda: FakeCuda) -> list[Access]:
    """The vector accesses of all launches, given the addresses that their buffers really had."""
    found = []
    for launch in cuda.launches:
        starts = {i: math.gcd(p, ALIGNMENT) for i, p in enumerate(launch.pointers())}
        found += accesses(launch.ptx, starts)
    return found


@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
@pytest.mark.parametrize("start", [1, 2, 3, 6, 8])
def test_views_are_aligned(renderer: str, dtype: str, start: int) -> None:
    from tinygrad import Tensor

    with fake_cuda(renderer) as cuda:
        a = Tensor.empty(2048, dtype=dtype).realize()
        view = a[start : start + 1024].contiguous().realize()
        (view * 2).realize()
        (view.reshape(32, 32) @ view.reshape(32, 32)).realize()
        found = accesses_of(cuda)
    assert found, "no vector access: the test shows nothing"
    assert [access for access in found if not access.aligned] == []


@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
def test_aligned_views_stay_views(renderer: str) -> None:
    """GGUF aligns tensors to 32 bytes: they must not be copied."""
    from tinygrad import Tensor, dtypes

    with fake_cuda(renderer) as cuda:
        a = Tensor.empty(4096, dtype=dtypes.uint8).realize()
        a[32:1056].contiguous().realize()
        assert cuda.launches == []
        a[33:1057].contiguous().realize()
        assert len(cuda.launches) == 1


KERNEL = """
.version 7.5
.target sm_87
.address_size 64
.visible .entry k(.param .u64 data0, .param .u64 data1)
{{
 .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .pred %p<2>;
 .shared .align 16 .b8 local[512];
 ld.param.u64 %rd0, [data0+0];
 mov.u32 %r0, %tid.x;
 {address}
 ld.global.v4.f32 {{%f0, %f1, %f2, %f3}}, [%rd4+{offset}];
 ret;
}}
"""


@pytest.mark.parametrize(
    ("address", "offset", "alignment"),
    [
        ("mul.wide.u32 %rd1, %r0, 16; add.s64 %rd4, %rd0, %rd1;", 0, 16),
        ("mul.wide.u32 %rd1, %r0, 16; add.s64 %rd4, %rd0, %rd1;", 4, 4),
        ("mul.wide.u32 %rd1, %r0, 8; add.s64 %rd4, %rd0, %rd1;", 16, 8),
        ("shl.b32 %r1, %r0, 4; cvt.u64.u32 %rd1, %r1; add.s64 %rd4, %rd1, %rd0;", -32, 16),
        ("and.b32 %r1, %r0, -16; cvt.u64.u32 %rd1, %r1; add.s64 %rd4, %rd1, %rd0;", 0, 16),
        ("mad.lo.s32 %r1, %r0, 48, 32; cvt.s64.s32 %rd1, %r1; add.s64 %rd4, %rd1, %rd0;", 0, 16),
        ("shr.u32 %r1, %r0, 4; cvt.u64.u32 %rd1, %r1; add.s64 %rd4, %rd1, %rd0;", 0, 1),
        # A loop whose step breaks what its start kept.
        ("mov.u64 %rd4, %rd0;\n$L:\n add.s64 %rd4, %rd4, 8; @%p0 bra $L;", 0, 8),
        # One register for the index and the address, as tinygrad 0.14.0 writes it.
        ("mul.lo.s32 %r1, %r0, 4; cvt.s64.s32 %rd4, %r1; mad.lo.s64 %rd4, %rd4, 4, %rd0;", 0, 16),
        (
            "mul.lo.s32 %r1, %r0, 4; cvt.s64.s32 %rd4, %r1; @%p0 mad.lo.s64 %rd4, %rd4, 4, %rd0;",
            0,
            4,
        ),
        ("mov.u64 %rd4, 8; @%p0 bra $L; mov.u64 %rd4, %rd0;\n$L:\n", 0, 8),
        ("mov.u64 %rd4, local; ", 0, 16),
        ("mov.u64 %rd4, local[0]; ", 16, 16),
    ],
)
def test_checker_knows_what_divides(address: str, offset: int, alignment: int) -> None:
    (access,) = accesses(KERNEL.format(address=address, offset=offset))
    assert access.size == 16
    assert access.alignment == alignment
    assert access.aligned == (alignment >= 16)


def test_checker_on_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(KERNEL.format(address="mov.u64 %rd4, %rd0;", offset=0))
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == "1 vector accesses, 0 of them not provably aligned\n"
    file.write_text(KERNEL.format(address="mov.u64 %rd4, %rd0;", offset=8))
    assert main([str(file)]) == 1
    assert "multiple of 8" in capsys.readouterr().out
    assert main([str(tmp_path / "missing.ptx")]) == 2
