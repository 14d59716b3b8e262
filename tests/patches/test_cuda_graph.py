"""0010: CUDA graphs are built with launch sizes that are not empty."""

import math

import pytest
from tests.patches.fake_cuda import fake_cuda


@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
def test_variable_grid_is_captured_and_replayed(renderer: str) -> None:
    from tinygrad import Tensor, TinyJit, Variable

    with fake_cuda(renderer) as cuda:
        rows = Variable("rows", 1, 32)
        data = Tensor.empty(32, 1024).contiguous().realize()

        def two_kernels(x: Tensor) -> Tensor:
            y = (x.relu() * 2).contiguous()
            return (y + 1).contiguous().realize()

        step = TinyJit(two_kernels)
        blocks: dict[int, set[float]] = {}
        for count in (3, 5, 7, 9):  # run, capture and first replay, two more replays
            cuda.launches.clear()
            step(data[: rows.bind(count)].reshape(rows.bind(count), 1024))
            blocks[count] = {math.prod(launch.grid) / count for launch in cuda.launches}
            assert len(cuda.launches) == 2
        assert len(set.union(*blocks.values())) == 1, f"grids do not follow the rows: {blocks}"
        assert cuda.refused == 0
