"""Number of multiprocessors that the driver has switched on: nvgpu's TPC masks."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable

from orinboard.files import Roots
from orinboard.sensors.gpu import SMS_PER_TPC

#: _IOWR('G', 10, struct nvgpu_gpu_get_tpc_masks_args) (nvgpu uapi nvgpu-ctrl.h).
GET_TPC_MASKS = 0xC010470A
#: More GPCs than any chip behind this interface has; the driver fills what it has.
MAX_GPCS = 16
#: The current name of the control node, and the one of older releases.
CONTROL_NODES = ("dev/nvgpu/igpu0/ctrl", "dev/nvhost-ctrl-gpu")


class TpcMasksArgs(ctypes.Structure):
    """struct nvgpu_gpu_get_tpc_masks_args: 16 bytes."""

    _fields_ = (
        ("mask_buf_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("mask_buf_addr", ctypes.c_uint64),
    )


Ioctl = Callable[[int, int, TpcMasksArgs], int]


def call_ioctl(fd: int, request: int, args: TpcMasksArgs) -> int:
    """ioctl(2); raises OSError."""
    return int(fcntl.ioctl(fd, request, args, True))


def sm_count(roots: Roots, call: Ioctl = call_ioctl) -> int | None:
    """Multiprocessors switched on; None without a device that this user may open.

    Opening the node powers the GPU on, so a benchmark asks and an exporter does not. Raises
    OSError when the driver refuses the question.
    """
    for node in CONTROL_NODES:
        try:
            fd = os.open(roots.path_on_disk(node), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            masks = (ctypes.c_uint32 * MAX_GPCS)()
            args = TpcMasksArgs(ctypes.sizeof(masks), 0, ctypes.addressof(masks))
            # A positive result is a count of bytes that could not be copied to the masks.
            if call(fd, GET_TPC_MASKS, args) != 0:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT), node)
            gpcs = min(args.mask_buf_size // 4, MAX_GPCS)
            return sum(mask.bit_count() for mask in masks[:gpcs]) * SMS_PER_TPC
        finally:
            os.close(fd)
    return None
