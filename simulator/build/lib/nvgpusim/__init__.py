"""A strict, adversarial model of nvgpu, nvmap and of SM 8.7 execution."""
