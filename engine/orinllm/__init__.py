"""The language model engine of tinygrad-orin: GGUF models on tinygrad's runtime."""
