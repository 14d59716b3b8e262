"""Ask a model: python3 docs/examples/ask.py [MODEL.gguf]."""

import sys

from orinllm.choose.sampling import Sampling
from orinllm.model import Model

MODEL = ".venv/SmolLM2-135M-Instruct.Q4_1.gguf"


def print_answer() -> None:
    """Print an answer while it grows, and how it ended."""
    model = Model.load(sys.argv[1] if len(sys.argv) > 1 else MODEL, context=1024)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = model.generate(messages, Sampling(temperature=0), max_tokens=64)
    for piece in answer:
        print(piece.text, end="", flush=True)
    print(f"\n{len(answer.tokens)} tokens, ended by: {answer.finish_reason}")


if __name__ == "__main__":
    print_answer()
