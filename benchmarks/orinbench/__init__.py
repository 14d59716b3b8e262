"""Benchmarks of tinygrad and llama.cpp on one GGUF file, interleaved in one run."""
