"""The fused path: kernels, their launches, and the memory that they share."""
