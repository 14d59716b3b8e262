"""Texts that a model's vocabulary cuts into a wanted number of tokens."""

import random
from functools import cache
from pathlib import Path

from orinbench.measure.backends.backend import CaseLeftOutError
from orinllm.errors import BadInput
from orinllm.file.gguf import GGUF
from orinllm.text.tokenizer import Tokenizer

_WORDS = (
    "the of and to in is that it was for on are as with they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time could"
)
# Filler appended to the words until the count is right: each is one token in most vocabularies.
_FILLERS = (".", "!", "?", "\n", " a", " I", ",", "x", "1")


@cache
def tokenizer_of(path: Path) -> Tokenizer:
    """Return a file's tokenizer; raises BadInput for a vocabulary that is missing or not known."""
    return Tokenizer.from_metadata(GGUF.open(path).metadata)


def tokenize_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's tokens as a prompt has them, with the one that begins it."""
    start = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return start + tokenizer.encode(text)


def random_prompt_text(path: Path, n_tokens: int, seed: int) -> str:
    """Return words drawn by `seed` that are a prompt of exactly `n_tokens` tokens.

    Raises CaseLeftOutError where there is none: no vocabulary known here, or too few tokens.
    """
    try:
        tokenizer = tokenizer_of(path)
    except BadInput as error:
        raise CaseLeftOutError(str(error)) from None

    def count(text: str) -> int:
        return len(tokenize_prompt(tokenizer, text))

    words = random_words_text(n_tokens, seed).split()
    low, high = 0, len(words)  # words of which there are surely not too many; at most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if count(" ".join(words[:middle])) <= n_tokens else (low, middle - 1)
        )
    text = " ".join(words[:low])
    while (have := count(text)) < n_tokens:
        longer = next((text + end for end in _FILLERS if count(text + end) == have + 1), None)
        if longer is None:
            break
        text = longer
    if not text or have != n_tokens:
        raise CaseLeftOutError(f"no text has {n_tokens} tokens in this vocabulary")
    return text


def random_words_text(n_words: int, seed: int) -> str:
    """Return so many words, drawn by `seed`."""
    return " ".join(random.Random(seed).choices(_WORDS.split(), k=n_words))
