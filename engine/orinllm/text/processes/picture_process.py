"""The process that decodes pictures, `python -m` with SECONDS and MEMORY (job_loop.py).

A few bytes may be a picture of gigabytes, and decoders have faults; either ends this process alone.
"""

import base64
from collections.abc import Mapping
from typing import Any

from orinllm.errors import BadInput
from orinllm.network.vision.prepare import tiles_and_grid
from orinllm.text.processes.job_loop import answer_jobs_until_eof


def _answer_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tiles of a job's picture, or what is wrong with it."""
    try:
        tiles, grid = tiles_and_grid(base64.b64decode(job["data"]), job["way"], job["sizes"])
    except BadInput as error:
        return {"error": str(error)}
    raw = [[tile.height, tile.width, base64.b64encode(tile.tobytes()).decode()] for tile in tiles]
    return {"tiles": raw, "grid": grid}


if __name__ == "__main__":
    answer_jobs_until_eof(lambda job, size: _answer_job(job))
