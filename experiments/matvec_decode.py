#!/usr/bin/env python3
"""Time a whole model with two trees of tinygrad, in turns: stock and patched.

    orinbench synth --shape 1b --quant Q6_K 1b.gguf
    matvec_decode.py 1b.gguf --stock DIR --patched DIR --devices CUDA CUDA:PTX

The model is tinygrad's own Transformer; each tree and renderer has a process of its own. It needs
the trees and numpy alone, and decodes the same tokens with each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def decode_worker(args: argparse.Namespace) -> None:
    """Load the model; for each line on stdin decode so many tokens; answer in JSON lines."""
    from tinygrad import Device, Tensor, UOp
    from tinygrad.llm.model import Transformer

    model, _ = Transformer.from_gguf(args.model, args.context)
    position = UOp.variable("start_pos", 0, args.context - 1)
    temperature = Tensor(0.0).contiguous()
    token, start = Tensor([[1]], dtype="int32").contiguous().realize(), 0
    device = Device[Device.DEFAULT]
    for line in sys.stdin:
        seconds, tokens = [], []
        for _ in range(int(line)):
            begin = time.perf_counter()
            token = model(token, position.bind(start), temperature).realize()
            tokens.append(int(token.item()))
            device.synchronize()
            seconds.append(time.perf_counter() - begin)
            start = (start + 1) % (args.context - 1)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


@dataclasses.dataclass
class Worker:
    """One process with one tree and one renderer."""

    tree: str
    dev: str
    process: subprocess.Popen[str]
    seconds: list[float]
    tokens: list[int]

    def ask(self, count: int) -> list[float]:
        """Decode `count` tokens; their seconds."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{count}\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(f"{self.tree} on {self.dev}: the worker died, see above")
        answer = json.loads(line)
        self.tokens += answer["tokens"]
        return list(answer["seconds"])


def print_decode(args: argparse.Namespace) -> None:
    """Decode with both trees and every renderer in turns; print a table and the ratio."""
    trees = {"stock": args.stock, "patched": args.patched}
    workers = []
    command = [sys.executable, __file__, str(args.model), "--context", str(args.context)]
    command.append("--worker")
    for dev in args.devices:
        for name, tree in trees.items():
            environment = os.environ | {"PYTHONPATH": str(tree.resolve()), "DEV": dev}
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            workers.append(Worker(name, dev, process, [], []))
    try:
        for worker in workers:
            begin = time.perf_counter()
            # Two tokens compile and capture, the third is the first replay.
            worker.ask(args.warmup)
            took = time.perf_counter() - begin
            print(f"{worker.tree} {worker.dev}: warm after {took:.1f} s", file=sys.stderr)
        rng = random.Random(args.seed)
        for _ in range(args.rounds):
            for worker in rng.sample(workers, len(workers)):
                worker.seconds += worker.ask(args.tokens)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    _print_decode_table(args, workers)


def _print_decode_table(args: argparse.Namespace, workers: Sequence[Worker]) -> None:
    count = args.rounds * args.tokens
    print(f"{args.model.name}, {count} tokens of each, in turns\n")
    print(
        "| device | tree | median ms/token | quartiles | tok/s |\n| --- | --- | --- | --- | --- |"
    )
    medians: dict[tuple[str, str], float] = {}
    for w in workers:
        low, median, high = statistics.quantiles(w.seconds, n=4, method="inclusive")
        medians[w.dev, w.tree] = median
        cells = (f"{median * 1e3:.3f}", f"{low * 1e3:.3f}-{high * 1e3:.3f}", f"{1 / median:.1f}")
        print(f"| {w.dev} | {w.tree} | {' | '.join(cells)} |")
    print()
    by_key = {(w.dev, w.tree): w for w in workers}
    for dev in args.devices:
        ratio = medians[dev, "stock"] / medians[dev, "patched"]
        ours, theirs = by_key[dev, "patched"].tokens, by_key[dev, "stock"].tokens
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        word = "all tokens equal" if same is None else f"tokens equal up to number {same}"
        print(f"{dev}: patched is {ratio:.2f} times as fast; {word}")


def main(argv: Sequence[str] | None = None) -> int:
    """Decode; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--stock", type=Path, help="a tree of tinygrad without the patch")
    parser.add_argument("--patched", type=Path, help="a tree with it")
    parser.add_argument("--devices", nargs="+", default=["CUDA", "CUDA:PTX"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16, help="of each round")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of the order in a round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        decode_worker(args)
        return 0
    if not args.model.is_file():
        parser.error(f"{args.model}: no such file; want a GGUF")
    for name in ("stock", "patched"):
        tree = getattr(args, name)
        if tree is None or not (tree / "tinygrad").is_dir():
            parser.error(f"--{name} {tree}: want a folder that holds tinygrad/")
    if args.rounds < 1 or args.tokens < 2:
        parser.error("want --rounds 1 or more and --tokens 2 or more")
    print_decode(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
