"""Write golden/llama_cpp.json: log-probabilities of the synthetic tiny models by llama.cpp.

Run with llama-cpp-python, which is no dependency of the tests, installed beside orinbench:
`python -m tests.benchmarks.check.llama_cpp_golden`. F32 weights and cache on a CPU, no flash
attention.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orinbench.synth import write_synthetic

GOLDEN = Path(__file__).parent / "golden/llama_cpp.json"
N_TOKENS = 96
# By shape: contexts that llama.cpp was given, on which longrope's factors depend.
CASES = {
    **dict.fromkeys(
        (
            *("tiny", "tiny-llama3", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3moe", "tiny-mixtral"),
            *("tiny-smollm3", "tiny-granite", "tiny-granitemoe", "tiny-gemma3", "tiny-yarn"),
            "tiny-gptoss",
        ),
        (512,),
    ),
    "tiny-phi3": (256, 512),
}
# Positions: within the windows of 24, at their border, beyond, and the last.
POSITIONS = (7, 23, 24, 25, 60, 95)


def prompt() -> list[int]:
    """Return the tokens of all cases; none is one of the special tokens at the end."""
    tokens: list[int] = np.random.default_rng(12).integers(0, 1019, N_TOKENS).tolist()
    return tokens


def logits(
    path: Path, context: int, halves: bool = False, tokens: list[int] | None = None
) -> NDArray[np.float64]:
    """Return llama.cpp's logits after each token of the prompt; keys and values may be halves."""
    import llama_cpp as llama  # type: ignore[import-not-found]

    tokens = tokens or prompt()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    options: Any = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = context, 512, 512
    options.type_k = options.type_v = int(halves)  # GGML_TYPE_F32 is 0, GGML_TYPE_F16 is 1
    options.flash_attn_type = 0
    session = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
    if llama.llama_decode(session, batch):
        raise SystemExit(f"{path}: llama_decode failed")
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    found = np.ctypeslib.as_array(llama.llama_get_logits(session), (len(tokens), n_vocab))
    return found.astype(np.float64)


def excerpt(of: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """Return log-probabilities of some tokens, likely and unlikely ones, at POSITIONS."""
    shifted = of - of.max(axis=-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return {
        str(position): {
            str(token): round(float(logprobs[position, token]), 6)
            for order in [np.argsort(-logprobs[position])]
            for token in (*order[:4], order[500], *order[-2:])
        }
        for position in POSITIONS
    }


def main() -> None:
    """Write the file."""
    golden: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape, contexts in CASES.items():
            path = Path(folder) / f"{shape}.gguf"
            write_synthetic(path, shape, "F32", 0)
            for context in contexts:
                golden[f"{shape} {context}"] = excerpt(logits(path, context))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
