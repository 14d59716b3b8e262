"""Checks of accesses while a kernel runs: races, unwritten memory, barriers, bounds."""
