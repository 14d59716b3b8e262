"""Answers like llama-bench 0.5.0 (build 0c1e570); called with its own path, then the arguments.

FAKE_LLAMA_BENCH: empty (answers), fail, silent, garbage, array, hang, or short (one sample less).
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

# The real binary's output for a tiny model, without the fields for time and speed.
RECORD = {
    "build_commit": "0c1e570",
    "build_number": 1,
    "cpu_info": "AMD EPYC",
    "gpu_info": "",
    "backends": "CPU",
    "model_type": "llama ?B Q6_K",
    "model_size": 1187840,
    "model_n_params": 1443072,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
    "flash_attn": -1,
    "devices": "auto",
}


def main() -> None:
    """Print one record with as many samples as -r asks for."""
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    with path.with_name("argv.log").open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    mode = os.environ.get("FAKE_LLAMA_BENCH", "")
    if mode == "fail":
        print("llama_bench: error: failed to load model 'x'", file=sys.stderr)
        sys.exit(1)
    if mode == "silent":
        sys.exit(1)
    if mode == "hang":
        time.sleep(60)
    if mode == "garbage":
        print("not json")
        return
    if mode == "array":
        print("[1]")
        return
    value = dict(itertools.pairwise(arguments))
    prompt, _, gen = value.get("-pg", f"{value['-p']},{value['-n']}").partition(",")
    count = int(value["-r"]) - (mode == "short")
    samples = [2_000_000] + [1_000_000] * (count - 1)
    record = RECORD | {
        "model_filename": value["-m"],
        "n_prompt": int(prompt),
        "n_gen": int(gen),
        "n_depth": int(value.get("-d", 0)),
        "samples_ns": samples,
    }
    if "-ngl" in value:
        record["n_gpu_layers"] = int(value["-ngl"])
    print(json.dumps([record]))


if __name__ == "__main__":
    main()
