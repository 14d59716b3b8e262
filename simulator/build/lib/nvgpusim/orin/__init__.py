"""The Orin's kernel model: nvgpu, nvmap and the rings of its GPU, by L4T release."""
