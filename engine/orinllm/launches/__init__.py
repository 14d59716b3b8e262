"""One file an operation, as in cuda/: what is launched for it, with which constants and shape."""
