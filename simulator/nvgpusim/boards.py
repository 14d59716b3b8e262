"""The modules that `--board` knows: another one is another row."""

BOARDS: dict[str, tuple[int, int]] = {
    "agx64": (8, 64),
    "agx32": (7, 32),
    "nx16": (4, 16),
    "nano8": (4, 8),
    "nano4": (2, 4),
}
"""Jetson Orin modules: enabled TPCs (of 2 GPC x 4), GiB of memory [NVIDIA product data]."""
