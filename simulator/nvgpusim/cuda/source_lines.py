"""Source lines of CUDA calls: a program's return addresses by its debugging information."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field

_STUB = "__device_stub__"
_WRAPPERS = ("cudaLaunchKernel", "__cudaLaunch", "__wrapper__")
_HEADERS = ("cuda_runtime.h", "crt/host_runtime.h", ".cudafe1.stub.c")
_UNKNOWN_FILE = ".cudafe1.cpp"
"""Lines of templates have nvcc's own file in the place of theirs: a caller's line says more."""


@dataclass
class SourceLines:
    """Source lines of one program, by addresses as its debugging information counts them."""

    program: str = ""
    known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def source_line(self, frames: tuple[int, ...]) -> str:
        """ "file:line" of the innermost frame that the user has written, "" where none is known."""
        frames = tuple(filter(None, frames))
        if not frames or not self.program:
            return ""
        if frames not in self.known:
            self.known[frames] = self._innermost_user_line(frames)
        return self.known[frames]

    def _innermost_user_line(self, frames: tuple[int, ...]) -> str:
        plain = f"{self.program}+{frames[0]:#x}"
        tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if tool is None:
            return plain
        command = [tool, "-e", self.program, "-f", "-C", *map(hex, frames)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        words = done.stdout.splitlines()
        after_stub, found = False, plain
        for name, place in zip(words[::2], words[1::2], strict=False):
            place = place.split(" (")[0]
            if name.startswith(_STUB):
                after_stub = True  # called by a function of the kernel's own name
                continue
            own = not name.startswith(_WRAPPERS) and not place.startswith("??")
            own &= not place.endswith((":?", ":0"))
            if own and not after_stub and not any(h in place for h in _HEADERS):
                found = place if found == plain else found
                if _UNKNOWN_FILE not in place:
                    return place
            after_stub = False
        return found
