"""PTX text to modules, kernels and instructions."""
