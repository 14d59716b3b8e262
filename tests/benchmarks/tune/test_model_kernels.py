"""The kernels of a real model, in a process of its own: met, counted, addressed."""

import json
import os
import subprocess
import sys
from pathlib import Path

from orinbench.benchmark.tinygrad_backend import worker_environment

SCRIPT = """
import json, sys
from collections import Counter
from orinbench.tune import kernels as K

# As on CUDA and NV: the model has hand-written kernels, which take whatever reaches them.
loaded = K.Transformer.from_gguf
def with_kernels_by_hand(*arguments, **options):
  model, metadata = loaded(*arguments, **options)
  model.fused = type("Fused", (), {"forward": lambda _, ids, *at: K.Tensor([[7]], dtype="int32")})()
  return model, metadata
K.Transformer.from_gguf = with_kernels_by_hand
met, by_hand = K.model_kernels(sys.argv[1], 64, 32, True)
names = {d: k.name for d, k in met.items()}
sums = Counter()
for kernel in met.values(): sums.update(kernel.launches)
kernel = max(met.values(), key=lambda k: k.launches["token"])
bench = K.Bench()
before, after = bench.compare(kernel, kernel.optimized(()))
print(json.dumps({"names": names, "launches": sums, "by_hand": by_hand,
  "samples": len(before) + len(after), "allocated": sum(b.is_allocated() for b in kernel.buffers)}))
"""


def test_kernels_of_a_model(least_path: Path, tmp_path: Path) -> None:
    """Each launch of a token and of a prompt is one of the general path's kernels, whatever other
    path the model has."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(least_path)],
        env=os.environ
        | worker_environment("CPU", tmp_path)
        | {"JITBEAM": "1", "CACHEDB": str(tmp_path / "cache.db")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["names"]) > 15 and all(len(digest) == 64 for digest in said["names"])
    # A layer of a dozen and a half kernels, embedding, head and sampling.
    assert said["launches"]["token"] > 15 and said["launches"]["prompt"] > 15
    assert said["by_hand"] == 0
    assert said["samples"] >= 16
    assert said["allocated"] == 0
