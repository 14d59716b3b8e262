"""A kernel that loads 16 bytes from an address that 16 does not divide, as a GPU reports it."""

from tinygrad import Device
from tinygrad.device import BufferSpec
from tinygrad.runtime.ops_nv import NVProgram

SOURCE = """
extern "C" __global__ void odd_float4(float4* out, char* in) {
  out[threadIdx.x] = *(float4*)(in + 4);
}"""

device = Device["NV"]
program = NVProgram(device, "odd_float4", device.compiler.compile(SOURCE))
out, data = (device.allocator.alloc(4096, BufferSpec()) for _ in range(2))
program(out, data, global_size=(1, 1, 1), local_size=(32, 1, 1))
try:
    device.synchronize()
except RuntimeError as error:
    print(error)
