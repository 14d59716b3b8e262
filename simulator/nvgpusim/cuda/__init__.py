"""CUDA programs on the simulator, unchanged: stand-ins for libcudart and libcuda."""
