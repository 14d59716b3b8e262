"""Runs language models from GGUF files on tinygrad's devices."""
