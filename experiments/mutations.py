"""Break TegraIface in one place at a time and see whether its tests notice.

    tools/series checkout /tmp/tree && python experiments/mutations.py /tmp/tree

Each mutation replaces one text of the patched tree by another and runs the tests that ought to
fail; one that passes them is run against all Tegra tests. Prints a line for each and a table at the
end; exit status 1 when less than 95 % were caught or a mutation no longer applies. Long because it
is a list.
"""

# ruff: noqa: E501 - the texts are lines of tinygrad, which has 150 columns

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TEGRA = "tinygrad/runtime/support/nv/tegra.py"
NV = "tinygrad/runtime/ops_nv.py"
TEGRA_HCQ = "tinygrad/runtime/support/nv/tegra_hcq.py"
HCQ = "tinygrad/runtime/support/hcq.py"
WANTED = 0.95
TIMEOUT = 600


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in `file`; `tests` is a pytest -k expression that ought to fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "buffers may lie in the windows",
        TEGRA,
        "VA_END = 0x200000, 0xfc00000000",
        "VA_END = 0x200000, 0xff00000000",
        "shader_window",
    ),
    Mutation(
        "kernel region crosses 2^40",
        TEGRA,
        "VA_END = 0x200000, 0xfc00000000",
        "VA_END = 0x200000, 0xffffe00000",
        "shader_window or opens_by_name",
    ),
    Mutation(
        "shader windows overlap",
        TEGRA,
        "WINDOW = 0xfe00000000, 0xfd00000000",
        "WINDOW = 0xfe00000000, 0xfe00000000",
        "opens_by_name",
    ),
    Mutation(
        "ring size is no power of two",
        TEGRA,
        "GPFIFO_ENTRIES, SM_PER_TPC = 1024, 2",
        "GPFIFO_ENTRIES, SM_PER_TPC = 1000, 2",
        "opens_by_name",
    ),
    Mutation(
        "one SM a TPC",
        TEGRA,
        "GPFIFO_ENTRIES, SM_PER_TPC = 1024, 2",
        "GPFIFO_ENTRIES, SM_PER_TPC = 1024, 1",
        "local_memory or releases",
    ),
    Mutation(
        "r35 opens a TSG as r36",
        TEGRA,
        "NVGPU_GPU_IOCTL_OPEN_TSG_R35",
        "NVGPU_GPU_IOCTL_OPEN_TSG",
        "releases",
    ),
    Mutation(
        "r35 binds a channel as r36",
        TEGRA,
        "NVGPU_IOCTL_CHANNEL_SETUP_BIND_R35",
        "NVGPU_IOCTL_CHANNEL_SETUP_BIND",
        "releases",
    ),
    Mutation(
        "r35 is asked for a subcontext",
        TEGRA,
        "CHANNEL_SETUP_BIND_R35, False,",
        "CHANNEL_SETUP_BIND_R35, True,",
        "releases",
    ),
    Mutation(
        "r35 read with r36's layout",
        TEGRA,
        "312: (nvgpu.struct_nvgpu_gpu_characteristics_r35",
        "312: (nvgpu.struct_nvgpu_gpu_characteristics",
        "releases",
    ),
    Mutation(
        "EINTR is an error",
        TEGRA,
        "except InterruptedError: continue",
        "except InterruptedError: raise",
        "interrupted",
    ),
    Mutation(
        "ENOMEM is no MemoryError",
        TEGRA,
        "MemoryError if e.errno == errno.ENOMEM else RuntimeError",
        "OSError",
        "no_memory or every_call",
    ),
    Mutation(
        "errors do not name the call",
        TEGRA,
        'f"nvgpu {name} failed:',
        'f"nvgpu failed:',
        "every_call",
    ),
    Mutation("a second device opens", TEGRA, "if device_id != 0:", "if False:", "default"),
    Mutation(
        "EACCES says nothing of groups",
        TEGRA,
        "except PermissionError as e:",
        "except BlockingIOError as e:",
        "no_access",
    ),
    Mutation(
        "flags are not checked",
        TEGRA,
        "if not self.chars.flags & flag]",
        "if False]",
        "missing_flag",
    ),
    Mutation(
        "address space without UNIFIED_VA",
        TEGRA,
        "flags=nvgpu.NVGPU_GPU_IOCTL_ALLOC_AS_FLAGS_UNIFIED_VA",
        "flags=0",
        "opens_by_name",
    ),
    Mutation(
        "subcontext on another address space",
        TEGRA,
        'as_fd=self.fds["as"].fd',
        'as_fd=self.fds["tsg"].fd',
        "opens_by_name",
    ),
    Mutation(
        "channel gets no address space",
        TEGRA,
        'self.ioctl("AS_BIND_CHANNEL"',
        '(lambda *a, **k: None)("AS_BIND_CHANNEL"',
        "opens_by_name",
    ),
    Mutation(
        "watchdog stays on",
        TEGRA,
        "wdt_status=nvgpu.NVGPU_IOCTL_CHANNEL_DISABLE_WDT",
        "wdt_status=2",
        "opens_by_name",
    ),
    Mutation(
        "channel is not deterministic",
        TEGRA,
        "NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC | nvgpu.",
        "NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT | nvgpu.",
        "opens_by_name",
    ),
    Mutation(
        "ring and USERD exchanged",
        TEGRA,
        "gpfifo_dmabuf_fd=ring_fd.fd",
        "gpfifo_dmabuf_fd=userd_fd.fd",
        "opens_by_name",
    ),
    Mutation(
        "compute channel without its class",
        TEGRA,
        "class_num=self.compute_class if compute else",
        "class_num=self.dma_class if compute else",
        "opens_by_name",
    ),
    Mutation("notifier is the ring", TEGRA, "mem=notifier_fd.fd", "mem=ring_fd.fd", "fault"),
    Mutation(
        "GPGet and GPPut exchanged",
        TEGRA,
        'for reg in ("GPGet", "GPPut"))',
        'for reg in ("GPPut", "GPGet"))',
        "opens_by_name",
    ),
    Mutation(
        "ring is taken for twice as long",
        TEGRA,
        '"entries_count": GPFIFO_ENTRIES',
        '"entries_count": 2 * GPFIFO_ENTRIES',
        "overrun",
    ),
    Mutation(
        "doorbell rings another channel",
        TEGRA,
        '"token": bound.work_submit_token',
        '"token": bound.work_submit_token + 1',
        "opens_by_name",
    ),
    Mutation(
        "nvmap handles stay",
        TEGRA,
        'finally: self.ioctl("NVMAP_FREE", self.fds["nvmap"], nvgpu.NVMAP_IOC_FREE, ctypes.c_int32(handle).value)',
        "finally: pass",
        "freed_memory",
    ),
    Mutation(
        "handles passed unsigned", TEGRA, "ctypes.c_int32(handle).value", "handle", "freed_memory"
    ),
    Mutation(
        "another heap",
        TEGRA,
        "heap_mask=nvgpu.NVMAP_HEAP_IOVMM",
        "heap_mask=1 << 31",
        "opens_by_name",
    ),
    Mutation(
        "dmabuf descriptors stay open",
        TEGRA,
        "collided.append((fd, va:=self._map_gpu(fd, cached)))",
        "collided.append((fd, va:=self._map_gpu(fd, cached))); self.object_fds = [*getattr(self, 'object_fds', []), fd]",
        "thousand",
    ),
    Mutation(
        "MAP_FIXED replaces what is there",
        TEGRA,
        "mapped, va, MAP_FIXED_NOREPLACE)",
        "mapped, va, 0x10)",
        "process_uses",
    ),
    Mutation(
        "an address is not asked for",
        TEGRA,
        "self._mmap(fd, mapped, va, MAP_FIXED_NOREPLACE)",
        "self._mmap(fd, mapped, 0)",
        "opens_by_name",
    ),
    Mutation("the buffer itself is unmapped", TEGRA, "      collided.pop()\n", "", "opens_by_name"),
    Mutation(
        "collisions stay mapped",
        TEGRA,
        "for _, other in collided: self._unmap_gpu(other)",
        "pass",
        "process_uses",
    ),
    Mutation(
        "size of a buffer is that of its pages",
        TEGRA,
        "HCQBuffer)(va, size, cached, view",
        "HCQBuffer)(va, mapped, cached, view",
        "staging",
    ),
    Mutation(
        "free leaves the GPU's mapping",
        TEGRA,
        "    self._unmap_gpu(int(mem.va_addr))\n",
        "",
        "thousand",
    ),
    Mutation(
        "free leaves the CPU's mapping",
        TEGRA,
        "    FileIOInterface.munmap(int(mem.va_addr), round_up(mem.size, mmap.PAGESIZE))\n",
        "",
        "thousand",
    ),
    Mutation(
        "close leaves descriptors",
        TEGRA,
        "    while self.fds: self.fds.popitem()\n",
        "",
        "closed_device or opens_by_name",
    ),
    Mutation(
        "close leaves the doorbell",
        TEGRA,
        "    if self.doorbell_addr: FileIOInterface.munmap(self.doorbell_addr, 0x10000)\n",
        "",
        "close_and_open",
    ),
    Mutation(
        "a closed device is used",
        TEGRA_HCQ,
        'dev.error_state = RuntimeError(f"{dev.device} is closed")',
        "pass",
        "closed_device",
    ),
    Mutation(
        "what goes with the last error is freed by half a device",
        TEGRA,
        "buffers, self.buffers = self.buffers, {}",
        "buffers = self.buffers",
        "hang",
    ),
    Mutation(
        "a failed device is waited for",
        HCQ,
        "      if dev.error_state is None: dev.synchronize()",
        "      dev.synchronize()",
        "told_once",
    ),
    Mutation(
        "signals go with the device",
        TEGRA_HCQ,
        "for page in HCQCompiled.signal_pages[peer_group]:",
        "for page in []:",
        "close_and_open",
    ),
    Mutation(
        "signal pages of a closed device are shared",
        TEGRA,
        'self.peer_group = f"NV {next(TegraIface.opened)}"',
        'self.peer_group = "NV"',
        "two_devices",
    ),
    Mutation(
        "foreign buffers map silently",
        TEGRA,
        "if mem.owner is not self.dev: raise",
        "if False: raise",
        "foreign",
    ),
    Mutation(
        "no barrier at all",
        TEGRA,
        "self.memory_barrier = store_barrier()",
        "self.memory_barrier = lambda: None",
        "in_order",
    ),
    Mutation(
        "no barrier before GPPut",
        NV,
        "    dev.memory_barrier() # the GPU may read GPPut before the doorbell, the entry has to be there\n",
        "",
        "in_order",
    ),
    Mutation(
        "no barrier before the doorbell",
        NV,
        "    dev.memory_barrier()\n    dev.gpu_mmio",
        "    dev.gpu_mmio",
        "in_order",
    ),
    Mutation("inner-shareable barrier", TEGRA, "0xd5033e9f", "0xd5033bbf", "aarch64"),
    Mutation(
        "start without a barrier",
        TEGRA,
        'except OSError as e: raise RuntimeError(f"TegraIface needs a store barrier, executable memory is refused: {e}") from e',
        "except OSError: return lambda: None",
        "aarch64",
    ),
    Mutation("ring is not looked at", NV, "    gpfifo.wait_for_slot(dev)\n", "", "overrun"),
    Mutation(
        "ring is full one entry late",
        NV,
        "while self.gpget[0] == (self.put_value + 1) % self.entries_count:",
        "while self.gpget[0] == (self.put_value + 2) % self.entries_count and False:",
        "overrun",
    ),
    Mutation(
        "releases in the QMD", TEGRA, "qmd_release = False", "qmd_release = True", "late_consumer"
    ),
    Mutation(
        "copies through staging",
        TEGRA,
        "unified_memory, has_pma, spin_ms = True, False, 0",
        "unified_memory, has_pma, spin_ms = False, False, 0",
        "staging",
    ),
    Mutation(
        "staging without a copy queue",
        NV,
        "batch_cnt=0, supports_copy_from_disk",
        "supports_copy_from_disk",
        "staging",
    ),
    Mutation(
        "no wait before local memory grows",
        NV,
        "not wait for the timeline.\n    self.synchronize()\n",
        "not wait for the timeline.\n",
        "recycled",
    ),
    Mutation(
        "size per thread of what was refused",
        NV,
        "    slm_per_thread = round_up(required, 32)\n",
        "    self.slm_per_thread = slm_per_thread = round_up(required, 32)\n",
        "cannot_grow or launch_can_fail",
    ),
    Mutation(
        "code of a program that cannot start stays",
        NV,
        "    weakref.finalize(self, self._fini, self.dev, self.lib_gpu, buf_spec) # what follows can fail\n",
        "",
        "launch_can_fail",
    ),
    Mutation(
        "a half-made graph keeps its arguments",
        "tinygrad/runtime/graph/hcq.py",
        "    self.kernargs_bufs: dict[Compiled, HCQBuffer] = {}\n",
        "    self.kernargs_bufs: dict[Compiled, HCQBuffer] = {}; del self.last_timeline\n",
        "capture_can_fail",
    ),
    Mutation(
        "a device that does not open stays in its group",
        HCQ,
        "    except Exception:\n      self.forget()\n      raise\n",
        "    except Exception:\n      raise\n",
        "open_can_fail",
    ),
    Mutation(
        "mmap does not say why",
        TEGRA,
        'except OSError as e: raise self._failed("mmap", e) from e',
        'except OSError as e: raise RuntimeError("no mapping") from e',
        "allocation_can_fail",
    ),
    Mutation(
        "PMA is asked for",
        TEGRA,
        "unified_memory, has_pma, spin_ms = True, False, 0",
        "unified_memory, has_pma, spin_ms = True, True, 0",
        "pma",
    ),
    Mutation(
        "notifier is not read while waiting",
        TEGRA,
        "if any(self._notification(name).status == 0xffff for name in self.notifiers):",
        "if False:",
        "names_kernel",
    ),
    Mutation(
        "SM records are not read",
        TEGRA,
        "for sm_id in range(self.num_sms):",
        "for sm_id in range(0):",
        "names_kernel",
    ),
    Mutation(
        "notifier code from the wrong field",
        TEGRA,
        "NOTIFIER.get(n.info32,",
        "NOTIFIER.get(n.info16,",
        "names_kernel",
    ),
    Mutation(
        "programs are not known",
        NV,
        "    self.dev.programs[self.lib_gpu.va_addr] = self\n",
        "",
        "names_kernel",
    ),
    Mutation(
        "report without the cause",
        NV,
        "[str(self.error_state), *self.iface.fault_report()]",
        "self.iface.fault_report()",
        "keeps_its_message",
    ),
    Mutation(
        "arguments do not wait",
        HCQ,
        "    self.dev.timeline_signal.wait(min(max(self.last_use[first:last+1]), submitted))\n",
        "",
        "rings",
    ),
    Mutation(
        "arguments wait for one launch less",
        HCQ,
        "before_next_timeline=True)",
        "before_next_timeline=False)",
        "two_parts",
    ),
    Mutation(
        "case of names matters",
        HCQ,
        "i.__name__[:-5].upper(), t.interface.upper()",
        "i.__name__[:-5], t.interface",
        "opens_by_name",
    ),
    Mutation(
        "other interfaces' errors are shown",
        HCQ,
        'if getattr(i, "is_present", bool)()]',
        "if False]",
        "default",
    ),
    # Mutants that a review by the kernel's source found untested.
    Mutation(
        "memory is write-combined",
        TEGRA,
        "flags=nvgpu.NVMAP_HANDLE_INNER_CACHEABLE | NVMAP_TAG",
        "flags=nvgpu.NVMAP_HANDLE_WRITE_COMBINE | NVMAP_TAG",
        "memory_is_cached",
    ),
    Mutation(
        "IO coherence is not required",
        TEGRA,
        '  "IO coherence": nvgpu.NVGPU_GPU_FLAGS_SUPPORT_IO_COHERENCE,\n',
        "",
        "missing_flag",
    ),
    Mutation(
        "compute class unchecked",
        TEGRA,
        "if self.chars.compute_class != 0xc7c0:",
        "if False:",
        "another_gpu",
    ),
    Mutation(
        "newer characteristics refused",
        TEGRA,
        "if (release:=min(size, max(RELEASES))) not in RELEASES:",
        "if (release:=size) not in RELEASES:",
        "newer",
    ),
    Mutation(
        "legacy node dropped",
        TEGRA,
        'CTRL_NODES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu")',
        'CTRL_NODES = ("/dev/nvgpu/igpu0/ctrl",)',
        "legacy",
    ),
    Mutation(
        "last SM's record skipped",
        TEGRA,
        "for sm_id in range(self.num_sms):",
        "for sm_id in range(self.num_sms - 1):",
        "every_sm",
    ),
    Mutation(
        "GET_TIMEDOUT not asked",
        TEGRA,
        'elif self.ioctl("CHANNEL_GET_TIMEDOUT", self.fds[name], nvgpu.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT).value:',
        "elif False:",
        "dead_channel",
    ),
    Mutation(
        "a full ring is waited for without end",
        NV,
        'raise RuntimeError("the GPFIFO stays full")',
        "pass",
        "stays_full",
    ),
    Mutation(
        "collisions without a limit",
        TEGRA,
        "if len(collided) == 16:",
        "if len(collided) == 16000:",
        "no_address",
    ),
    Mutation(
        "copy-in does not wait for the GPU",
        HCQ,
        "    if self.dev.hw_copy_queue_t is None:\n      self.dev.synchronize()\n      with cpu_profile(f'TINY",
        "    if self.dev.hw_copy_queue_t is None:\n      with cpu_profile(f'TINY",
        "copies_wait",
    ),
    # Mutants of this driver's later behaviour.
    Mutation(
        "copy-out does not wait for the GPU",
        HCQ,
        "  def _copyout(self, dest:memoryview, src:HCQBuffer):\n    self.dev.synchronize()\n",
        "  def _copyout(self, dest:memoryview, src:HCQBuffer):\n",
        "copies_wait",
    ),
    Mutation(
        "a view of a buffer does not wait for the GPU",
        NV,
        "  def _as_buffer(self, src:HCQBuffer) -> memoryview:\n    self.dev.synchronize()\n",
        "  def _as_buffer(self, src:HCQBuffer) -> memoryview:\n",
        "copies_wait",
    ),
    Mutation(
        "r35 maps without DIRECT_KIND_CTRL",
        TEGRA,
        "        nvgpu.NVGPU_AS_MAP_BUFFER_FLAGS_DIRECT_KIND_CTRL_R35),",
        "        0),",
        "releases",
    ),
    Mutation(
        "r36 maps with DIRECT_KIND_CTRL",
        TEGRA,
        "nvgpu.NVGPU_GPU_IOCTL_OPEN_TSG, nvgpu.NVGPU_IOCTL_CHANNEL_SETUP_BIND, True, 0),",
        "nvgpu.NVGPU_GPU_IOCTL_OPEN_TSG, nvgpu.NVGPU_IOCTL_CHANNEL_SETUP_BIND, True, 0x100),",
        "releases",
    ),
    Mutation(
        "r38 maps with DIRECT_KIND_CTRL",
        TEGRA,
        "nvgpu.NVGPU_GPU_IOCTL_OPEN_TSG, nvgpu.NVGPU_IOCTL_CHANNEL_SETUP_BIND, True, 0)}",
        "nvgpu.NVGPU_GPU_IOCTL_OPEN_TSG, nvgpu.NVGPU_IOCTL_CHANNEL_SETUP_BIND, True, 0x100)}",
        "releases",
    ),
    Mutation(
        "the flags of the release are dropped",
        TEGRA,
        "flags = self.map_flags |",
        "flags = 0 |",
        "releases",
    ),
    Mutation(
        "the GPU is not shared",
        TEGRA,
        "if compute: self._share_the_gpu(ch)",
        "pass",
        "two_processes",
    ),
    Mutation(
        "no preemption mode",
        TEGRA,
        "if (mode:=next((m for m in modes if self.chars.compute_preemption_mode_flags & m), 0)):",
        "if (mode:=0):",
        "mode_is",
    ),
    Mutation(
        "CTA before CILP",
        TEGRA,
        "compute_preemption_mode_flags & m), 0)",
        "compute_preemption_mode_flags & m and m == 2), 0)",
        "mode_is",
    ),
    Mutation(
        "a mode that the driver does not offer",
        TEGRA,
        "for m in modes if self.chars.compute_preemption_mode_flags & m",
        "for m in modes",
        "mode_is",
    ),
    Mutation(
        "a graphics mode",
        TEGRA,
        "NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, compute_preempt_mode=mode",
        "NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, graphics_preempt_mode=mode",
        "mode_is",
    ),
    Mutation(
        "the limit of 3 s stays",
        TEGRA,
        '    self.ioctl("CHANNEL_SET_TIMEOUT", ch, nvgpu.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT, timeout=0xffffffff)\n',
        "",
        "limit_is_all",
    ),
    Mutation("a limit of 30 s", TEGRA, "timeout=0xffffffff", "timeout=30000", "limit_is_all"),
    Mutation(
        "SMs from litter counts",
        NV,
        "getattr(self.iface, 'num_sms', ",
        "getattr(self.iface, 'no_such', ",
        "sms_are",
    ),
    Mutation(
        "one TPC mask",
        TEGRA,
        "masks = (ctypes.c_uint32 * 16)()",
        "masks = (ctypes.c_uint32 * 1)()",
        "sms_are",
    ),
    Mutation("memory is not looked at", TEGRA, "    self._check_memory(size)\n", "", "memory_ends"),
    Mutation(
        "no reserve",
        TEGRA,
        '* 1024 - (getenv("TEGRA_RESERVE_MB", 256) << 20)',
        "* 1024",
        "memory_ends",
    ),
    Mutation(
        "reserve in KiB",
        TEGRA,
        '(getenv("TEGRA_RESERVE_MB", 256) << 20)',
        '(getenv("TEGRA_RESERVE_MB", 256) << 10)',
        "memory_ends",
    ),
    Mutation(
        "another default reserve",
        TEGRA,
        '- (getenv("TEGRA_RESERVE_MB", 256)',
        '- (getenv("TEGRA_RESERVE_MB", 1024)',
        "memory_ends",
    ),
    Mutation(
        "MemFree for MemAvailable",
        TEGRA,
        'partition("MemAvailable:")',
        'partition("MemTotal:")',
        "memory_ends",
    ),
    Mutation(
        "kilobytes of 1000",
        TEGRA,
        "int(info.split()[0]) * 1024",
        "int(info.split()[0]) * 4096",
        "memory_ends",
    ),
    Mutation(
        "no memory is a RuntimeError",
        TEGRA,
        'raise MemoryError(f"no memory for',
        'raise OSError(f"no memory for',
        "memory_ends",
    ),
    Mutation(
        "cached is not counted",
        TEGRA,
        'f"{cached} are cached")',
        '"nothing is cached")',
        "memory_ends",
    ),
    Mutation(
        "nothing is cacheable",
        TEGRA,
        "NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE if cached else 0",
        "NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE if False else 0",
        "sees_what",
    ),
    Mutation(
        "everything is cacheable",
        TEGRA,
        "cached = size >= L2_MIN_SIZE and not (host or cpu_access)",
        "cached = True",
        "sees_what",
    ),
    Mutation(
        "small buffers are cacheable",
        TEGRA,
        "L2_MIN_SIZE = 64 << 10",
        "L2_MIN_SIZE = 1",
        "sees_what or weights_and",
    ),
    Mutation(
        "large buffers are not cacheable",
        TEGRA,
        "L2_MIN_SIZE = 64 << 10",
        "L2_MIN_SIZE = 64 << 20",
        "sees_what",
    ),
    Mutation(
        "arguments are cacheable",
        TEGRA,
        "not (host or cpu_access)",
        "not host",
        "sees_what or opens_by_name",
    ),
    Mutation("TEGRA_L2 is ignored", TEGRA, 'bool(getenv("TEGRA_L2", 1))', "True", "sees_what"),
    Mutation(
        "off by default", TEGRA, 'getenv("TEGRA_L2", 1)', 'getenv("TEGRA_L2", 0)', "sees_what"
    ),
    Mutation(
        "a copy is not told to the L2",
        NV,
        "    self.dev.cpu_wrote |= bool(dest.meta)\n",
        "",
        "sees_what",
    ),
    Mutation(
        "a file's place is not told to the L2",
        NV,
        "    self.dev.cpu_wrote |= bool(src.meta) # a file is read into it\n",
        "",
        "sees_what",
    ),
    Mutation(
        "each copy is told to the L2",
        NV,
        "self.dev.cpu_wrote |= bool(dest.meta)",
        "self.dev.cpu_wrote = True",
        "weights_and",
    ),
    Mutation(
        "a small copy hides a large one",
        NV,
        "self.dev.cpu_wrote |= bool(dest.meta)",
        "self.dev.cpu_wrote = bool(dest.meta)",
        "sees_what or weights_and",
    ),
    Mutation(
        "the L2 is not invalidated",
        NV,
        "      dev.invalidate_caches()\n      dev.cpu_wrote = False",
        "      dev.cpu_wrote = False",
        "sees_what",
    ),
    Mutation(
        "the L2 is invalidated at each submit",
        NV,
        "      dev.invalidate_caches()\n      dev.cpu_wrote = False",
        "      dev.invalidate_caches()",
        "sees_what or weights_and",
    ),
    Mutation(
        "flushed and kept",
        TEGRA,
        "l2_flush=1, l2_invalidate=1",
        "l2_flush=1, l2_invalidate=0",
        "sees_what",
    ),
    Mutation(
        "spins for 200 ms",
        TEGRA,
        "has_pma, spin_ms = True, False, 0",
        "has_pma, spin_ms = True, False, 200",
        "leaves_the_cpu",
    ),
    Mutation(
        "never spins",
        NV,
        "time_spent_since_last_sleep_ms > getattr",
        "time_spent_since_last_sleep_ms >= getattr",
        "short_wait",
    ),
    Mutation(
        "events are not polled",
        TEGRA,
        "if self.poller.poll(2 if self.has_events else 0):",
        "if False:",
        "leaves_the_cpu",
    ),
    Mutation(
        "a poll of 2 s",
        TEGRA,
        "self.poller.poll(2 if",
        "self.poller.poll(2000 if",
        "leaves_the_cpu or fault or stays_full",
    ),
    Mutation(
        "without events a wait spins",
        TEGRA,
        "    elif not self.has_events: time.sleep(0.0001)\n",
        "",
        "without_events",
    ),
    Mutation(
        "another event",
        TEGRA,
        "event_id=nvgpu.NVGPU_EVENT_ID_BLOCKING_SYNC",
        "event_id=0",
        "leaves_the_cpu",
    ),
    Mutation(
        "the event's fd stays open",
        TEGRA,
        'self.fds[f"{name} event"] = FileIOInterface(fd=event.event_fd)',
        "os.dup(event.event_fd)",
        "open_can_fail or opens_by_name",
    ),
    Mutation(
        "one block's shared memory",
        NV,
        "size >= blocks * self.shmem_usage",
        "size >= self.shmem_usage",
        "by_registers",
    ),
    Mutation(
        "registers do not limit blocks",
        NV,
        ", 65536 // (warp_regs * round_up(warps, 4))",
        "",
        "by_registers",
    ),
    Mutation(
        "warps do not limit blocks",
        NV,
        "min(16, self.dev.max_warps_per_sm // warps, ",
        "min(16, ",
        "by_registers",
    ),
    Mutation(
        "32 blocks an SM",
        NV,
        "min(16, self.dev.max_warps_per_sm",
        "min(32, self.dev.max_warps_per_sm",
        "by_registers",
    ),
    Mutation(
        "a split that there is not",
        NV,
        '{"sm_87": (8, 16, 32, 64, 100, 132, 164)}',
        '{"sm_87": (8, 16, 32, 48, 64, 100, 132, 164)}',
        "by_registers",
    ),
    Mutation(
        "100 KiB are the most",
        NV,
        '{"sm_87": (8, 16, 32, 64, 100, 132, 164)}',
        '{"sm_87": (8, 16, 32, 64, 100)}',
        "by_registers",
    ),
    Mutation(
        "228 KiB are the most",
        NV,
        '{"sm_87": (8, 16, 32, 64, 100, 132, 164)}',
        '{"sm_87": (8, 16, 32, 64, 100, 132, 164, 228)}',
        "by_registers or up_to",
    ),
    Mutation(
        "MIN is what the blocks want",
        NV,
        "min_sm_config_shared_mem_size=smem_cfg,",
        "min_sm_config_shared_mem_size=max_smem_cfg,",
        "by_registers",
    ),
    Mutation(
        "MAX is what one block needs",
        NV,
        "max_sm_config_shared_mem_size=max_smem_cfg",
        "max_sm_config_shared_mem_size=smem_cfg",
        "by_registers",
    ),
    Mutation(
        "no words where it does not fit",
        NV,
        "    if not self.smem_sizes: raise RuntimeError(",
        "    if False: raise RuntimeError(",
        "up_to",
    ),
    Mutation(
        "one block is not to be had", NV, ' or not getenv("NV_SMEM_TARGET", 1)', "", "one_block"
    ),
    Mutation(
        "a warp's registers in units of 1",
        NV,
        "warps, warp_regs = ceildiv(threads, 32), round_up(max(1, self.regs_usage) * 32, 256)",
        "warps, warp_regs = ceildiv(threads, 32), max(1, self.regs_usage) * 32",
        "by_registers",
    ),
    Mutation(
        "any warp error is misaligned",
        TEGRA,
        "WARP_ESR.get(rec.warp_esr & 0xffff, 'no warp error')",
        "WARP_ESR.get(0xf)",
        "every_sm",
    ),
    Mutation(
        "errors of other SMs end the report",
        TEGRA,
        "      if not (rec.global_esr or rec.warp_esr): continue\n",
        "      if not (rec.global_esr or rec.warp_esr): break\n",
        "every_sm",
    ),
    # By somebody who had not written the tests.
    Mutation("barrier of loads", TEGRA, "0xd5033e9f", "0xd5033d9f", "aarch64"),
    Mutation(
        "the barrier runs on", TEGRA, "0xd5033e9f, 0xd65f03c0", "0xd5033e9f, 0xd503201f", "aarch64"
    ),
    Mutation(
        "the barrier's code is not executable",
        TEGRA,
        "mmap.PROT_READ | mmap.PROT_EXEC",
        "mmap.PROT_READ",
        "aarch64",
    ),
    Mutation(
        "the barrier's file stays open",
        TEGRA,
        "    finally: os.close(fd)\n",
        "    finally: pass\n",
        "aarch64",
    ),
    Mutation(
        "signals of a closed device are not reached",
        TEGRA_HCQ,
        "bytes([0xff])",
        "bytes([0x00])",
        "close_and_open",
    ),
    Mutation(
        "signals of a closed device stay where they were",
        TEGRA_HCQ,
        "      slot.view = MMIOInterface(ctypes.addressof(slot.meta), slot.size)\n",
        "",
        "close_and_open",
    ),
    Mutation(
        "both nodes have to be there",
        TEGRA,
        "any(map(FileIOInterface.exists, CTRL_NODES))",
        "all(map(FileIOInterface.exists, CTRL_NODES))",
        "legacy",
    ),
    Mutation(
        "a missing node ends the search",
        TEGRA,
        "except FileNotFoundError: continue",
        "except FileNotFoundError: break",
        "legacy",
    ),
    Mutation(
        "nodes are opened for reading only",
        TEGRA,
        "os.O_RDWR | os.O_CLOEXEC",
        "os.O_RDONLY | os.O_CLOEXEC",
        "legacy",
    ),
    Mutation(
        "nodes are inherited by programs", TEGRA, "os.O_RDWR | os.O_CLOEXEC", "os.O_RDWR", "legacy"
    ),
    Mutation(
        "what opened stays open where opening fails",
        TEGRA,
        "    except Exception:\n      self.device_fini()\n      raise\n",
        "    except Exception:\n      raise\n",
        "open_can_fail or another_gpu",
    ),
    Mutation(
        "the errno is not put in words",
        TEGRA,
        ' ({e.strerror})")',
        '")',
        "every_call or told_once or cannot",
    ),
    Mutation(
        "memory is mapped privately",
        TEGRA,
        "mmap.MAP_SHARED | flags",
        "mmap.MAP_PRIVATE | flags",
        "opens_by_name",
    ),
    Mutation(
        "a collision is a failure", TEGRA, "    except FileExistsError: raise\n", "", "process_uses"
    ),
    Mutation(
        "room for r35's characteristics only",
        TEGRA,
        "(ctypes.c_ubyte * 1024)()",
        "(ctypes.c_ubyte * 312)()",
        "releases",
    ),
    Mutation(
        "the first missing flag only",
        TEGRA,
        "nvgpu lacks {', '.join(missing)}",
        "nvgpu lacks {missing[0]}",
        "missing_flag",
    ),
    Mutation(
        "TSG subcontexts are not required",
        TEGRA,
        '"TSG subcontexts": nvgpu.NVGPU_GPU_FLAGS_SUPPORT_TSG_SUBCONTEXTS,\n',
        "",
        "missing_flag",
    ),
    Mutation(
        "usermode submits are not required",
        TEGRA,
        '  "usermode submit": nvgpu.NVGPU_GPU_FLAGS_SUPPORT_USERMODE_SUBMIT, ',
        "  ",
        "missing_flag",
    ),
    Mutation(
        "r38 makes no subcontext",
        TEGRA,
        "NVGPU_IOCTL_CHANNEL_SETUP_BIND, True, 0)}",
        "NVGPU_IOCTL_CHANNEL_SETUP_BIND, False, 0)}",
        "releases",
    ),
    Mutation(
        "a GPC has one TPC",
        TEGRA,
        "sum(mask.bit_count() for mask in masks)",
        "sum(bool(mask) for mask in masks)",
        "sms_are",
    ),
    Mutation(
        "the doorbell's mapping is a page",
        TEGRA,
        'self.doorbell_addr = self._mmap(self.fds["ctrl"], 0x10000)',
        'self.doorbell_addr = self._mmap(self.fds["ctrl"], 0x1000)',
        "opens_by_name or close_and_open",
    ),
    Mutation(
        "another state of the notifier",
        TEGRA,
        "if any(self._notification(name).status == 0xffff",
        "if any(self._notification(name).status == 0xfffe",
        "names_kernel",
    ),
    Mutation(
        "an event is not remembered",
        TEGRA,
        "(2 if self.has_events else 0): self.has_events = True",
        "(2 if self.has_events else 0): pass",
        "leaves_the_cpu",
    ),
    Mutation(
        "events are not listened to",
        TEGRA,
        "    self.poller.register(event.event_fd, select.POLLIN | select.POLLPRI)\n",
        "",
        "leaves_the_cpu",
    ),
    Mutation(
        "the event is switched off",
        TEGRA,
        "cmd=nvgpu.NVGPU_IOCTL_CHANNEL_EVENT_ID_CMD_ENABLE",
        "cmd=0",
        "leaves_the_cpu",
    ),
    Mutation(
        "a synchronous subcontext",
        TEGRA,
        "type=nvgpu.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC",
        "type=0",
        "asked_for",
    ),
    Mutation(
        "a class without counterpart is taken",
        TEGRA,
        '      raise RuntimeError(f"rm_alloc of class {clss:#x} has no counterpart in nvgpu")\n',
        "      pass\n",
        "no_counterpart",
    ),
    Mutation(
        "a control without counterpart is taken",
        TEGRA,
        '      raise RuntimeError(f"rm_control {cmd:#x} has no counterpart in nvgpu")\n',
        "      pass\n",
        "no_counterpart",
    ),
    Mutation(
        "64 warps an SM",
        TEGRA,
        "INDEX_MAX_WARPS_PER_SM: 48",
        "INDEX_MAX_WARPS_PER_SM: 64",
        "by_registers",
    ),
    Mutation(
        "another architecture",
        TEGRA,
        "INDEX_SM_VERSION: self.chars.sm_arch_sm_version",
        "INDEX_SM_VERSION: 0x806",
        "opens_by_name",
    ),
    Mutation(
        "local memory for one GPC",
        TEGRA,
        "LITTER_NUM_GPCS: self.chars.num_gpc",
        "LITTER_NUM_GPCS: 1",
        "local_memory or opens_by_name",
    ),
    Mutation(
        "local memory for one TPC a GPC",
        TEGRA,
        "LITTER_NUM_TPC_PER_GPC: self.chars.num_tpc_per_gpc",
        "LITTER_NUM_TPC_PER_GPC: 1",
        "local_memory or opens_by_name",
    ),
    Mutation(
        "the L2 is not flushed",
        TEGRA,
        "l2_flush=1, l2_invalidate=1",
        "l2_flush=0, l2_invalidate=1",
        "sees_what or sees_parts",
    ),
    Mutation(
        "the frame buffer is not flushed",
        TEGRA,
        ", fb_flush=1)",
        ", fb_flush=0)",
        "sees_what or sees_parts",
    ),
    Mutation(
        "a ring of half its entries",
        TEGRA,
        "(GPFIFO_ENTRIES * 8, mmap.PAGESIZE",
        "(GPFIFO_ENTRIES * 4, mmap.PAGESIZE",
        "opens_by_name",
    ),
    Mutation(
        "submits go through the kernel",
        TEGRA,
        " | nvgpu.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT\n",
        "\n",
        "opens_by_name",
    ),
    Mutation(
        "no error notifier",
        TEGRA,
        '    self.ioctl("CHANNEL_SET_ERROR_NOTIFIER"',
        '    (lambda *a, **k: None)("CHANNEL_SET_ERROR_NOTIFIER"',
        "names_kernel",
    ),
    Mutation("GPGet is not looked at", TEGRA, '"gpget": gpget, ', '"gpget": None, ', "overrun"),
    Mutation(
        "half of the ring is used",
        TEGRA,
        '"entries_count": GPFIFO_ENTRIES',
        '"entries_count": GPFIFO_ENTRIES // 2',
        "overrun",
    ),
    Mutation(
        "the place in a kernel is an address",
        TEGRA,
        "at +{pc - prg.lib_gpu.va_addr:#x}",
        "at +{pc:#x}",
        "names_kernel",
    ),
    Mutation(
        "the kernel is the first that there is",
        TEGRA,
        "if addr <= pc < addr + p.lib_gpu.size",
        "if True",
        "names_kernel",
    ),
    Mutation(
        "the kernel log is named for every fault",
        TEGRA,
        'if any("MMU" in line for line in report)',
        "if report",
        "names_kernel",
    ),
    Mutation(
        "an SM without a warp error is passed over",
        TEGRA,
        "if not (rec.global_esr or rec.warp_esr): continue",
        "if not rec.warp_esr: continue",
        "every_sm",
    ),
    Mutation(
        "twice the memory that there is",
        TEGRA,
        "if size <= (free:=self.memory_available())",
        "if size <= 2 * (free:=self.memory_available())",
        "memory_ends",
    ),
    Mutation(
        "memory below zero", TEGRA, "256) << 20), 0)", "256) << 20), -1 << 40)", "larger_than"
    ),
    Mutation(
        "one cached buffer of each size counts",
        TEGRA,
        "sum(sz * len(bufs) for",
        "sum(sz for",
        "memory_ends",
    ),
    Mutation(
        "rings stay mapped in a closed device",
        TEGRA,
        "self.channel_views.append(view:=MMIOInterface(self._mmap(fd, size), size))",
        "view = MMIOInterface(self._mmap(fd, size), size)",
        "closed_device or close_and_open",
    ),
    Mutation(
        "buffers stay mapped in a closed device",
        TEGRA,
        "*(buf.cpu_view() for buf in buffers.values())]",
        "]",
        "closed_device or close_and_open",
    ),
    Mutation(
        "nvmap is told no tag",
        TEGRA,
        "nvgpu.NVMAP_HANDLE_INNER_CACHEABLE | NVMAP_TAG",
        "nvgpu.NVMAP_HANDLE_INNER_CACHEABLE",
        "asked_for",
    ),
    Mutation("pages of 64 KiB", TEGRA, "page_size=0x1000,", "page_size=0x10000,", "asked_for"),
    Mutation("a compressible kind", TEGRA, "compr_kind=-1)", "compr_kind=0)", "asked_for"),
    Mutation(
        "the GPU's mapping goes first",
        TEGRA,
        "    FileIOInterface.munmap(int(mem.va_addr), round_up(mem.size, mmap.PAGESIZE))\n    self._unmap_gpu(int(mem.va_addr))\n",
        "    self._unmap_gpu(int(mem.va_addr))\n    FileIOInterface.munmap(int(mem.va_addr), round_up(mem.size, mmap.PAGESIZE))\n",
        "freed_memory",
    ),
    Mutation(
        "what is freed twice is unmapped twice",
        TEGRA,
        "if self.buffers.pop(int(mem.va_addr), None) is None: return",
        "self.buffers.pop(int(mem.va_addr), None)",
        "closed_device or hang or close_and_open",
    ),
    Mutation(
        "signals lie in an ordinary buffer",
        TEGRA,
        "(SignalPage if host else HCQBuffer)(va",
        "HCQBuffer(va",
        "close_and_open",
    ),
    Mutation(
        "a closed device stays in its group",
        TEGRA_HCQ,
        "  if hasattr(dev, 'peer_group'): dev.forget()\n",
        "",
        "close_and_open",
    ),
    Mutation(
        "a closed device keeps its ring",
        TEGRA_HCQ,
        'for name in ("kernargs_buf", "compute_gpfifo"):',
        'for name in ("kernargs_buf",):',
        "closed_device",
    ),
    Mutation(
        "a full ring does not look for faults",
        NV,
        "        dev.iface.sleep(0)\n",
        "",
        "fault_while",
    ),
    Mutation(
        "an error in a full ring is not kept",
        NV,
        "        dev.error_state = e\n        dev.on_device_hang()\n",
        "        dev.on_device_hang()\n",
        "fault_while or stays_full",
    ),
    Mutation(
        "programs are kept alive",
        NV,
        "self.programs: weakref.WeakValueDictionary[int, NVProgram] = weakref.WeakValueDictionary()",
        "self.programs: dict = {}",
        "hundred or thousand or freed_memory or launch_can_fail",
    ),
    Mutation(
        "what does not fit an SM gets the least",
        NV,
        ">= blocks * self.shmem_usage), self.smem_sizes[-1])",
        ">= blocks * self.shmem_usage), self.smem_sizes[0])",
        "by_registers",
    ),
    Mutation(
        "registers by warp, not by four",
        NV,
        "65536 // (warp_regs * round_up(warps, 4))",
        "65536 // (warp_regs * warps)",
        "by_registers",
    ),
    Mutation(
        "old local memory stays",
        NV,
        "    if self.shader_local_mem is not None: self.allocator.free(",
        "    if False: self.allocator.free(",
        "local_memory or hundred",
    ),
    Mutation(
        "a ring of arguments in one part", HCQ, "PARTS = 16", "PARTS = 1", "rings or two_parts"
    ),
    Mutation(
        "a launch of two parts marks one",
        HCQ,
        "for part in (self.part, *range(first, last))",
        "for part in (self.part,)",
        "three_parts",
    ),
    Mutation(
        "arguments wait for what is not submitted",
        HCQ,
        "wait(min(max(self.last_use[first:last+1]), submitted))",
        "wait(max(self.last_use[first:last+1]))",
        "not_submitted",
    ),
    Mutation(
        "arguments remember values of the timeline before",
        HCQ,
        "      if isinstance(ring, HCQRingAllocator): ring.last_use = [0] * ring.PARTS\n",
        "      pass\n",
        "forgets",
    ),
)


def run_tests(package: Path, expression: str, timeout: float = TIMEOUT) -> bool:
    """True if the Tegra tests that match pass on the package in this folder."""
    tests = sorted(str(p) for p in (REPOSITORY / "tests/patches").glob("test_tegra_*.py"))
    select = ["-k", expression] if expression else []
    environment = os.environ | {"PYTHONPATH": f"{package}:{REPOSITORY}"}
    environment.pop("SERIES_TREE", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *select, *tests],
            env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest -k {expression!r}: exit {done.returncode}\n{done.stdout[-800:]}")
    return done.returncode == 0


def judge(mutation: Mutation, tree: Path, scratch: Path, thorough: bool) -> str:
    """'caught', 'survived' or 'does not apply'."""
    package = Path(tempfile.mkdtemp(dir=scratch))
    try:
        shutil.copytree(tree / "tinygrad", package / "tinygrad", copy_function=os.link)
        target = package / mutation.file
        text = target.read_text()
        if text.count(mutation.old) != 1:
            return "does not apply"
        target.unlink()  # the tree's own file has another link to it
        target.write_text(text.replace(mutation.old, mutation.new))
        if not run_tests(package, mutation.tests):
            return "caught"
        if thorough and not run_tests(package, "", 4 * TIMEOUT):
            return "caught"
        return "survived"
    finally:
        shutil.rmtree(package)


def main() -> int:
    """Judge all mutations; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("tree", type=Path, help="a tree with all patches (tools/series checkout)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default: 2)")
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--from", dest="first", default="", help="mutations from this name on")
    parser.add_argument(
        "--quick", action="store_true", help="run only the tests that ought to fail"
    )
    options = parser.parse_args()
    if not (options.tree / TEGRA).is_file():
        parser.error(f"{options.tree}: has no {TEGRA}; make it with tools/series checkout")
    names = [m.what for m in MUTATIONS]
    if options.first and options.first not in names:
        parser.error(f"--from {options.first!r}: no mutation of that name")
    start = names.index(options.first) if options.first else 0
    chosen = [m for m in MUTATIONS[start:] if options.only in m.what]
    # Half of the time of a short test is Python's compiling; the copies share this.
    compileall.compile_dir(options.tree / "tinygrad", quiet=1)
    results: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(dir=options.tree.resolve().parent) as scratch,
        ThreadPoolExecutor(options.jobs) as pool,
    ):

        def one(mutation: Mutation) -> None:
            start = time.monotonic()
            verdict = judge(mutation, options.tree, Path(scratch), not options.quick)
            results[mutation.what] = verdict
            print(f"{verdict:15} {time.monotonic() - start:5.0f} s  {mutation.what}", flush=True)

        list(pool.map(one, chosen))
    caught = sum(verdict == "caught" for verdict in results.values())
    print(f"\n{caught} of {len(results)} caught")
    for what, verdict in results.items():
        if verdict != "caught":
            print(f"- {what}: {verdict}")
    stale = any(verdict == "does not apply" for verdict in results.values())
    return int(stale or caught < WANTED * len(results))


if __name__ == "__main__":
    sys.exit(main())
