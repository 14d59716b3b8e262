"""The process that counts tinygrad's rewrites: `TRACK_MATCH_STATS=1 python -m ... MODEL`.

Prints one line of JSON about one way from Tensor to rendered kernels.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tinygrad.engine.realize import compile_linear
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import match_stats

from orinbench.suite.schedule_models import MODELS

_SLOWEST = 5


def summary(stats: dict[Any, list[float]]) -> dict[str, Any]:
    """Return the sums and the slowest rules of tinygrad's table.

    Its values are matches, attempts, seconds of attempts in vain, and seconds of matches.
    """
    slowest = sorted(stats.items(), key=lambda item: -item[1][2] - item[1][3])[:_SLOWEST]
    return {
        "rules": len(stats),
        "rules_matched": sum(row[0] > 0 for row in stats.values()),
        "matches": int(sum(row[0] for row in stats.values())),
        "attempts": int(sum(row[1] for row in stats.values())),
        "ms": 1e3 * sum(row[2] + row[3] for row in stats.values()),
        "slowest": [
            {
                "rule": f"{Path(pattern.location[0]).name}:{pattern.location[1]}",
                "matches": int(row[0]),
                "attempts": int(row[1]),
                "ms": 1e3 * (row[2] + row[3]),
            }
            for pattern, row in slowest
        ],
    }


def main(name: str) -> None:
    """Count for one model."""
    model = MODELS[name]()
    match_stats.clear()  # what the weights took
    compile_linear(Tensor.linear_with_vars(model.graph())[0])
    print("\n" + json.dumps(summary(match_stats)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
