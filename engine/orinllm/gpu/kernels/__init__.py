"""The launches of each operation, a file each as in cuda/: constants, grid, buffers."""
