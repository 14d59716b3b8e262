"""The identity of a model's file: size, digest, family and kind, as Ollama's clients show them."""

import hashlib
import re
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from orinllm.file.gguf import GGUF

# general.file_type, llama.cpp's llama_ftype (include/llama.h).
_KINDS: dict[object, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FileIdentity:
    """A model's file, or its parts.

    size: bytes. modified: Unix seconds. family: the architecture. parameters: number of weights.
    kind: of its quantization, "unknown" if the file does not say a known one.
    """

    paths: tuple[Path, ...] = ()
    size: int = 0
    modified: float = 0.0
    family: str = "unknown"
    parameters: int = 0
    kind: str = "unknown"
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @staticmethod
    def of_gguf(gguf: GGUF) -> "FileIdentity":
        """Read what is known of a file without reading it whole."""
        paths = gguf.paths
        found = [path.stat() for path in paths]
        return FileIdentity(
            paths,
            sum(stat.st_size for stat in found),
            max(stat.st_mtime for stat in found),
            str(gguf.metadata.get("general.architecture", "unknown")),
            sum(tensor.n_elements for tensor in gguf.tensors.values()),
            _KINDS.get(gguf.metadata.get("general.file_type", -1), "unknown"),
        )

    @property
    def parameter_count_text(self) -> str:
        """The number of weights as Ollama writes it: 134.52M, 8.0B."""
        large = self.parameters >= 10**9
        return f"{self.parameters / (10**9 if large else 10**6):.{1 if large else 2}f}" + (
            "B" if large else "M"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, hexadecimal: the first call reads the file, which takes a while."""
        with self._lock:
            return self._digest_without_lock

    @cached_property
    def _digest_without_lock(self) -> str:
        # The hub's store names a file by its digest, which was checked when it came.
        if len(self.paths) == 1 and _SHA256.fullmatch(name := self.paths[0].resolve().name):
            return name
        digest = hashlib.sha256()
        for path in self.paths:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()
