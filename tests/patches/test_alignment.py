"""0008: no vector access through a view whose offset is not aligned."""

import re

import pytest
from tests.patches.fake_cuda import fake_cuda
from tests.patches.tegra.device import Tegra


@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
@pytest.mark.parametrize("start", [1, 2, 3, 6, 8])
def test_views_are_aligned(renderer: str, dtype: str, start: int) -> None:
    """Kernels with vector accesses, whose indices are of whole vectors, get whole ones' addresses.

    The widest has 16 bytes.
    """
    from tinygrad import Tensor

    with fake_cuda(renderer) as cuda:
        a = Tensor.empty(2048, dtype=dtype).realize()
        view = a[start : start + 1024].contiguous().realize()
        (view * 2).realize()
        (view.reshape(32, 32) @ view.reshape(32, 32)).realize()
        wide = [launch for launch in cuda.launches if re.search(r"(ld|st)\S*\.v[24]\.", launch.ptx)]
    assert wide, "no vector access: the test shows nothing"
    assert not any(pointer % 16 for launch in wide for pointer in launch.pointers())


@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
def test_no_access_faults(tegra: Tegra, renderer: str) -> None:
    """The model's GPU faults, as an Orin's does, on a vector access that is not aligned."""
    script = """
said = []
for dtype in (dtypes.float, dtypes.half):
    a = Tensor(np.arange(2048) % 8).cast(dtype).contiguous().realize()
    for start in (1, 2, 3, 6, 8):
        view = a[start : start + 1024].contiguous().realize()
        square, want = view.reshape(32, 32), (np.arange(start, start + 1024) % 8).astype(np.float32)
        right = [(view * 2).numpy() == want * 2]
        right.append((square @ square).numpy() == want.reshape(32, 32) @ want.reshape(32, 32))
        said.append(all(each.all() for each in right))
say(right=said)
"""
    run = tegra(script, DEV=f"TEGRA+NV:{renderer}")
    assert run.said["right"] == [True] * 10


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
