"""Launches of planted.cu's kernels, and the fault planted in each.

A buffer is "i:N" (N bytes from the host: 0, 1, 2, ... as int32), "z:N" (zeroed), "u:N" (fresh,
never written), "p:N/M" (M bytes, of which the host wrote the first N), "f:N" (freed before the
launch), "n" a null pointer; "s:V" is an int, "d:X" a float, "w" the address of a table with one
wild pointer.
"""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A launch: kernel, its fault ("" for none), arguments, block, grid, dynamic shared bytes."""

    kernel: str
    fault: str
    args: str
    block: str = "128"
    grid: int = 1
    shared: int = 0


CASES = [
    Case("race_reverse", "race", "i:512 u:512"),
    Case("race_reduce", "race", "i:1024 u:4", "256"),
    Case("race_war", "race", "i:256 u:256", "64"),
    Case("race_waw", "race", "u:512"),
    Case("race_warp", "race", "i:128 u:128", "32"),
    Case("race_warp_waw", "race", "u:128", "32"),
    Case("race_atomic_plain", "race", "i:512 u:512"),
    Case("race_tile", "race", "i:2048 i:2048 u:1024", "16,16"),
    Case("race_named", "race", "i:512 u:256"),
    Case("race_async", "race", "i:512 u:512"),
    Case("race_async_early", "race", "i:512 u:512"),
    Case("race_bytes", "race", "u:128"),
    Case("race_histogram", "race", "i:512 u:64"),
    Case("race_global_blocks", "race", "u:4", "32", 4),
    Case("race_global_shift", "race", "i:1024 s:256", "64", 4),
    Case("race_global_last", "race", "i:64 u:64 z:4 u:4", "32", 16),
    Case("init_global", "init", "u:1024 u:1024", "64", 4),
    Case("init_half", "init", "p:512/1024 u:1024", "64", 4),
    Case("init_tail", "init", "p:1020/1024 u:1024", "64", 4),
    Case("init_shared", "init", "u:256", "64"),
    Case("init_shared_all", "init", "u:256", "64", 1, 256),
    Case("init_local", "init", "i:256 u:256 s:5", "64"),
    Case("init_atomic", "init", "u:4", "32"),
    Case("sync_branch", "sync", "u:256", "64"),
    Case("sync_exit", "sync", "u:256", "64"),
    Case("sync_loop", "sync", "u:256", "64"),
    Case("sync_warp_mask", "sync", "u:128", "32"),
    Case("clean_warp_exit", "", "u:128", "32"),
    Case("sync_shfl", "sync", "u:128", "32"),
    Case("sync_named", "sync", "u:512"),
    Case("sync_count", "sync", "u:512 s:48"),
    Case("bounds_one", "bounds", "u:400 s:100", "64", 2),
    Case("bounds_read", "bounds", "i:512 u:512"),
    Case("bounds_far", "bounds", "i:256 u:256", "64"),
    Case("bounds_negative", "bounds", "u:512"),
    Case("bounds_vector", "bounds", "i:1020 u:256", "64"),
    Case("bounds_shared_dynamic", "bounds", "u:512", "128", 1, 512),
    Case("bounds_shared_static", "bounds", "u:256 s:64", "64"),
    Case("bounds_atomic", "bounds", "z:252", "64"),
    Case("bounds_misaligned", "bounds", "i:1024 u:256", "64"),
    Case("bounds_null", "bounds", "n u:256", "64"),
    Case("bounds_async", "bounds", "i:512 u:512"),
    Case("bounds_wild", "bounds", "w i:4", "1"),
    Case("free_read", "free", "f:512 u:512"),
    Case("free_write", "free", "f:512"),
    Case("free_atomic", "free", "f:512", "64"),
    Case("clean_copy", "", "i:1024 u:1024", "64", 4),
    Case("clean_saxpy", "", "d:2.5 i:1000 i:1000 s:250", "64", 4),
    Case("clean_reverse", "", "i:512 u:512"),
    Case("clean_reduce", "", "i:1024 u:8", "256", 2),
    Case("clean_shuffle", "", "i:2048 u:8", "256", 2),
    Case("clean_warp", "", "i:512 u:16"),
    Case("clean_tile", "", "i:2048 i:2048 u:1024", "16,16"),
    Case("clean_histogram", "", "i:2048 z:64", "128", 4),
    Case("clean_last", "", "i:64 u:64 z:4 u:4", "32", 16),
    Case("clean_last_wide", "", "i:2048 u:2048 z:4 u:128", "32", 16),
    Case("clean_lock", "", "z:4 z:4", "32", 8),
    Case("clean_async", "", "i:1024 u:256", "64"),
    Case("clean_named", "", "i:256 u:256"),
    Case("clean_bytes", "", "i:128 u:128"),
    Case("clean_flag", "", "i:512 u:512"),
    Case("clean_guard", "", "i:400 u:400 s:100", "64", 2),
    Case("clean_transpose", "", "i:4096 u:4096", "32,8"),
    Case("clean_scan", "", "i:512 u:512"),
    Case("clean_sort", "", "i:512"),
    Case("clean_local", "", "i:320 u:256", "64"),
    Case("clean_divergent", "", "i:512 u:512"),
    Case("clean_stride", "", "i:4000 u:4000 s:1000", "64", 4),
    Case("clean_vector", "", "i:1024 u:1024", "64"),
    Case("clean_uniform", "", "i:256 u:256 s:1", "64"),
    Case("clean_stencil", "", "i:264 u:256", "64"),
    Case("clean_count", "", "i:512 u:512"),
    Case("clean_ballot", "", "i:512 u:512 z:4"),
    Case("clean_half_warps", "", "i:128 u:128", "32"),
    Case("clean_warp_meet", "", "i:128 u:128", "32"),
    Case("clean_blocks_flag", "", "i:256 u:256 z:4 u:256", "64", 2),
    Case("clean_dynamic", "", "i:256 u:256", "64", 1, 256),
    Case("clean_match", "", "i:512 z:16"),
    Case("clean_odd_end", "", "i:77 u:77", "32", 3),
    Case("clean_own", "", "u:1024", "64", 4),
    Case("clean_mma", "", "i:512 i:512 u:512", "32"),
    Case("clean_fresh", "", "u:1024 u:1024", "64", 4),
    Case("clean_same_value", "", "i:512 u:512"),
]
