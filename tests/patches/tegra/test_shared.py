"""0027: a launch gets as much of the L1 for shared memory as its resident blocks use."""

import pytest
from tests.patches.tegra.device import Tegra

# `words` of shared memory a block; blocks of an SM are those of registers and warps (48 of 8.7).
LAUNCH = """
d = Device["NV"]
SOURCE = '''extern "C" __global__ void __launch_bounds__(THREADS) keep(int* out) {
  __shared__ int s[WORDS];
  for (int i = threadIdx.x; i < WORDS; i += THREADS) s[i] = i;
  __syncthreads();
  out[blockIdx.x * THREADS + threadIdx.x] = s[(threadIdx.x * 7) % WORDS];
}'''
seen, right = [], []
for threads, words, regs in CASES:
    prg = program(d, SOURCE.replace("THREADS", str(threads)).replace("WORDS", str(words)), "keep")
    if regs: prg.regs_usage = regs
    if regs: prg.qmd.write(register_count_v=regs)
    out = d.allocator.alloc(8 * threads, BufferSpec())
    args = prg.fill_kernargs((out,))
    queue = d.hw_compute_queue_t().wait(d.timeline_signal, d.timeline_value - 1).memory_barrier()
    qmd = queue.exec(prg, args, (2, 1, 1), (threads, 1, 1)).active_qmd
    queue.signal(d.timeline_signal, d.next_timeline()).submit(d)
    d.synchronize()
    seen.append([qmd.read(f"{n}_sm_config_shared_mem_size") for n in ("min", "target", "max")])
    want = np.arange(threads) * 7 % words
    got = np.array(out.cpu_view().view(size=8 * threads, fmt="I")[:])
    right.append(bool((got.reshape(2, -1) == want).all()))
say(seen=seen, right=right)
"""
# threads and words of a block and registers of a thread (0: those that it has), then KiB of shared
# memory: for one block, and for those of an SM
CASES = [
    (128, 16, 0, (8, 16)),  # 12 blocks of 1 KiB and 128 bytes
    (128, 1024, 0, (8, 64)),  # 12 of 5 KiB
    (128, 2048, 0, (16, 132)),  # 12 of 9 KiB
    (256, 6144, 0, (32, 164)),  # 6 of 25 KiB: 150
    (1024, 8192, 0, (64, 64)),  # one of 33 KiB
    (32, 16, 0, (8, 32)),  # 16 blocks of 1 KiB and 128 bytes
    (64, 12000, 0, (64, 164)),  # 16 of 48 KiB are more than there is
    # 65536 registers an SM, given out by 256 a warp and four warps at a time
    (128, 2048, 128, (16, 64)),  # 4 of 9 KiB
    (128, 2048, 41, (16, 100)),  # 10: a warp has 1536, not 1312, of which 12 would do
    (96, 2048, 41, (16, 100)),  # 10: three warps take the registers of four, else 14
    (32, 2048, 41, (16, 100)),  # 10: one does, too
]


def test_configuration_by_registers_warps_and_bytes(tegra: Tegra) -> None:
    run = tegra(LAUNCH.replace("CASES", str([case[:3] for case in CASES])))
    assert run.said["right"] == [True] * len(CASES)
    want = [[kib // 4 + 1 for kib in (*sizes, 164)] for *_, sizes in CASES]
    assert run.said["seen"] == want
    short = run.report["execution"].get("launches short of shared memory", 0)
    assert short == 0


def test_one_block_only_by_request(tegra: Tegra) -> None:
    run = tegra(LAUNCH.replace("CASES", "[(128, 2048, 0)]"), NV_SMEM_TARGET="0")
    assert run.said["seen"] == [[5, 5, 42]] and run.said["right"] == [True]
    assert run.report["execution"]["launches short of shared memory"] == 1


@pytest.mark.parametrize(("kib", "fits"), [(163, True), (164, False)])
def test_up_to_what_an_sm_has(tegra: Tegra, kib: int, fits: bool) -> None:
    # The section of shared memory is only as large as 48 KiB where ptxas makes it; this grows it.
    run = tegra(f"""
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.elf import elf_loader as real
def grown(lib, **kwargs):
    image, sections, relocs = real(lib, **kwargs)
    for sh in sections:
        if sh.name.startswith(".nv.shared."): sh.header.sh_size = {kib} << 10
    return image, sections, relocs
d = Device["NV"]
source = '''extern "C" __global__ void keep(int* out) {{
  __shared__ int s[64];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}}'''
ops_nv.elf_loader = grown
out = d.allocator.alloc(4096, BufferSpec())
try:
    prg = program(d, source, "keep")
    prg(out, global_size=(1, 1, 1), local_size=(64, 1, 1), wait=True)
    say(got=out.cpu_view().view(size=16, fmt="I")[:], error="")
except RuntimeError as e: say(got=[], error=str(e))
""")
    if fits:
        assert run.said == {"got": [63, 62, 61, 60], "error": ""}
    else:
        assert run.said["error"] == (
            f"keep needs {(kib + 1) << 10} bytes of shared memory, more than an SM of sm_87 has"
        )
