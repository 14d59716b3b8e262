"""A start that finds cubins made ahead asks no compiler, not even for the probe of a device."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine.conftest import Synthetic
from tests.engine.network import hybrid_models
from tests.engine.vision import tiny
from tinygrad import helpers
from tinygrad.device import CompileError
from tinygrad.helpers import Context

from orinllm.batching.fused_runner import FusedRunner
from orinllm.batching.proposers import MtpProposer
from orinllm.choose.sampling import Sampling
from orinllm.errors import BadInput
from orinllm.gpu import device as devices
from orinllm.gpu import thread_safe_kernel_cache
from orinllm.gpu.compile_ahead import checked_target_gpu, launches_to_compile, write_cubins
from orinllm.gpu.picture_encoder import FusedPictureEncoder
from orinllm.loader import Network, SharingOptions, make_runner, plan_network
from orinllm.mmproj import read_matching_mmproj


class Remembering:
    """A compiler of nothing, which remembers how often it was asked."""

    cachekey = None

    def __init__(self, arch: str, ptx: bool = False, cache_key: str = "") -> None:
        self.arch, self.asked = arch, 0

    def compile_cached(self, source: str) -> bytes:
        """Return a cubin's stand-in."""
        self.asked += 1
        return source.encode()[:16]


@pytest.mark.usefixtures("plain_null")
@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
def test_a_start_with_cubins_compiles_nothing(
    synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr("tinygrad.runtime.support.compiler_cuda.NVRTCCompiler", Remembering)
    monkeypatch.setattr("orinllm.gpu.fused_executor._SHORT", 0)  # the tiny model is a large one
    network, gpu = Network.read(synthetic("tiny", "Q6_K"), 256), checked_target_gpu(arch, None)
    n = write_cubins(network, gpu, tmp_path)
    assert len(list(tmp_path.glob("*.cubin"))) == n + 1  # with the probe
    asked = Remembering(gpu.arch)
    toolchain = devices.Toolchain(
        lambda device: asked,
        lambda device: gpu.multiprocessors,
        lambda device: devices.SHARING,
        lambda device: devices.compile_cuda(device, devices.PROBE).decode()[:0] or None,
        lambda device: gpu.arch,
    )
    devices.register_toolchain("NULL", toolchain)
    monkeypatch.setenv(devices.CUBINS, str(tmp_path))
    plan = plan_network(network, "NULL")
    assert plan.is_fused
    runner = make_runner(network, plan)
    assert isinstance(runner, FusedRunner)
    executor = runner.executor
    executor.fill_cache(list(range(3, 40)), 0, 36)
    executor.fill_cache_with_small_chunk(list(range(3, 40)), 0, 36)
    executor.set_sampling(Sampling(), [1])
    executor.start_step(5, 36)
    with Context(NULL_ALLOW_COPYOUT=1):
        executor.tokens_after_each([5, 6], 37)
    assert asked.asked == 0
    monkeypatch.setenv(devices.CUBINS, str(tmp_path / "nowhere"))
    devices.compile_cuda("NULL", "another source")
    assert asked.asked == 1


@pytest.mark.usefixtures("plain_null")
def test_a_block_has_its_cubins_too(tmp_path: Path) -> None:
    hybrid_models.write(tmp_path / "m.gguf", "qwen35", "F16", mtp=True)
    network, gpu = Network.read(tmp_path / "m.gguf", 128), checked_target_gpu("sm_87", None)
    ahead = {
        launch.cuda_source for launch in launches_to_compile(network, gpu, 1, 2, 4, served=True)
    }
    asked = Remembering(gpu.arch)
    devices.register_toolchain(
        "NULL",
        devices.Toolchain(
            lambda device: asked,
            lambda device: gpu.multiprocessors,
            lambda device: devices.SHARING,
            lambda device: None,
            lambda device: gpu.arch,
        ),
    )
    plan, sources = plan_network(network, "NULL"), list[str]()
    asked.compile_cached = lambda source: sources.append(source) or b""  # type: ignore[func-returns-value,method-assign]
    runner = make_runner(network, plan, share=SharingOptions(4, 8))
    assert isinstance(runner, FusedRunner)
    with Context(NULL_ALLOW_COPYOUT=1):
        block = MtpProposer(
            runner.make_mtp_block(network, network.gguf, network.require_mtp_block_config())
        )
        runner.compile_kernels(verifies=True)
        runner.executor.fill_cache(list(range(3, 40)), 0, 36)
        runner.executor.tokens_after_each([5, 6], 37)
        runner.executor.set_states_after_accepted(1)
        assert len(block.guess_tokens(list(range(3, 40)), 3, [0])) == 3
    assert sources and {*sources} <= ahead


@pytest.mark.usefixtures("plain_null")
def test_the_first_picture_of_any_size_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one multiprocessor, where products of 36 rows have as many tiles as an Orin's of 4,096."""
    monkeypatch.setattr(devices, "nvrtc_compiler", Remembering)
    tiny.write_text(tmp_path / "tiny.gguf", "qwen3vl")
    tiny.write_mmproj(tmp_path / "mmproj.gguf", "qwen3vl")
    network = Network.read(tmp_path / "tiny.gguf")
    seen = read_matching_mmproj(tmp_path / "mmproj.gguf", network)
    write_cubins(network, checked_target_gpu("sm_87", 1), tmp_path / "made", 1, seen)
    made = {path.name for path in (tmp_path / "made").iterdir()}
    encode = FusedPictureEncoder(seen[0], seen[1].encoder, "NULL")
    tiles: dict[str, set[str]] = {}
    for rows in range(36, 0, -1):
        launches = encode._find_or_make_lowering(2, 2 * rows)
        sources = {launch.cuda_source: launch.name for launch in launches.launches}
        assert {devices.cubin_file_name("sm_87", source) for source in sources} <= made, rows
        for source, name in sources.items():
            tiles.setdefault(name, set()).add(source)
    assert max(map(len, tiles.values())) > 2
    assert len(encode._lists) == 4  # of pictures that may come again


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        # What tinygrad raises for a library that is not there.
        (AttributeError("failed to load library nvrtc"), "sm_87: NVRTC, which compiles CUDA C, is"),
        (CompileError("Nvrtc Error 5\nnvrtc: invalid value\n "), "sm_87: Nvrtc Error 5 nvrtc: inv"),
    ],
)
def test_no_compiler_for_a_gpu_is_one_line(
    raised: Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arch: str, ptx: bool, cache_key: str) -> None:
        raise raised

    monkeypatch.setattr("tinygrad.runtime.support.compiler_cuda.NVRTCCompiler", refuse)
    with pytest.raises(BadInput) as caught:
        devices.register_null_as_target(checked_target_gpu("sm_87", None))
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)


def test_a_wheels_nvrtc_is_taken_where_tinygrad_finds_none() -> None:
    program = (
        "from orinllm.gpu.device import PROBE, nvrtc_compiler\n"
        "print(nvrtc_compiler('sm_87', ptx=True).compile(PROBE).decode())"
    )
    # As a folder that does not exist, NVRTC_PATH finds nothing; neither does what is left.
    bare = {"PATH": os.environ["PATH"], "NVRTC_PATH": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ".target sm_87" in done.stdout


def test_threads_use_the_cache_of_kernels_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever came first made tinygrad's one connection, which SQLite refuses to every other thread.
    monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "new" / "cache.db"))
    monkeypatch.setattr(helpers, "_db_tables", set())
    monkeypatch.setattr(thread_safe_kernel_cache, "_connected", threading.local())

    def use(thread: int) -> bool:
        for i in range(20):
            helpers.diskcache_put("kernels", f"{thread} {i}", i)
        return all(helpers.diskcache_get("kernels", f"{thread} {i}") == i for i in range(20))

    with Context(CCACHE=1), ThreadPoolExecutor(8) as pool:
        assert use(-1) and all(pool.map(use, range(8)))
        assert use(-1)
