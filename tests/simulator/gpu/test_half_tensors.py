"""tinygrad's operations on halves, through the driver: against numpy's float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.patches.conftest import COMPILERS, CUDA_HEADER, tinygrad_root, wheel_file

SCRIPT = """
import json
import numpy as np
from tinygrad import Tensor
x = np.linspace(0.1, 4, 64).astype(np.float16)
t, v = Tensor(x), x.astype(np.float64)
pairs = {
  "exp2": (t.exp2(), np.exp2(v)), "log2": (t.log2(), np.log2(v)), "sqrt": (t.sqrt(), np.sqrt(v)),
  "sin": (t.sin(), np.sin(v)), "rsqrt": (t.rsqrt(), 1 / np.sqrt(v)),
  "reciprocal": (t.reciprocal(), 1 / v), "sigmoid": (t.sigmoid(), 1 / (1 + np.exp(-v))),
  "tanh": (t.tanh(), np.tanh(v)), "softmax": (t.softmax(), np.exp(v) / np.exp(v).sum()),
  "exp": (t.exp(), np.exp(v)), "add": (t + t, v + v),
}
print(json.dumps({k: [str(a.dtype), float(np.abs(a.numpy() - w).max() / max(1, np.abs(w).max()))]
                  for k, (a, w) in pairs.items()}))
"""
CLOSE = 2.0**-9
"""Two roundings of a half at 1: tanh and sigmoid take several operations."""


def test_operations_on_halves(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(SCRIPT)
    environment = os.environ | {k: str(wheel_file(v)) for k, v in COMPILERS.items()}
    environment |= {"CUDA_PATH": str(wheel_file(CUDA_HEADER).parents[1]), "DEV": "NV"}
    environment |= {"PYTHONPATH": str(tinygrad_root()), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "nvgpusim", "--quiet", "--", sys.executable, "halves.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 11
    assert {kind for kind, _ in found.values()} == {"dtypes.half"}
    assert {name: far for name, (_, far) in found.items() if far > CLOSE} == {}
