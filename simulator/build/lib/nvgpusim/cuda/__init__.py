"""CUDA programs on the interpreter, unchanged: stand-ins for libcudart and libcuda."""
