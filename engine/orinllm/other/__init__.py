"""Models that neither the fused nor the CPU path knows."""
