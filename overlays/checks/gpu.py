"""Patched tinygrad reaches the board's GPU and computes on it."""

import sys

from tinygrad import Device, Tensor

device = Device.DEFAULT
if device not in ("NV", "CUDA"):
    sys.exit(f"tinygrad's default device is {device}: no GPU was found (is /dev/nvgpu here?)")
left, right = Tensor.randn(256, 256).realize(), Tensor.randn(256, 256).realize()
error = ((left @ right).to("CPU") - left.to("CPU") @ right.to("CPU")).abs().max().item()
if error > 1e-3:
    sys.exit(f"{device}: a 256x256 matmul is off by {error} from the CPU's")
print(f"{device}: a 256x256 matmul agrees with the CPU's within {error:.1e}")
