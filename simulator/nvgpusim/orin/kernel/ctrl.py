"""The control device: what the GPU is, and where everything else is opened from [K36 ioctl_ctrl.c].

Values of ga10b come from the r36 hal (hw_proj_ga10b.h) and NVIDIA's product data; clocks and cache
sizes are those of an AGX Orin 64 GB.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, ClassVar

from ... import l2
from .. import context_switch
from ..abi import StructBytes
from .address_space import AsFile
from .channel import ChannelFile
from .device_file import DeviceFile, ioctl_handler
from .ga10b import JETPACK7, MAX_GPCS, SMS_PER_TPC, TPCS_PER_GPC
from .tsg import TsgFile
from .usermode import SIZE as USERMODE_SIZE

if TYPE_CHECKING:
    from .core import Kernel

ENGINES = ((0, 0, 0), (1, 0, 0), (2, 0, 1), (2, 1, 2))
"""GET_ENGINE_INFO: (engine id, instance, runlist); 1 is the copy engine on the GR runlist."""
_FLAGS = [
    "HAS_SYNCPOINTS",
    "SUPPORT_SPARSE_ALLOCS",
    "SUPPORT_SYNC_FENCE_FDS",
    "SUPPORT_TSG",
    "SUPPORT_TSG_SUBCONTEXTS",
    "SUPPORT_CLOCK_CONTROLS",
    "SUPPORT_DETERMINISTIC_SUBMIT_NO_JOBTRACKING",
    "SUPPORT_IO_COHERENCE",
    "SUPPORT_DETERMINISTIC_SUBMIT_FULL",
    "SUPPORT_DETERMINISTIC_OPTS",
    "SUPPORT_SYNCPOINT_ADDRESS",
    "SUPPORT_USER_SYNCPOINT",
    "CAN_RAILGATE",
    "SUPPORT_USERMODE_SUBMIT",
    "SUPPORT_FAULT_RECOVERY",
    "SUPPORT_MAP_ACCESS_TYPE",
    "SUPPORT_2D",
    "SUPPORT_3D",
    "SUPPORT_COMPUTE",
    "SUPPORT_I2M",
    "SUPPORT_ZBC",
]


class CtrlFile(DeviceFile):
    """An open ctrl node."""

    kind, letter = "ctrl", "G"
    # the GL driver's open asks; nothing that runs here uses the geometry
    answers: ClassVar[dict[str, dict[str, int]]] = {
        "NVGPU_GPU_IOCTL_ZCULL_GET_CTX_SIZE": {"size": 0x10000},
        "NVGPU_GPU_IOCTL_ZCULL_GET_INFO": {
            "width_align_pixels": 32,
            "height_align_pixels": 32,
            "subregion_count": 16,
        },
    }

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.instance_id = kernel.spaces + id(self) % 4096

    def fd_for_mmap(self, length: int, offset: int) -> int:
        """The doorbell page."""
        usermode = self.kernel.usermode
        if id(self) in usermode.mapped_by:
            raise self.refusal("doorbell.busy")
        if length > USERMODE_SIZE:
            raise self.refusal("doorbell.length", f"{length:#x}")
        if offset:
            raise self.refusal("doorbell.offset", f"{offset:#x}")
        usermode.mapped_by.add(id(self))
        usermode.start_watching()
        return usermode.fd

    def _copy_out(self, address: int, room: int, data: bytes) -> int:
        """Copy to a second user buffer: the count of bytes not copied is the ioctl's result."""
        return self.kernel.user.copy_to_user(address, data[:room]) if room else 0

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_CHARACTERISTICS")
    def get_characteristics(self, args: StructBytes) -> int:
        """Fill what fits, say how large the whole is."""
        tables, shape = self.kernel.abi, self.kernel.shape
        out = tables.make_struct("nvgpu_gpu_characteristics")
        last, constants = tables.last, tables.constants
        flags = sum(constants[f"NVGPU_GPU_FLAGS_{name}"] for name in _FLAGS)
        if tables.profile == "r35":
            flags |= constants["NVGPU_GPU_FLAGS_SUPPORT_MAP_DIRECT_KIND_CTRL"]
        values = {
            "arch": 0x170,
            "impl": 0xB,
            "rev": 0xA1,
            "num_gpc": shape.gpc_mask.bit_count(),
            "numa_domain_id": -1,
            "L2_cache_size": 0x400000,
            "num_tpc_per_gpc": TPCS_PER_GPC,
            "bus_type": 32,
            "compression_page_size": 0x10000,
            "pde_coverage_bit_count": 21 if tables.profile in JETPACK7 else 47,
            "flags": flags,
            "twod_class": 0x902D,
            "threed_class": 0xC797,
            "compute_class": 0xC7C0,
            "gpfifo_class": 0xC76F,
            "inline_to_memory_class": 0xA140,
            "dma_copy_class": 0xC7B5,
            "gpc_mask": shape.gpc_mask,
            "sm_arch_sm_version": 0x807,
            "sm_arch_spa_version": 0x806,
            "sm_arch_warp_count": 96,
            "gpu_ioctl_nr_last": last["G"],
            "tsg_ioctl_nr_last": last["T"],
            "dbg_gpu_ioctl_nr_last": 32 if tables.profile == "r35" else 33,
            "ioctl_channel_nr_last": last["H"],
            "as_ioctl_nr_last": last["A"],
            "event_ioctl_nr_last": last["E"],
            "gpu_va_bit_count": 40,
            "max_fbps_count": 1,
            "fbp_en_mask": 1,
            "max_ltc_per_fbp": 2,
            "max_lts_per_ltc": 4,
            "max_gpc_count": MAX_GPCS,
            "num_ltc": 2,
            "lts_per_ltc": 4,
            "map_buffer_batch_limit": 256,
            "max_freq": 1_300_500_000,
            "graphics_preemption_mode_flags": 3,
            "compute_preemption_mode_flags": 7,
            "default_graphics_preempt_mode": 1,
            "default_compute_preempt_mode": context_switch.WFI,
            "local_video_memory_size": 0,
            "max_veid_count_per_tsg": 64,
            "max_gpfifo_entries": 1 << 28,
            "device_instance_id": self.instance_id,
            "hw_num_channels": 512,
        }
        for name, value in values.items():
            if name in out:
                out[name] = value
        chip = out.struct.fields["chipname"]
        out.raw[chip.offset : chip.offset + 5] = b"ga10b"
        room = args["gpu_characteristics_buf_size"]
        residue = self._copy_out(args["gpu_characteristics_buf_addr"], room, bytes(out.raw))
        args["gpu_characteristics_buf_size"] = out.struct.size
        self.note_rule("chars.size")
        return residue

    @ioctl_handler("NVGPU_GPU_IOCTL_ALLOC_AS")
    def alloc_as(self, args: StructBytes) -> None:
        """A new address space."""
        args["as_fd"] = self._give_fd_or_release(AsFile(self.kernel, args))

    @ioctl_handler("NVGPU_GPU_IOCTL_OPEN_TSG")
    def open_tsg(self, args: StructBytes) -> None:
        """A new TSG; shared ones need a token that GET_SHARE_TOKEN would give."""
        if "flags" in args:
            share, rest = args["flags"] & 1, any(args.raw[8:])
            if share or rest:
                raise self.refusal("tsg.share", "no such token" if share else "")
        args["tsg_fd"] = self._give_fd_or_release(TsgFile(self.kernel))

    @ioctl_handler("NVGPU_GPU_IOCTL_OPEN_CHANNEL")
    def open_channel(self, args: StructBytes) -> None:
        """A new channel: runlist id in, fd out."""
        args["out.channel_fd"] = self._give_fd_or_release(
            ChannelFile(self.kernel, args["in.runlist_id"])
        )

    def _give_fd_or_release(self, file: DeviceFile) -> int:
        try:
            return self.kernel.give_client_fd(file)
        except Exception:
            file.release()
            raise

    @ioctl_handler("NVGPU_GPU_IOCTL_FLUSH_L2")
    def flush_l2(self, args: StructBytes) -> None:
        """Write dirty lines of the L2 back and drop its lines; fb_flush alone does neither."""
        if args["l2_invalidate"] and not args["l2_flush"]:
            raise self.refusal("flush.invalidate")
        if not args["l2_flush"] and not args["fb_flush"]:
            raise self.refusal("flush.none")
        if args["l2_flush"]:
            l2.board_l2().flush(bool(args["l2_invalidate"]))

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_TPC_MASKS")
    def get_tpc_masks(self, args: StructBytes) -> int:
        """One u32 mask per GPC of the maximum."""
        data = struct.pack("<2I", *self.kernel.shape.tpc_masks)
        residue = self._copy_out(args["mask_buf_addr"], args["mask_buf_size"], data)
        args["mask_buf_size"] = len(data)
        return residue

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_FBP_L2_MASKS")
    def get_fbp_l2_masks(self, args: StructBytes) -> int:
        """One FBP with two L2 slices."""
        data = struct.pack("<I", 3)
        residue = self._copy_out(args["mask_buf_addr"], args["mask_buf_size"], data)
        args["mask_buf_size"] = len(data)
        return residue

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_PHYSICAL_MAP")
    def get_gpc_physical_map(self, args: StructBytes) -> None:
        """Local to physical GPC numbers: equal."""
        self._write_gpc_map(args, "physical_gpc_buf_addr")

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_GPC_LOCAL_TO_LOGICAL_MAP")
    def get_gpc_logical_map(self, args: StructBytes) -> None:
        """Local to logical GPC numbers: equal."""
        self._write_gpc_map(args, "logical_gpc_buf_addr")

    def _write_gpc_map(self, args: StructBytes, address: str) -> None:
        count = self.kernel.shape.gpc_mask.bit_count()
        data = struct.pack(f"<{count}I", *range(count))
        if args["map_buf_size"] != len(data):
            raise self.refusal("gpc.size", f"{args['map_buf_size']} for {count} GPCs")
        if self.kernel.user.copy_to_user(args[address], data):
            raise self.refusal("gpc.fault", f"{args[address]:#x}")

    @ioctl_handler("NVGPU_GPU_IOCTL_NUM_VSMS")
    def get_num_vsms(self, args: StructBytes) -> None:
        """Enabled SMs."""
        args["num_vsms"] = self.kernel.shape.sms

    @ioctl_handler("NVGPU_GPU_IOCTL_VSMS_MAPPING")
    def get_vsms_mapping(self, args: StructBytes) -> int:
        """GPC and TPC of each SM."""
        size = self.kernel.abi.structs["nvgpu_gpu_vsms_mapping_entry"].size
        data = b""
        for gpc, mask in enumerate(self.kernel.shape.tpc_masks):
            for tpc in range(mask.bit_count()):
                for sm in range(SMS_PER_TPC):
                    tpc_all = 4 * gpc + tpc
                    entry = bytes((gpc, tpc) if size == 2 else (gpc, gpc, tpc, tpc_all, sm, tpc))
                    data += entry.ljust(size, b"\0")
        return self._copy_out(args["vsms_map_buf_addr"], len(data), data)

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_ENGINE_INFO")
    def get_engine_info(self, args: StructBytes) -> int:
        """Items of 16 bytes; the size returned counts all of them."""
        data = b"".join(struct.pack("<IIiI", *engine, 0) for engine in ENGINES)
        room = args["engine_info_buf_size"] // 16 * 16
        residue = self._copy_out(args["engine_info_buf_addr"], room, data)
        args["engine_info_buf_size"] = len(data)
        self.note_rule("engine.size")
        return residue

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_GPU_TIME")
    def get_gpu_time(self, args: StructBytes) -> None:
        """PTIMER in nanoseconds."""
        args["gpu_timestamp"] = time.monotonic_ns()

    @ioctl_handler("NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO")
    def get_cpu_time_correlation(self, args: StructBytes) -> None:
        """Pairs of CPU and GPU time."""
        count, source = args["count"], args["source_id"]
        if count > 16:
            raise self.refusal("time.count", str(count))
        if source not in ((1,) if self.kernel.abi.profile == "r35" else (1, 2)):
            raise self.refusal("time.source", str(source))
        for i in range(count):
            cpu = time.monotonic_ns() if source == 1 else time.time_ns()
            struct.pack_into("<QQ", args.raw, 16 * i, cpu, time.monotonic_ns())
