"""Jinja in a process of its own, which a template may exhaust without harm (jinja_process.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from orinllm.text.processes.child import Child


class Renderer(Child):
    """Renders templates; one for a process is enough, and threads may share it.

    A template may take `seconds` of CPU time, and all of them `memory` bytes.
    """

    def __init__(self, seconds: float = 3, memory: int = 1 << 30) -> None:
        super().__init__("orinllm.text.processes.jinja_process", seconds, memory)

    def run(self, job: Mapping[str, Any]) -> str:
        """Return what a template makes of variables; raises BadInput where it fails."""
        return str(self.run_job(job)["text"])


@functools.cache
def renderer() -> Renderer:
    """Return the renderer that all models of this process share."""
    return Renderer()
