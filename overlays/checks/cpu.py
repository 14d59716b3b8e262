"""tinygrad computes on the CPU with the compiler and the libraries that the package names."""

from tinygrad import Device, Tensor

got = (Tensor([1.0, 2.0, 3.0], device="CPU").exp2() + 1).tolist()
assert got == [3.0, 5.0, 9.0], got
assert "CPU" in Device.DEFAULT, f"no GPU in a build, and yet the default is {Device.DEFAULT}"
