"""Work of a channel that may have to wait: a generator that says what it waits for.

It yields "blocked" (an acquire that fails, an engine that is busy), "lag" (the adversary holds it
back) or "more" (let others run), and goes on where it was when the scheduler resumes it.
"""

from __future__ import annotations

from collections.abc import Generator

Steps = Generator[str, None, None]
Work = Steps | tuple[()]
"""Result of a method: steps that may have to wait, or DONE."""
DONE = ()
