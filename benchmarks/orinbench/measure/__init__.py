"""Timing: plans, rounds in fresh processes, clocks and power."""
