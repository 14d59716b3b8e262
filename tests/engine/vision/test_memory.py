"""The memory of an encoder on a GPU is planned for, and a server's is taken before anybody asks."""

from pathlib import Path

import pytest
from tests.engine.vision import tiny

from orinllm.errors import BadInput
from orinllm.gpu.path_plan import cache_bytes
from orinllm.gpu.picture_encoder import FusedPictureEncoder
from orinllm.loader import Network, plan_network
from orinllm.mmproj import (
    enable_pictures,
    encoder_weight_and_tile_bytes,
    network_for_pictures,
    read_matching_mmproj,
)
from orinllm.model import ModelDescription
from orinllm.server.engine import _affordable_pages
from orinllm.server.options import EngineOptions

pytestmark = pytest.mark.usefixtures("emulation")


@pytest.fixture
def network(tmp_path: Path) -> Network:
    tiny.write_text(tmp_path / "tiny.gguf", "qwen3vl")
    tiny.write_mmproj(tmp_path / "mmproj.gguf", "qwen3vl")
    return network_for_pictures(Network.read(tmp_path / "tiny.gguf"), tmp_path / "mmproj.gguf")


def test_pages_and_context_leave_room_for_an_encoder(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, rows = encoder_weight_and_tile_bytes(
        *read_matching_mmproj(tmp_path / "mmproj.gguf", network), network.context
    )
    plan = plan_network(network, "EMU")
    one = cache_bytes(plan, network.context)
    for more, pages in ((0, 4), (one // 4, 5), (8 * one, 32 * 4)):
        free = plan.weight_bytes + weights + rows + one + more
        for module in ("loader", "server.engine"):
            monkeypatch.setattr(f"orinllm.{module}.free_memory_bytes", lambda device: free)  # noqa: B023
        plan_network(network, "EMU")
        options = EngineOptions(network.gguf.path, memory=1.0, mmproj=tmp_path / "mmproj.gguf")
        assert min(_affordable_pages(options, plan, network, None), 9) == min(pages, 9)
    free = plan.weight_bytes + weights + rows + one - 1
    with pytest.raises(BadInput, match=r"192 tokens fit beside the 0\.0 GB of an encoder"):
        plan_network(network, "EMU")


def test_a_server_has_room_for_the_largest_picture_at_its_start(
    network: Network, tmp_path: Path
) -> None:
    template = ModelDescription.from_network(network).template
    assert template is not None
    enable_pictures(template, tmp_path / "mmproj.gguf", network, "EMU", at_once=True)
    assert template.picture_encoder is not None
    encode = template.picture_encoder.encode
    assert isinstance(encode, FusedPictureEncoder) and encode._room.patches == 36 * 4
    enable_pictures(template, tmp_path / "mmproj.gguf", network, "EMU")
    later = template.picture_encoder.encode
    assert isinstance(later, FusedPictureEncoder) and later._room.patches == 0
