# ruff: noqa: E501 - findings stay on one line
"""The sanitizer as its user meets it: nvgpusim --strict over a program that launches kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from tinygrad import Device, Tensor
dev = Device[Device.DEFAULT]
def kernel(src, *bufs):
    code = dev.compiler.compile('extern "C" __global__ void k' + src)
    dev.runtime("k", code)(*bufs, global_size=(1, 1, 1), local_size=(64, 1, 1), wait=True)
def buffer(t):
    return t.uop.buffer._buf
given = Tensor([float(n) for n in range(64)]).realize()
out = Tensor.zeros(64).contiguous().realize()
kernel("(float *o, const float *i) { o[threadIdx.x] = i[threadIdx.x]; }", buffer(out), buffer(given))
if MORE:
    kernel("(float *o, const float *i) { o[threadIdx.x] = i[threadIdx.x + 64]; }", buffer(out), buffer(given))
    kernel("(float *o, const float *i) { __shared__ float s[64]; s[threadIdx.x] = i[threadIdx.x];"
           " o[threadIdx.x] = s[63 - threadIdx.x]; }", buffer(out), buffer(given))
    fresh = Tensor.empty(48).contiguous().realize().uop.buffer.ensure_allocated()
    kernel("(float *o, const float *i) { o[threadIdx.x] = i[threadIdx.x % 48]; }", buffer(out), fresh._buf)
    gone = fresh._buf
    fresh.deallocate()
    kernel("(float *o, const float *i) { o[threadIdx.x] = i[threadIdx.x % 48]; }", buffer(out), gone)
"""


def run(folder: Path, more: bool, *flags: str) -> tuple[int, list[str], str]:
    """Exit status, notes and stderr of the script under nvgpusim."""
    script, report = folder / "script.py", folder / "report.jsonl"
    script.write_text(SCRIPT.replace("MORE", str(more)))
    env = os.environ | {"DEV": "TEGRA+NV", "NVGPUSIM_CACHE": str(folder), "CACHELEVEL": "0"}
    argv = [sys.executable, "-m", "nvgpusim", *flags, "--report", str(report), "--", str(script)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    entries = [json.loads(line) for line in report.read_text().splitlines() if line]
    return done.returncode, [n for e in entries for n in e["notes"]], done.stderr


def test_four_faults_in_a_program(tmp_path: Path) -> None:
    status, notes, err = run(tmp_path, True, "--strict")
    assert status == 3, err
    kinds = [re.match(r"kernel k: (\w+): ", note) for note in notes]
    assert [k and k.group(1) for k in kinds] == ["bounds", "race", "init", "free"], notes
    assert re.search(
        r"is 0 bytes after the end of buffer \(256 bytes at .*, made at .*script.py:\d+", notes[0]
    )
    assert re.search(
        r"\+0 in buffer \(192 bytes at .*script.py:\d+.* nobody has written it", notes[2]
    )
    assert re.search(r"freed at .*script.py:\d+", notes[3])


def test_a_right_program_has_none(tmp_path: Path) -> None:
    status, notes, err = run(tmp_path, False, "--strict", "--warps", "--seed", "5")
    assert (status, notes) == (0, []), err


def test_bad_lists_are_refused() -> None:
    argv = [sys.executable, "-m", "nvgpusim", "--sanitize", "race,heap", "--", "-c", ""]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "nvgpusim: error: --sanitize heap: expected some of race,init,sync,bounds, or all"
    )
